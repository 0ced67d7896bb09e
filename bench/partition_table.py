"""Draw the partition tests' figures out of a GPU test report, as one table for each back end.

pytest tests/gpu --gpu-report bench/results/h200/gpu_tests.json
python bench/partition_table.py bench/results/h200/gpu_tests.json bench/results/h200/partitions.json
"""

import json
from pathlib import Path

import click

PREFIX = "tests/gpu/test_partition"
LANES = "test_each_lane_keeps_to_its_sms"


@click.command()
@click.argument("report", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
def main(report: Path, target: Path) -> None:
    """Write the partition figures of REPORT to TARGET."""
    source = json.loads(report.read_text(encoding="utf-8"))
    tests = [test for test in source["tests"] if test["test"].startswith(PREFIX)]
    failed = [test["test"] for test in tests if test["outcome"] != "passed"]
    if failed:
        raise click.ClickException(f"{report} has failed tests: {', '.join(failed)}")
    common = ("test", "outcome", "seconds")
    figures = {
        test["test"].partition("::")[2]: {name: value for name, value in test.items() if name not in common}
        for test in tests
    }
    table = {
        "sms_seen": [figure for name, figure in figures.items() if name.startswith(LANES)],
        "figures": {n: figure for n, figure in figures.items() if figure and not n.startswith(LANES)},
        "num_tests_passed": len(tests),
        "provenance": source["provenance"],
        "device": source["device"],
    }
    target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for row in table["sms_seen"]:
        click.echo(
            f"{row['backend']:>7} {row['decode_sms']:>4} SMs  eager {row['sms_seen_eager']['decode']}  "
            f"graph {row['sms_seen_graph']['decode']}  both {row['sms_seen_both_lanes_at_once']['decode']}"
        )


if __name__ == "__main__":
    main()
