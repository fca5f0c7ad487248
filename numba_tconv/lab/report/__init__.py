"""Tables and pages, made from rows alone."""
