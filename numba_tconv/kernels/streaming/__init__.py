"""Steps of a stream: the outputs of a few new frames, from them and the last frames before, in one launch."""
