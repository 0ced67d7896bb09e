"""The command ``python -m bench.fleet``."""

from bench.fleet.command import fleet

if __name__ == "__main__":
    fleet(prog_name="python -m bench.fleet")
