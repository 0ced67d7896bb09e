"""``bullet-graph capture``: builds capture caches, and lists, explains, ships and prunes them."""

import contextlib
import functools
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.manifest import Difference
from bullet_graph.captures.store import CaptureStore, Entry, Pruned, default_root
from bullet_graph.cli.options import FILE, engine_options, json_option, parse_size, parsed_by
from bullet_graph.cli.result_file import check_result_file, print_json
from bullet_graph.cli.tables import print_line, print_table, table_of_texts
from bullet_graph.config import EngineConfig
from bullet_graph.errors import CacheError, ConfigError
from bullet_graph.graphs.compile_counts import CompileCounts
from bullet_graph.runtime.capture_build import build_entry, needed_entry
from bullet_graph.runtime.fingerprint import on_this_machine
from bullet_graph.runtime.memory import format_bytes
from bullet_graph.runtime.resolve import resolve
from bullet_graph.runtime.tensor_parallel import of_rank

tell = functools.partial(click.echo, err=True)

_AGE_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}

cache_dir_option = click.option(
    "--cache-dir",
    "store",
    metavar="DIR",
    callback=lambda _, __, value: CaptureStore(default_root() if value is None else Path(value)),
    help="The folder of capture caches.  [default: in your cache folder]",
)


# ---- build ----


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions", "capture_cache", "self_check"))
@cache_dir_option
@json_option
def build(config: EngineConfig, store: CaptureStore, as_json: bool) -> None:
    """Compile, tune and collect what an engine of these settings needs, so that its start compiles nothing.

    An entry serves engines with the same model, dtype and capture plan (without one, the same --max-num-seqs). At the
    end, the logits of each captured batch size are compared with those of the uncompiled model. On the CPU, --compile
    is implied. Each rank of tensor parallelism builds an entry of its own.

    \b
    Examples:
      bullet-graph capture build --model llama-3.1-8b
      bullet-graph capture build --model llama-3.1-8b --policy auto --capture-plan conv.toml --cache-dir /mnt/captures
      bullet-graph capture build --model tiny --device cpu --max-num-seqs 8 --json
    """
    # Libraries that greet on stdout would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        entry, compiles = build_entry(config, store, progress=not as_json and sys.stderr.isatty(), tell=tell)
    checked, seconds = entry.manifest.self_check, entry.manifest.build_seconds
    if as_json:
        print_json(
            {
                "entry_id": entry.entry_id,
                "folder": str(entry.folder),
                "was_there": compiles is None,
                "seconds": seconds,
                "compiles": compiles or CompileCounts(),
                "self_check": checked,
                "parts": _parts(entry),
            }
        )
        return
    if checked is not None:
        print_line(
            f"Self-check: {len(checked['relative_error'])} batch sizes, relative error of the logits at most "
            f"{max(checked['relative_error'].values()):.2g} (tolerance {checked['tolerance']:g})."
        )
    how = "It was built before" if compiles is None else f"Built in {seconds:.1f} s"
    print_line(f"{how}: {entry.folder}, {format_bytes(entry.manifest.num_bytes)}")


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
        _show(store.read(_full_name(store, entry)), as_json=as_json)
        return
    entries, damaged = store.entries()
    fits = [(found, _differences_here(found)) for found in entries]
    if as_json:
        rows = [
            {
                "entry_id": found.entry_id,
                "title": _title(found),
                "num_bytes": found.manifest.num_bytes,
                "build_seconds": found.manifest.build_seconds,
                "created_utc": found.manifest.created_utc,
                "last_used_utc": found.last_used.isoformat(timespec="seconds"),
                "differences": differs,
                "rejected": found.rejection,
            }
            for found, differs in fits
        ]
        print_json({"cache_dir": str(store.root), "entries": rows, "damaged": damaged})
        return
    if not entries and not damaged:
        print_line(f"There are no capture caches in {store.root}.")
        return
    shown = []
    for found, differs in fits:
        fit = f"differs in {_names(differs)}" if differs else "fits"
        fit = fit if found.rejection is None else f"rejected: {found.rejection}"
        size = format_bytes(found.manifest.num_bytes)
        shown.append((found.entry_id, _title(found), size, _age_text(found.last_used), fit))
    shown += [(broken.entry_id, "damaged", "", "", broken.problem) for broken in damaged]
    columns = ("entry", "for", "size", "last used", "this machine")
    print_table(table_of_texts(*columns, rows=shown, title=f"Capture caches in {store.root}"))


