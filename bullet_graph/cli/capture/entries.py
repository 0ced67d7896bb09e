"""``bullet-graph capture list``, ``explain``, ``export``, ``import`` and ``prune``: the entries of a store."""

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.manifest import Difference
from bullet_graph.captures.store import CaptureStore, Entry, Pruned, default_root
from bullet_graph.cli.options import parse_size
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.config import DeviceName, DtypeName, EngineConfig
from bullet_graph.errors import CacheError
from bullet_graph.graphs.capture_plan import load_plan
from bullet_graph.runtime.capture_plan import plan_mapping
from bullet_graph.runtime.fingerprint import fingerprint_of, on_this_machine
from bullet_graph.runtime.memory import format_bytes
from bullet_graph.runtime.resolve import resolve

_EXIT_MISS = 1
_MAX_AGE_DAYS = 100_000
_AGE_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_Command = TypeVar("_Command", bound=Callable[..., Any])


def cache_dir_option(command: _Command) -> _Command:
    """Give a command ``store: CaptureStore``."""
    return click.option(
        "--cache-dir",
        "store",
        metavar="DIR",
        callback=lambda _, __, value: CaptureStore(default_root() if value is None else Path(value)),
        help="The folder of capture caches.  [default: in your cache folder]",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


# ---- list ----


@click.command("list")
@click.argument("entry", metavar="[ENTRY]", required=False)
@cache_dir_option
@json_option
def list_(entry: str | None, store: CaptureStore, as_json: bool) -> None:
    """List the entries: size, age, and whether they fit this machine. ENTRY, or its first letters, shows one.

    \b
    Examples:
      bullet-graph capture list
      bullet-graph capture list 3f2a
      bullet-graph capture list --cache-dir /mnt/captures --json
    """
    if entry is not None:
        _show(find_entry(store, entry), as_json=as_json)
        return
    entries, damaged = store.entries()
    rows = [_row(found) for found in entries]
    if as_json:
        broken = [dataclasses.asdict(found) for found in damaged]
        page = {"cache_dir": str(store.root), "entries": rows, "damaged": broken}
        click.echo(json.dumps(page, indent=2, allow_nan=False))
        return
    if not entries and not damaged:
        click.echo(f"There are no capture caches in {store.root}.")
        return
    table = Table(title=f"Capture caches in {store.root}", title_justify="left")
    table.add_column("entry", no_wrap=True)
    for name in ("for", "size", "last used", "this machine"):
        table.add_column(name, overflow="fold")
    for found, row in zip(entries, rows, strict=True):
        differs = ", ".join(difference["component"] for difference in row["differences"])
        fit = f"differs in {differs}" if differs else "fits"
        fit = fit if found.rejection is None else f"rejected: {found.rejection}"
        cells = found.entry_id, title(found), format_bytes(row["num_bytes"]), _age_text(found.last_used), fit
        table.add_row(*_plain(cells))
    for broken_entry in damaged:
        table.add_row(*_plain((broken_entry.entry_id, "damaged", "", "", broken_entry.problem)))
    Console().print(table)


def _show(entry: Entry, *, as_json: bool) -> None:
    manifest, problems = entry.manifest, entry.problems()
    if as_json:
        page = {"entry_id": entry.entry_id, **json.loads(manifest.to_bytes()), "problems": problems}
        click.echo(json.dumps(page, indent=2))
        return
    console = Console()
    console.print(parts_table(entry, f"{entry.entry_id}: {title(entry)}"))
    for name, values in (
        ("Built with", manifest.fingerprint),
        ("Capture plan", manifest.plan),
        ("Provenance", manifest.provenance),
    ):
        table = Table(title=name, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        for key, value in values.items():
            # As JSON, because an imported text may hold control characters.
            shown = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
            table.add_row(*_plain((key if key.isprintable() else json.dumps(key), shown)))
        console.print(table)
    built = (
        f"built {manifest.created_utc} in {manifest.build_seconds:.1f} s, used {_age_text(entry.last_used)}"
    )
    console.print(f"{entry.folder}, {built}", markup=False)
    for problem in problems:
        console.print(f"Not usable: {problem}", style="red", markup=False)
    if not problems:
        console.print("All files are as they were built.", style="green")


def _row(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "entry_id": entry.entry_id,
        "title": title(entry),
        "num_bytes": manifest.num_bytes,
        "build_seconds": manifest.build_seconds,
        "created_utc": manifest.created_utc,
        "last_used_utc": entry.last_used.isoformat(timespec="seconds"),
        "differences": [dataclasses.asdict(difference) for difference in differences_here(entry)],
        "rejected": entry.rejection,
    }


# ---- explain ----


@click.command()
@click.option("--model", required=True, help="A preset's name, or a Hugging Face model folder.")
@click.option(
    "--dtype",
    type=click.Choice(get_args(DtypeName)),
    default="auto",
    help="auto: config.json's on a GPU, float32 on the CPU.",
)
@click.option(
    "--device",
    type=click.Choice(get_args(DeviceName)),
    default="auto",
    help="auto: the GPU where there is one.",
)
@click.option(
    "--plan", "plan_name", metavar="FILE.toml|NAME", help="The engine's capture plan.  [default: any]"
)
@cache_dir_option
@json_option
def explain(
    model: str,
    dtype: DtypeName,
    device: DeviceName,
    plan_name: str | None,
    store: CaptureStore,
    as_json: bool,
) -> None:
    """Tell why a capture cache fits this machine or does not, component by component. Exit code 1 if none fits.

    \b
    Examples:
      bullet-graph capture explain --model llama-3.1-8b --dtype bfloat16
      bullet-graph capture explain --model tiny --device cpu --json
      bullet-graph capture explain --model llama-3.1-8b --plan plan.toml
    """
    with contextlib.redirect_stdout(sys.stderr):
        here = fingerprint_of(resolve(EngineConfig(model=model, dtype=dtype, device=device)))
    plan = None if plan_name is None else plan_mapping(load_plan(plan_name))
    lookup = store.find(here, plan)
    nearest: tuple[Entry | None, tuple[Difference, ...]] = lookup.others[0] if lookup.others else (None, ())
    entry, differences = nearest if lookup.hit is None else (lookup.hit, ())
    fits = entry is not None and not differences
    if as_json:
        found = None
        if entry is not None and not fits:
            found = {
                "entry_id": entry.entry_id,
                "differences": [dataclasses.asdict(difference) for difference in differences],
                "build_seconds": entry.manifest.build_seconds,
            }
        page = {
            "cache_dir": str(store.root),
            "here": here,
            "plan": plan,
            "hit": entry.entry_id if entry is not None and fits else None,
            "nearest": found,
            "damaged": [dataclasses.asdict(broken) for broken in lookup.damaged],
        }
        click.echo(json.dumps(page, indent=2, allow_nan=False))
    else:
        for damaged in lookup.damaged:
            click.echo(f"damaged: {damaged.problem}")
        _explain(store, entry, differences, here, any_plan=plan is None)
    if not fits:
        click.get_current_context().exit(_EXIT_MISS)


def _explain(
    store: CaptureStore,
    entry: Entry | None,
    differences: tuple[Difference, ...],
    here: dict[str, str],
    *,
    any_plan: bool,
) -> None:
    if entry is None:
        click.echo(f"There are no capture caches in {store.root}: everything has to be built.")
        return
    console = Console()
    table = Table(
        "component", "cache", "here", "", title=f"{entry.entry_id}: {title(entry)}", title_justify="left"
    )
    cached, changed = entry.manifest.fingerprint, {difference.component for difference in differences}
    for name in here:
        verdict = "differs" if name in changed else "same"
        table.add_row(*_plain((name, cached.get(name, "–"), here[name], verdict)))
    for difference in differences:
        if difference.component not in here:
            cells = difference.component, difference.cached or "–", difference.here or "–", "differs"
            table.add_row(*_plain(cells))
    console.print(table)
    unasked = " (for any plan: none was given)" if any_plan else ""
    if not differences:
        console.print(f"It fits this machine{unasked}; its files are checked at a start.", style="green")
        return
    seconds = entry.manifest.build_seconds
    console.print(f"It does not fit{unasked}. To build it took {seconds:.1f} s there.", style="yellow")


# ---- export and import ----


@click.command()
@click.argument("entry", metavar="ENTRY")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--sign-key",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Sign it with this Ed25519 private key (PEM; needs bullet-graph[sign]).",
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@cache_dir_option
@json_option
def export(
    entry: str, file: Path, sign_key: Path | None, overwrite: bool, store: CaptureStore, as_json: bool
) -> None:
    """Write an entry into one file, a compressed tar; ENTRY is its name, or its first letters.

    Its checksums are checked first. A key pair for signing: `openssl genpkey -algorithm ed25519 -out fleet.key`
    and `openssl pkey -in fleet.key -pubout -out fleet.pub`.

    \b
    Examples:
      bullet-graph capture export 3f2a captures.tgz
      bullet-graph capture export 3f2a captures.tgz --sign-key fleet.key --overwrite
    """
    check_result_file(file, overwrite=overwrite, option="FILE")
    with store.open(find_entry(store, entry)) as found:
        export_entry(found, file, sign_key=sign_key)
    num_bytes, is_signed = file.stat().st_size, sign_key is not None
    if as_json:
        page = {"entry_id": found.entry_id, "file": str(file), "num_bytes": num_bytes, "signed": is_signed}
        click.echo(json.dumps(page, indent=2))
    else:
        signed = "signed" if is_signed else "not signed"
        click.echo(
            f"Entry {found.entry_id} ({title(found)}) is in {file}: {format_bytes(num_bytes)}, {signed}."
        )


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--trusted-key",
    "trusted_keys",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Refuse the file unless this Ed25519 public key (PEM) signed it; may be given several times.",
)
@cache_dir_option
@json_option
def import_(file: Path, trusted_keys: tuple[Path, ...], store: CaptureStore, as_json: bool) -> None:
    """Place an exported entry into the store, after all of it was checked.

    A capture cache is code: import only from a source that you trust, or what a key that you trust has signed.
    Checksums detect damage, not malice.

    \b
    Examples:
      bullet-graph capture import captures.tgz
      bullet-graph capture import captures.tgz --trusted-key fleet.pub --cache-dir /mnt/captures
    """
    imported = import_archive(
        store, file, trusted_keys=trusted_keys, tell=lambda line: click.echo(line, err=True)
    )
    entry, differences = imported.entry, differences_here(imported.entry)
    if as_json:
        page = {
            "entry_id": entry.entry_id,
            "is_new": imported.is_new,
            "is_signed": imported.is_signed,
            "signature_checked": bool(trusted_keys),
            "differences": [dataclasses.asdict(difference) for difference in differences],
        }
        click.echo(json.dumps(page, indent=2))
        return
    how = "is in the store" if imported.is_new else "was in the store already"
    click.echo(f"Entry {entry.entry_id} ({title(entry)}) {how}.")
    if not trusted_keys:
        signed = "It is signed, but the signature" if imported.is_signed else "It is not signed: its origin"
        click.echo(f"{signed} was not checked (--trusted-key).")
    if differences:
        names = ", ".join(difference.component for difference in differences)
        click.echo(
            f"It does not fit this machine, which differs in {names}: see `bullet-graph capture explain`."
        )


# ---- prune ----


def _parse_age(_: click.Context, __: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([hdw])", value.strip())
    age = match and int(match[1]) * _AGE_UNITS[match[2]]
    if not age or age.days > _MAX_AGE_DAYS:
        raise click.BadParameter(f"{value!r} is no age: write 12h, 30d or 8w")
    return age


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option("--unused-for", metavar="AGE", callback=_parse_age, help="Entries not used for 12h, 30d or 8w.")
@click.option(
    "--max-size",
    metavar="SIZE",
    callback=parse_size,
    help="Entries used longest ago, until the others fit into this, such as 20GiB.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@cache_dir_option
@json_option
def prune(
    entries: tuple[str, ...],
    unused_for: timedelta | None,
    max_size: int | None,
    dry_run: bool,
    store: CaptureStore,
    as_json: bool,
) -> None:
    """Remove entries: those named, or those that any rule applies to, and damaged ones.

    An entry that a running engine uses, or that is being built, is kept.

    \b
    Examples:
      bullet-graph capture prune --unused-for 30d --max-size 20GiB
      bullet-graph capture prune --unused-for 12h --dry-run
      bullet-graph capture prune 3f2a
    """
    has_rule = unused_for is not None or max_size is not None
    if bool(entries) == has_rule:
        raise click.UsageError("say what to remove: either ENTRY, or --unused-for and --max-size")
    if entries:
        pruned = _remove_named(store, entries, dry_run=dry_run)
    else:
        pruned = store.prune(max_age=unused_for, max_total_bytes=max_size, dry_run=dry_run)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(entry) for entry in pruned], indent=2))
        return
    done = "would remove" if dry_run else "removed"
    for entry in pruned:
        size = "" if entry.num_bytes is None else f" ({format_bytes(entry.num_bytes)})"
        if entry.kept_because is None:
            click.echo(f"{done} {entry.entry_id}{size}: {entry.reason}")
        else:
            click.echo(f"kept {entry.entry_id}{size}: {entry.reason}, but {entry.kept_because}")
    if not pruned:
        click.echo("There is nothing to remove.")


