"""Pages and tables, from rows."""
