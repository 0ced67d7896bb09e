"""``bullet-graph capture list``, ``show`` and ``verify``: what is in a store, and whether it is whole."""

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bullet_graph.captures.entry import Entry
from bullet_graph.captures.fingerprint import Difference
from bullet_graph.captures.manifest_file import manifest_bytes
from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.store_options import (
    age_text,
    cache_dir_option,
    find_entry,
    json_option,
    plain,
    size_text,
    title,
)

_EXIT_DAMAGED = 1


@click.command("list")
@cache_dir_option
@json_option
def list_(store: CaptureStore, as_json: bool) -> None:
    """List the captures in the store, and whether they fit this machine.

    \b
    Examples:
      bullet-graph capture list
      bullet-graph capture list --cache-dir /mnt/captures --json
    """
    entries, damaged = store.entries()
    rows = [_row(entry) for entry in entries]
    if as_json:
        page = {
            "cache_dir": str(store.root),
            "entries": rows,
            "damaged": [{"entry_id": entry.entry_id, "problem": entry.problem} for entry in damaged],
        }
        click.echo(json.dumps(page, indent=2, allow_nan=False))
        return
    if not entries and not damaged:
        click.echo(f"There are no captures in {store.root}.")
        return
    table = Table(title=f"Captures in {store.root}", title_justify="left")
    table.add_column("entry", no_wrap=True)
    for name in ("for", "size", "built in", "last used", "this machine"):
        table.add_column(name, overflow="fold")
    for entry, row in zip(entries, rows, strict=True):
        differs = [difference["component"] for difference in row["differences"]]
        table.add_row(
            *plain(
                (
                    entry.entry_id,
                    title(entry),
                    size_text(row["num_bytes"]),
                    f"{row['build_seconds']:.1f} s",
                    age_text(entry.last_used),
                    _fit(differs, entry),
                )
            )
        )
    for broken in damaged:
        table.add_row(*plain((broken.entry_id, "damaged", "", "", "", broken.problem)))
    Console().print(table)


@click.command()
@click.argument("entry", metavar="ENTRY")
@cache_dir_option
@json_option
def show(entry: str, store: CaptureStore, as_json: bool) -> None:
    """Show what one entry holds; ENTRY is its name, or how it begins.

    \b
    Examples:
      bullet-graph capture show 3f2a
      bullet-graph capture show 3f2a --json
    """
    found = find_entry(store, entry)
    if as_json:
        click.echo(
            json.dumps({"entry_id": found.entry_id, **json.loads(manifest_bytes(found.manifest))}, indent=2)
        )
        return
    manifest, console = found.manifest, Console()
    console.print(f"{found.entry_id}: {title(found)}", markup=False)
    console.print(
        f"{found.folder}, built {manifest.created_utc}, used {age_text(found.last_used)}", markup=False
    )
    parts = Table("part", "files", "size", "built in", title="Artifacts", title_justify="left")
    for kind in dict.fromkeys(artifact.kind for artifact in manifest.artifacts):
        sizes = [artifact.num_bytes for artifact in manifest.artifacts if artifact.kind is kind]
        seconds = manifest.build_seconds({kind})
        parts.add_row(*plain((kind, str(len(sizes)), size_text(sum(sizes)), f"{seconds:.1f} s")))
    console.print(parts)
    console.print(_pairs("Built with", manifest.fingerprint.values))
    console.print(_pairs("Plan", manifest.plan))
    console.print(_pairs("Provenance", manifest.provenance))
    console.print("It has a self-check." if manifest.self_check is not None else "It has no self-check.")


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@cache_dir_option
@json_option
def verify(entries: tuple[str, ...], store: CaptureStore, as_json: bool) -> None:
    """Check every file of entries against its checksum; without ENTRY, all entries.

    Exit code 1 when something is damaged.

    \b
    Examples:
      bullet-graph capture verify
      bullet-graph capture verify 3f2a 90bc --json
    """
    if entries:
        chosen = {found.entry_id: found for found in (find_entry(store, entry) for entry in entries)}
        problems: dict[str, list[str]] = {}
    else:
        readable, damaged = store.entries()
        chosen = {found.entry_id: found for found in readable}
        problems = {broken.entry_id: [broken.problem] for broken in damaged}
    problems |= {name: [damage.problem for damage in found.check()] for name, found in chosen.items()}
    if as_json:
        click.echo(json.dumps(problems, indent=2))
    elif not problems:
        click.echo(f"There are no captures in {store.root}.")
    else:
        for name, found_problems in problems.items():
            click.echo(f"{name}: {'damaged' if found_problems else 'whole'}")
            for problem in found_problems:
                click.echo(f"  {problem}")
    if any(problems.values()):
        click.get_current_context().exit(_EXIT_DAMAGED)


def differences_here(entry: Entry) -> tuple[Difference, ...]:
    """Where an entry differs from one that would be built on this machine for the same model and dtype."""
    # Libraries that greet on stdout when they are imported would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        # Needs torch, which --help must not wait for.
        from bullet_graph.runtime.fingerprint import on_this_machine  # noqa: PLC0415

        return entry.manifest.fingerprint.differences(on_this_machine(entry.manifest.fingerprint))


def difference_row(difference: Difference) -> dict[str, Any]:
    """For JSON."""
    return {
        "component": difference.component,
        "cached": difference.cached,
        "here": difference.here,
        "stale": list(difference.stale),
    }


def _fit(differs: list[str], entry: Entry) -> str:
    if entry.rejection is not None:
        return f"rejected: {entry.rejection.reason}"
    return f"differs in {', '.join(differs)}" if differs else "fits"


def _row(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "entry_id": entry.entry_id,
        "title": title(entry),
        "num_bytes": manifest.num_bytes,
        "build_seconds": manifest.build_seconds({artifact.kind for artifact in manifest.artifacts}),
        "created_utc": manifest.created_utc,
        "last_used_utc": entry.last_used.isoformat(timespec="seconds"),
        "differences": [difference_row(difference) for difference in differences_here(entry)],
        "rejected": None if entry.rejection is None else entry.rejection.reason,
    }


def _pairs(name: str, values: Mapping[str, Any]) -> Table:
    table = Table(title=name, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in values.items():
        # As JSON: an imported text may hold control characters.
        shown = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
        table.add_row(*plain((key if key.isprintable() else json.dumps(key), shown)))
    return table
