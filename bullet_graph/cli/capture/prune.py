"""``bullet-graph capture prune``: removes entries that are of no more use."""

import dataclasses
import json
import re
from datetime import UTC, datetime, timedelta

import click

from bullet_graph.captures.prune import Pruned, PruneRules, forget_interrupted
from bullet_graph.captures.prune import prune as prune_store
from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.listing import differences_here
from bullet_graph.cli.capture.store_options import cache_dir_option, find_entry, json_option, size_text
from bullet_graph.cli.options import parse_size

_MAX_DAYS = 100_000
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def _parse_age(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([hdw])", value.strip())
    age = match and int(match[1]) * _UNITS[match[2]]
    if not age or age.days > _MAX_DAYS:
        raise click.BadParameter(f"{value!r} is no age: write 12h, 30d or 8w")
    return age


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option(
    "--unused-for", metavar="AGE", callback=_parse_age, help="Entries that were not used for 12h, 30d or 8w."
)
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=parse_size,
    help="Entries used longest ago, until the others fit into this, such as 20GiB.",
)
@click.option("--misfits", is_flag=True, help="Entries that do not fit this machine.")
@click.option("--interrupted", is_flag=True, help="What interrupted builds left; they could not go on then.")
@click.option("--dry-run", is_flag=True, help="Tell what would be removed, and remove nothing.")
@cache_dir_option
@json_option
def prune(
    entries: tuple[str, ...],
    unused_for: timedelta | None,
    max_size: int | None,
    misfits: bool,
    interrupted: bool,
    dry_run: bool,
    store: CaptureStore,
    as_json: bool,
) -> None:
    """Remove entries: those named, or those that a rule applies to, and any whose manifest is damaged.

    An entry in use by a running engine, or being built, is kept and named.

    \b
    Examples:
      bullet-graph capture prune --unused-for 30d --max-size 20GiB
      bullet-graph capture prune --misfits --dry-run
      bullet-graph capture prune 3f2a
      bullet-graph capture prune --interrupted
    """
    has_rule = misfits or unused_for is not None or max_size is not None
    if entries and (has_rule or interrupted):
        raise click.UsageError("name entries, or give rules, not both")
    if not (entries or has_rule or interrupted):
        raise click.UsageError(
            "say what to remove: ENTRY, --unused-for, --max-size, --misfits or --interrupted"
        )
    if entries:
        pruned = _remove_named(store, entries, dry_run=dry_run)
    else:
        rules = PruneRules(
            unused_for, max_size, (lambda entry: bool(differences_here(entry))) if misfits else None
        )
        pruned = prune_store(store, rules, now=datetime.now(UTC), dry_run=dry_run) if has_rule else ()
        pruned += forget_interrupted(store, dry_run=dry_run) if interrupted else ()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(entry) for entry in pruned], indent=2))
        return
    for entry in pruned:
        click.echo(_line(entry, dry_run=dry_run))
    if not pruned:
        click.echo("There is nothing to remove.")


def _remove_named(store: CaptureStore, names: tuple[str, ...], *, dry_run: bool) -> tuple[Pruned, ...]:
    _, damaged = store.entries()
    chosen: dict[str, int | None] = {}
    for name in names:
        broken = [entry.entry_id for entry in damaged if entry.entry_id == name]
        if broken:
            chosen[name] = None
        else:
            entry = find_entry(store, name)
            chosen[entry.entry_id] = entry.manifest.num_bytes
    if not dry_run:
        for name in chosen:
            store.remove(name)
    return tuple(Pruned(name, num_bytes, "it was named", None) for name, num_bytes in chosen.items())


def _line(entry: Pruned, *, dry_run: bool) -> str:
    size = "" if entry.num_bytes is None else f" ({size_text(entry.num_bytes)})"
    if entry.kept_because is not None:
        return f"kept {entry.entry_id}{size}: {entry.reason}, but {entry.kept_because}"
    done = "would remove" if dry_run else "removed"
    return f"{done} {entry.entry_id}{size}: {entry.reason}"
