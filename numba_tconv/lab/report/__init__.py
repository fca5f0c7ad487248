"""Pages and tables, from rows alone."""
