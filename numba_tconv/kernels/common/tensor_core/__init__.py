"""What the rungs on tensor cores share."""
