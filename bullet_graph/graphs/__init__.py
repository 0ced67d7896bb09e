"""CUDA graphs of decode steps, one for each batch size and SM partition."""
