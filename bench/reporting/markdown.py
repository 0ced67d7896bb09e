"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence


def number(value: float | None, decimals: int = 1) -> str:
    """A figure for people; a dash where there is none."""
    return "–" if value is None else f"{value:,.{decimals}f}"


def significant(value: float) -> str:
    """A figure with four digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], num_left: int = 1) -> list[str]:
    """Lines of a table.

    Args:
        header: names of the columns.
        rows: as many cells each.
        num_left: so many columns are text, the others figures.
    """
    rule = ["---" if index < num_left else "---:" for index in range(len(header))]
    return ["", *(_row(cells) for cells in (header, rule, *rows)), ""]


def code(text: str) -> list[str]:
    """Lines of a block of shell commands."""
    return ["", "```sh", text, "```", ""]


def folded(summary: str, lines: Iterable[str]) -> list[str]:
    """Lines behind a summary that opens."""
    return ["", f"<details><summary>{summary}</summary>", *lines, "</details>", ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
