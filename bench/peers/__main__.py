"""The command ``python -m bench.peers``."""

from bench.peers.command import compare

# Guarded: The peers' cores are spawned processes, which import this module anew.
if __name__ == "__main__":
    compare(prog_name="python -m bench.peers")
