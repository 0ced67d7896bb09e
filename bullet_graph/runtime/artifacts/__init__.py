"""The parts of a capture cache: for each kind of artifact, who makes it and who uses it."""
