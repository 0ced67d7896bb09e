"""The same requests, at the same times, to several serving systems: this engine, vLLM, SGLang, OpenAI-compatible
servers.

Run it from the repository's root: ``python -m bench.peers --help``.
"""