def _remove_named(store: CaptureStore, names: tuple[str, ...], *, dry_run: bool) -> tuple[Pruned, ...]:
    broken = {entry.entry_id for entry in store.entries()[1]}
    chosen: dict[str, int | None] = {}
    for name in names:
        if name in broken:
            chosen[name] = None
        else:
            entry = find_entry(store, name)
            chosen[entry.entry_id] = entry.manifest.num_bytes
    if not dry_run:
        for name in chosen:
            store.remove(name)
    return tuple(Pruned(name, num_bytes, "it was named", None) for name, num_bytes in chosen.items())


# ---- shared ----


def find_entry(store: CaptureStore, prefix: str) -> Entry:
    """The entry whose name begins with ``prefix``.

    Raises:
        CacheError: none or several do, or it is damaged.
    """
    entries, damaged = store.entries()
    names = [*(entry.entry_id for entry in entries), *(entry.entry_id for entry in damaged)]
    matching = [name for name in names if name.startswith(prefix)]
    if not prefix or len(matching) != 1:
        found = f"{len(matching)} do" if matching else "none does"
        there = ", ".join(names) or "none"
        raise CacheError(
            f"one entry of {store.root} has to begin with {prefix!r}, but {found} (there: {there}): see "
            "`bullet-graph capture list`"
        )
    return store.read(matching[0])