def _show(entry: Entry, *, as_json: bool) -> None:
    manifest, problems = entry.manifest, entry.problems()
    if as_json:
        print_json({"entry_id": entry.entry_id, **json.loads(manifest.to_bytes()), "problems": problems})
        return
    values = {
        **{
            f"files/{part['part']}": f"{part['num_files']} files, {format_bytes(part['num_bytes'])}"
            for part in _parts(entry)
        },
        **manifest.fingerprint,
        **{f"plan.{name}": value for name, value in manifest.plan.items()},
        **{f"provenance.{name}": value for name, value in manifest.provenance.items()},
    }
    # As JSON, because an imported text may hold control characters.
    rows = [
        [cell if isinstance(cell, str) and cell.isprintable() else json.dumps(cell) for cell in row]
        for row in values.items()
    ]
    print_table(table_of_texts("", "", rows=rows, title=f"{entry.entry_id}: {_title(entry)}", show_header=False))
    built = f"built {manifest.created_utc} in {manifest.build_seconds:.1f} s"
    print_line(f"{entry.folder}, {built}, used {_age_text(entry.last_used)}")
    for problem in problems:
        print_line(f"Not usable: {problem}", style="red")
    if not problems:
        print_line("All files are as they were built.", style="green")


# ---- explain ----


@click.command()
@engine_options(max_num_seqs=256, without=("trace_decisions", "capture_cache", "self_check"))
@cache_dir_option
@json_option
def explain(config: EngineConfig, store: CaptureStore, as_json: bool) -> None:
    """Tell why a capture cache fits this machine and an engine of these settings, or why not, component by component.

    Exit code 1 if none fits. Of several ranks, rank 0's entry is looked for.

    \b
    Examples:
      bullet-graph capture explain --model llama-3.1-8b --dtype bfloat16
      bullet-graph capture explain --model tiny --device cpu --json
      bullet-graph capture explain --model llama-3.1-8b --policy auto --capture-plan conv.toml
    """
    with contextlib.redirect_stdout(sys.stderr):
        here, plan = needed_entry(config, of_rank(config, resolve(config), 0), store)
    lookup = store.find(here, plan)
    entry, differences = lookup.nearest, lookup.differences
    if as_json:
        nearest = None
        if entry is not None and differences:
            seconds = entry.manifest.build_seconds
            nearest = {"entry_id": entry.entry_id, "differences": differences, "build_seconds": seconds}
        print_json(
            {
                "cache_dir": str(store.root),
                "here": here,
                "plan": plan,
                "hit": None if lookup.hit is None else lookup.hit.entry_id,
                "nearest": nearest,
                "damaged": lookup.damaged,
            }
        )
    else:
        for damaged in lookup.damaged:
            print_line(f"damaged: {damaged.problem}")
        if entry is None:
            print_line(f"There are no capture caches in {store.root}: everything has to be built.")
        else:
            _explain(entry, differences, here)
    if lookup.hit is None:
        click.get_current_context().exit(1)


def _explain(entry: Entry, differences: tuple[Difference, ...], here: dict[str, str]) -> None:
    same = [Difference(name, value, value) for name, value in here.items()]
    rows = [
        (each.component, each.cached or "–", each.here or "–", "same" if each.cached == each.here else "differs")
        for each in {found.component: found for found in (*same, *differences)}.values()
    ]
    title = f"{entry.entry_id}: {_title(entry)}"
    print_table(table_of_texts("component", "cache", "here", "", rows=rows, title=title))
    if differences:
        print_line(f"It does not fit. To build it took {entry.manifest.build_seconds:.1f} s there.", style="yellow")
    else:
        print_line("It fits this machine and these settings; its files are checked at a start.", style="green")


# ---- export and import ----


@click.command()
@click.argument("entry", metavar="ENTRY")
@click.argument("file", metavar="FILE", type=FILE)
@click.option(
    "--sign-key", metavar="FILE", type=FILE, help="Sign with this Ed25519 private key (PEM; needs bullet-graph[sign])."
)
@click.option("--overwrite", is_flag=True, help="Replace the file if it exists.")
@cache_dir_option
@json_option
def export(entry: str, file: Path, sign_key: Path | None, overwrite: bool, store: CaptureStore, as_json: bool) -> None:
    """Write an entry into one file, a compressed tar; ENTRY is its name, or its first letters.

    Its checksums are checked first. A key pair for signing: `openssl genpkey -algorithm ed25519 -out fleet.key`
    and `openssl pkey -in fleet.key -pubout -out fleet.pub`.

    \b
    Examples:
      bullet-graph capture export 3f2a captures.tgz
      bullet-graph capture export 3f2a captures.tgz --sign-key fleet.key --overwrite
    """
    check_result_file(file, overwrite=overwrite, option="FILE")
    with store.open(store.read(_full_name(store, entry))) as found:
        export_entry(found, file, sign_key=sign_key)
    num_bytes, is_signed = file.stat().st_size, sign_key is not None
    if as_json:
        print_json({"entry_id": found.entry_id, "file": str(file), "num_bytes": num_bytes, "signed": is_signed})
        return
    signed = "signed" if is_signed else "not signed"
    print_line(f"Entry {found.entry_id} ({_title(found)}) is in {file}: {format_bytes(num_bytes)}, {signed}.")


