"""The rungs that compute the forward pass, one file or one folder each."""
