"""Write the report of what was measured, with its pictures, out of JSON files alone.

    python bench/report.py            # bench/REPORT.md and bench/report/*.svg
    python bench/report.py --check    # are they what the files say?

Nothing in the report is typed by hand: what no file has is "not measured".
"""

import re
import sys
from pathlib import Path

import click

# Run as a script, only this file's own folder would be looked in.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.reporting.document import Report, make_report
from bench.reporting.evidence import read_evidence
from bullet_graph.cli.exits import EXIT_ERROR
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.errors import BulletGraphError, ConfigError

BENCH = Path(__file__).resolve().parent
_DRAWN_WITH = re.compile(rb"Matplotlib v[0-9.]+")
# Matplotlib's names of clip paths: digests of floats, whose last bit is another on another processor.
_CLIP_PATH = re.compile(rb"(?<=[\"#])p[0-9a-f]{10}(?=[\")])")


class _Refusal(click.ClickException):
    exit_code = EXIT_ERROR


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    default=BENCH / "results" / "h200",
    show_default="bench/results/h200",
    help="The folder with the JSON files.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=BENCH / "REPORT.md",
    show_default="bench/REPORT.md",
    help="The report; its pictures go into a folder beside it, of its name in small letters without the ending.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if report or pictures on disk are others.")
def main(results: Path, output: Path, check: bool) -> None:
    """Write the report of the measurements in a folder."""
    try:
        pictures = _picture_folder(output)
        report = make_report(read_evidence(results), _shown(results), pictures.name)
        if check:
            differences = _differences(report, output, pictures)
            for difference in differences:
                click.echo(difference, err=True)
            sys.exit(1 if differences else 0)
        _write(report, output, pictures)
    except BulletGraphError as error:
        raise _Refusal(str(error)) from error
    click.echo(f"{output}, {len(report.pictures)} pictures")


def _picture_folder(output: Path) -> Path:
    folder = output.with_name(output.stem.lower())
    if not output.suffix:
        raise ConfigError(f"--output {output}: a file name with an ending is required, such as REPORT.md")
    return folder


def _shown(folder: Path) -> str:
    """A folder as the report names it: the report is the same wherever the repository lies."""
    path = folder.resolve()
    return path.relative_to(BENCH.parent).as_posix() if path.is_relative_to(BENCH.parent) else path.name


def _write(report: Report, output: Path, folder: Path) -> None:
    check_result_file(output, overwrite=True, option="--output")
    try:
        if report.pictures:
            folder.mkdir(exist_ok=True)
        for name, picture in report.pictures.items():
            (folder / name).write_bytes(picture)
        output.write_text(report.markdown, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error


def _differences(report: Report, output: Path, folder: Path) -> list[str]:
    found = []
    if not output.is_file() or output.read_bytes() != report.markdown.encode():
        found.append(f"{output} is not what the files say: run python bench/report.py")
    for name, picture in report.pictures.items():
        path = folder / name
        if not path.is_file() or not _same_picture(path.read_bytes(), picture):
            found.append(f"{path} is not what the files say: run python bench/report.py")
    left = sorted(path for path in folder.glob("*.svg") if path.name not in report.pictures)
    return found + [f"{path} is of no comparison: remove it" for path in left]


def _same_picture(found: bytes, wanted: bytes) -> bool:
    """Whether two pictures are one; drawn by two releases of Matplotlib they differ whatever they show."""
    releases = {tuple(_DRAWN_WITH.findall(picture)) for picture in (found, wanted)}
    return _CLIP_PATH.sub(b"p", found) == _CLIP_PATH.sub(b"p", wanted) or len(releases) > 1


if __name__ == "__main__":
    main()
