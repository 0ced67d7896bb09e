"""The engine: requests in, scheduled steps to an executor, outputs back."""