@click.command("import")
@click.argument("file", metavar="FILE", type=FILE)
@click.option(
    "--trusted-key",
    "trusted_keys",
    metavar="FILE",
    type=FILE,
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
    entry, is_new = import_archive(store, file, trusted_keys=trusted_keys, tell=tell)
    differences, is_checked = _differences_here(entry), bool(trusted_keys)
    if as_json:
        found = {"entry_id": entry.entry_id, "is_new": is_new}
        print_json({**found, "signature_checked": is_checked, "differences": differences})
        return
    how = "is in the store" if is_new else "was in the store already"
    print_line(f"Entry {entry.entry_id} ({_title(entry)}) {how}.")
    if not is_checked:
        print_line("Its origin was not checked (--trusted-key).")
    if differences:
        differs = f"It does not fit this machine, which differs in {_names(differences)}"
        print_line(f"{differs}: see `bullet-graph capture explain`.")


# ---- prune ----


def _parse_age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d{1,4})([hdw])", text.strip())
    if match is None or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is no age: write 12h, 30d or 8w")
    return int(match[1]) * _AGE_UNITS[match[2]]


@click.command()
@click.argument("entries", metavar="[ENTRY]...", nargs=-1)
@click.option("--unused-for", metavar="AGE", callback=parsed_by(_parse_age), help="Entries unused for 12h, 30d or 8w.")
@click.option(
    "--max-size", metavar="SIZE", callback=parse_size, help="The longest unused, until the rest fits, such as 20GiB."
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
    if bool(entries) == (unused_for is not None or max_size is not None):
        raise click.UsageError("say what to remove: ENTRY, --unused-for or --max-size")
    if entries:
        names = list(dict.fromkeys(_full_name(store, entry) for entry in entries))
        num_bytes = {entry.entry_id: entry.manifest.num_bytes for entry in store.entries()[0]}
        for name in () if dry_run else names:
            store.remove(name)
        pruned = tuple(Pruned(name, num_bytes.get(name), "it was named", None) for name in names)
    else:
        pruned = store.prune(max_age=unused_for, max_total_bytes=max_size, dry_run=dry_run)
    if as_json:
        print_json(pruned)
        return
    done = "would remove" if dry_run else "removed"
    for each in pruned:
        size = "" if each.num_bytes is None else f" ({format_bytes(each.num_bytes)})"
        if each.kept_because is None:
            print_line(f"{done} {each.entry_id}{size}: {each.reason}")
        else:
            print_line(f"kept {each.entry_id}{size}: {each.reason}, but {each.kept_because}")
    if not pruned:
        print_line("There is nothing to remove.")


# ---- shared ----


def _full_name(store: CaptureStore, prefix: str) -> str:
    """The name of the one entry, damaged or not, that begins with ``prefix``."""
    names = [entry.entry_id for group in store.entries() for entry in group]
    matching = [name for name in names if name.startswith(prefix)]
    if not prefix or len(matching) != 1:
        found = f"{len(matching)} do" if matching else "none does"
        there = ", ".join(names) or "none"
        raise CacheError(
            f"one entry of {store.root} has to begin with {prefix!r}, but {found} (there: {there}): see "
            "`bullet-graph capture list`"
        )
    return matching[0]


def _differences_here(entry: Entry) -> tuple[Difference, ...]:
    """Where an entry differs from one that would be built on this machine for the same model and dtype."""
    with contextlib.redirect_stdout(sys.stderr):
        return entry.manifest.differences(on_this_machine(entry.manifest.fingerprint), None)


def _names(differences: tuple[Difference, ...]) -> str:
    return ", ".join(difference.component for difference in differences)


def _parts(entry: Entry) -> list[dict[str, Any]]:
    """An entry's files by part, the first component of their paths."""
    parts: dict[str, list[int]] = {}
    for file in entry.manifest.files:
        parts.setdefault(file.path.partition("/")[0], []).append(file.num_bytes)
    return [{"part": part, "num_files": len(sizes), "num_bytes": sum(sizes)} for part, sizes in parts.items()]


def _title(entry: Entry) -> str:
    values, model = entry.manifest.fingerprint, entry.manifest.plan.get("model")
    # An imported manifest may say anything.
    named = model if isinstance(model, str) and model.isprintable() else values.get("model", "?")
    where = values.get("gpu") or values.get("host_cpu") or values.get("device", "?")
    rank = f", rank {values['rank']}" if "rank" in values else ""
    return f"{named}, {values.get('dtype', '?')}{rank}, {where}"


def _age_text(moment: datetime) -> str:
    days = (datetime.now(UTC) - moment).days
    return "today" if days < 1 else f"{days} days ago" if days > 1 else "a day ago"
