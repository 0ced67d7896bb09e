"""Benchmarks of the engine's kernels on one GPU."""
