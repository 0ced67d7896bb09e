"""Join reports of `bench/policies.py` into one file, figures untouched.

    python bench/join_runs.py 25c9357:conv.json 509462f:code.json --output-json bench/results/h200/policies.json

Each report is given with the commit whose code it measured: a report that was made from a copy of a checkout without
its latest history names an older one, with changes on top.
"""

import json
from pathlib import Path

import click


@click.command()
@click.argument("reports", nargs=-1, required=True, metavar="COMMIT:FILE…")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(reports: tuple[str, ...], output_json: Path) -> None:
    """Write all reports as one JSON."""
    runs = []
    for text in reports:
        commit, _, name = text.partition(":")
        runs.append({"measured_commit": commit, **json.loads(Path(name).read_text(encoding="utf-8"))})
    output_json.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
