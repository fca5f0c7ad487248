"""Steps of a stream: the outputs of a few new frames, in one launch."""