def differences_here(entry: Entry) -> tuple[Difference, ...]:
    """Where an entry differs from one that would be built on this machine for the same model and dtype."""
    fingerprint = entry.manifest.fingerprint
    with contextlib.redirect_stdout(sys.stderr):
        return entry.manifest.differences(on_this_machine(fingerprint), None)


def parts_of(entry: Entry) -> list[dict[str, Any]]:
    """An entry's files by part, the first component of their paths."""
    parts: dict[str, list[int]] = {}
    for file in entry.manifest.files:
        parts.setdefault(file.path.partition("/")[0], []).append(file.num_bytes)
    return [{"part": part, "num_files": len(sizes), "num_bytes": sum(sizes)} for part, sizes in parts.items()]


def parts_table(entry: Entry, heading: str) -> Table:
    """A table of the parts."""
    table = Table("part", "files", "size", title=heading, title_justify="left")
    for part in parts_of(entry):
        table.add_row(*_plain((part["part"], str(part["num_files"]), format_bytes(part["num_bytes"]))))
    return table


def title(entry: Entry) -> str:
    """The model, dtype and device that an entry is for."""
    values, model = entry.manifest.fingerprint, entry.manifest.plan.get("model")
    # An imported manifest may say anything.
    named = model if isinstance(model, str) and model.isprintable() else values.get("model", "?")
    where = values.get("gpu") or values.get("host_cpu") or values.get("device", "?")
    return f"{named}, {values.get('dtype', '?')}, {where}"


def _age_text(moment: datetime) -> str:
    days = (datetime.now(UTC) - moment).days
    return "today" if days < 1 else f"{days} days ago" if days > 1 else "a day ago"


def _plain(values: Iterable[str]) -> list[Text]:
    """Cells of a table whose text is no markup."""
    return [Text(value) for value in values]
