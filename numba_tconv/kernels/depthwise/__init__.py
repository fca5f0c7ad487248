"""Few channels a group."""
