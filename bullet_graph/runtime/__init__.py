"""Executors: what carries a step out on a device, behind one protocol."""
