"""Benchmarks of single kernels and of a layer's parts; each is a command, run from the repository's root."""
