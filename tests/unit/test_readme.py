"""Documented commands are accepted: those of README.md, of the pages it links to, and of each ``--help``."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_runner import CONTEXT, find

from bullet_graph.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(p for room in ("bullet_graph", "bench", "capture") for p in (ROOT / room).rglob("*.md"))]
NAME = "bullet-graph"


def all_commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group, those of the program itself first."""
    yield path
    if isinstance(command, click.Group):
        for name in command.list_commands(CONTEXT):
            child = command.get_command(CONTEXT, name)
            assert child is not None
            assert child.name == name
            yield from all_commands(child, (*path, name))


def command_lines(text: str) -> list[str]:
    """The program's command lines in a text, continued ones put together."""
    return [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip().startswith(f"{NAME} ")]


def parse(line: str) -> None:
    """Parse a command line without running it, or raise UsageError; comments and redirections are the shell's."""
    words = shlex.split(line, comments=True)[1:]
    command, arguments = find(words[: words.index(">")] if ">" in words else words)
    assert not isinstance(command, click.Group), f"{line} names no command"
    command.make_context(line, arguments)


def page_lines() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in command_lines(block)]


@pytest.fixture(autouse=True)
def no_file_need_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click.Path, "convert", lambda _, value, *__: Path(value))


@pytest.mark.parametrize("line", page_lines())
def test_a_command_of_a_page_is_accepted(line: str) -> None:
    parse(line)


def test_the_pages_show_every_command() -> None:
    shown = {find(shlex.split(line, comments=True)[1:])[0] for line in page_lines()}
    commands = [find(list(path))[0] for path in all_commands()]
    assert {c.name for c in commands if not isinstance(c, click.Group)} == {c.name for c in shown}


@pytest.mark.parametrize("path", list(all_commands()), ids=lambda path: " ".join(path) or NAME)
def test_help_has_examples_that_are_accepted(path: tuple[str, ...]) -> None:
    lines = command_lines((find(list(path))[0].help or "").partition("Examples:\n")[2])
    assert lines
    for line in lines:
        assert line.startswith(" ".join((NAME, *path)))
        parse(line)


@pytest.mark.parametrize("line", [f"{NAME} bench throughput --model tiny", f"{NAME} doctor --nonesuch"])
def test_a_wrong_command_is_not_accepted(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
