"""What several rungs share."""
