"""Workloads: recorded traces and synthetic ones fitted to them."""
