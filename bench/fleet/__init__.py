"""Fleets of simulated machines that serve the same requests: shared machines beside prefill and decode divided.

Run it from the repository's root: ``python -m bench.fleet --help``.
"""
