"""``bullet-graph capture explain``: why the store has, or has not, what an engine needs here."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from bullet_graph.captures.entry import Entry, Lookup, Mismatch, compare
from bullet_graph.captures.fingerprint import (
    ALL_KINDS,
    Fingerprint,
    kinds_depending_on,
)
from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.listing import difference_row
from bullet_graph.cli.capture.store_options import cache_dir_option, find_entry, json_option, plain, title
from bullet_graph.config import DeviceName, DtypeName, EngineConfig

_EXIT_MISS = 1


@click.command()
@click.option("--model", required=True, help="A preset's name, or a Hugging Face model folder.")
@click.option(
    "--dtype",
    type=click.Choice(get_args(DtypeName)),
    default="auto",
    show_default=True,
    help="auto: config.json's on a GPU, float32 on the CPU.",
)
@click.option(
    "--device",
    type=click.Choice(get_args(DeviceName)),
    default="auto",
    show_default=True,
    help="auto: the GPU where there is one.",
)
@click.option(
    "--plan",
    "plan_name",
    metavar="FILE.toml|NAME",
    help="The capture plan that the engine is to follow.  [default: any]",
)
@click.option(
    "--entry",
    "entry_name",
    metavar="ENTRY",
    help="Compare with this entry.  [default: the one that fits best]",
)
@cache_dir_option
@json_option
def explain(
    model: str,
    dtype: DtypeName,
    device: DeviceName,
    plan_name: str | None,
    entry_name: str | None,
    store: CaptureStore,
    as_json: bool,
) -> None:
    """Tell why captures fit this machine or do not, component by component, and what a rebuild would cost.

    Exit code 1 when nothing fits.

    \b
    Examples:
      bullet-graph capture explain --model llama-3.1-8b --dtype bfloat16
      bullet-graph capture explain --model tiny --device cpu --json
      bullet-graph capture explain --model llama-3.1-8b --plan plan.toml --entry 3f2a
    """
    here, plan = _this_machine(EngineConfig(model=model, dtype=dtype, device=device), plan_name)
    entry = None if entry_name is None else find_entry(store, entry_name)
    lookup = store.find(here, plan) if entry is None else _only(entry, here, plan)
    nearest = lookup.mismatches[0] if lookup.hit is None and lookup.mismatches else None
    if as_json:
        page = {
            "cache_dir": str(store.root),
            "here": here.values,
            "plan": plan,
            "hit": None if lookup.hit is None else lookup.hit.entry_id,
            "nearest": None if nearest is None else _mismatch_page(nearest),
            "damaged": [dataclasses.asdict(entry) for entry in lookup.damaged],
        }
        click.echo(json.dumps(page, indent=2, allow_nan=False))
    else:
        _print(store, lookup, nearest, here, plan)
    if lookup.hit is None:
        click.get_current_context().exit(_EXIT_MISS)


def _only(entry: Entry, here: Fingerprint, plan: Mapping[str, Any] | None) -> Lookup:
    mismatch = compare(entry, here, plan)
    return Lookup(entry, (), ()) if mismatch is None else Lookup(None, (mismatch,), ())


def _this_machine(config: EngineConfig, plan_name: str | None) -> tuple[Fingerprint, dict[str, Any] | None]:
    # Libraries that greet on stdout when they are imported would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        # They need torch, which --help must not wait for.
        from bullet_graph.graphs.capture_plan import load_plan  # noqa: PLC0415
        from bullet_graph.runtime.fingerprint import fingerprint_of, plan_mapping  # noqa: PLC0415
        from bullet_graph.runtime.resolve import resolve  # noqa: PLC0415

        plan = None if plan_name is None else plan_mapping(load_plan(plan_name))
        return fingerprint_of(resolve(config)), plan


def _mismatch_page(mismatch: Mismatch) -> dict[str, Any]:
    return {
        "entry_id": mismatch.entry.entry_id,
        "differences": [difference_row(difference) for difference in mismatch.differences],
        "stale": sorted(mismatch.stale),
        "rebuild_seconds": mismatch.rebuild_seconds,
    }


def _print(
    store: CaptureStore,
    lookup: Lookup,
    nearest: Mismatch | None,
    here: Fingerprint,
    plan: Mapping[str, Any] | None,
) -> None:
    console = Console()
    for damaged in lookup.damaged:
        console.print(f"damaged: {damaged.problem}", markup=False)
    entry = lookup.hit or (None if nearest is None else nearest.entry)
    if entry is None:
        console.print(f"There are no captures in {store.root}: everything has to be built.", markup=False)
        return
    table = Table(
        "component",
        "cache",
        "here",
        "verdict",
        title=f"{entry.entry_id}: {title(entry)}",
        title_justify="left",
    )
    for row in _rows(entry, here, nearest):
        table.add_row(*plain(row))
    console.print(table)
    unasked = "" if plan is not None else " (for any plan: none was asked for)"
    if nearest is None:
        console.print(f"It fits this machine{unasked}; its files are checked at a start.", style="green")
        return
    total = entry.manifest.build_seconds(ALL_KINDS)
    held = dict.fromkeys(artifact.kind for artifact in entry.manifest.artifacts)
    stale = [kind for kind in held if kind in nearest.stale]
    kept = [kind for kind in held if kind not in nearest.stale]
    to_build, of_use = ", ".join(stale) or "none of its parts", ", ".join(kept) or "nothing"
    console.print(
        f"It does not fit{unasked}. To be built anew: {to_build}; that took {nearest.rebuild_seconds:.1f} of "
        f"{total:.1f} s where it was built. Of use here: {of_use}.",
        style="yellow",
        markup=False,
    )
    if len(lookup.mismatches) > 1:
        console.print(f"{len(lookup.mismatches) - 1} other entries fit less (--entry compares with one).")


def _rows(entry: Entry, here: Fingerprint, nearest: Mismatch | None) -> list[tuple[str, str, str, str]]:
    cached, found = entry.manifest.fingerprint.values, here.values
    names = Fingerprint.of({**cached, **found}).values
    rows = [
        (
            name,
            cached.get(name, "–"),
            found.get(name, "–"),
            _verdict(name, same=cached.get(name) == found.get(name)),
        )
        for name in names
    ]
    differences = () if nearest is None else nearest.differences
    plans = [difference for difference in differences if difference.component not in names]
    return rows + [
        (d.component, d.cached or "–", d.here or "–", _verdict(d.component.partition(".")[0], same=False))
        for d in plans
    ]


def _verdict(component: str, *, same: bool) -> str:
    if same:
        return "same"
    kinds = kinds_depending_on(component)
    return f"differs: {'everything' if kinds == ALL_KINDS else ', '.join(kinds)}"
