"""Can CUDA graphs be kept across processes? The experiment, step by step; see README.md."""
