"""The command ``python -m bench.peers``."""

from bench.peers.command import compare

# Guarded: vLLM's core is a spawned process, which imports this module anew.
if __name__ == "__main__":
    compare(prog_name="python -m bench.peers")
