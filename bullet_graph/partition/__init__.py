"""SM partitions: which multiprocessors each lane may use."""
