"""Which entries to give up, and giving them up."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from bullet_graph.captures.entry import Entry
from bullet_graph.captures.files import file_errors
from bullet_graph.captures.locks import build_lock
from bullet_graph.captures.store import CaptureStore
from bullet_graph.errors import CacheError


@dataclass(frozen=True, slots=True)
class PruneRules:
    """What to remove; every rule that is set counts on its own. Damaged entries go in any case.

    Attributes:
        max_age: entries that were not used for longer.
        max_total_bytes: those used longest ago, until the others fit into this.
        misfit: entries that it is true for.
    """

    max_age: timedelta | None = None
    max_total_bytes: int | None = None
    misfit: Callable[[Entry], bool] | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """An entry that was to be removed.

    Attributes:
        entry_id: its name.
        num_bytes: of its artifacts; None where that is not known.
        reason: in words.
        kept_because: why it is still there, or None.
    """

    entry_id: str
    num_bytes: int | None
    reason: str
    kept_because: str | None


def prune(store: CaptureStore, rules: PruneRules, *, now: datetime, dry_run: bool) -> tuple[Pruned, ...]:
    """Remove entries by rules; one that is in use, or being built, is kept and named.

    Args:
        now: with a time zone.
        dry_run: tell what would be removed, and leave it.
    """
    entries, damaged = store.entries()
    doomed: list[tuple[str, int | None, str]] = [(entry.entry_id, None, "damaged") for entry in damaged]
    kept_bytes = 0
    for entry in entries:
        reason = _reason(entry, rules, now)
        num_bytes = entry.manifest.num_bytes
        if (
            reason is None
            and rules.max_total_bytes is not None
            and kept_bytes + num_bytes > rules.max_total_bytes
        ):
            reason = f"over the total of {rules.max_total_bytes} bytes"
        if reason is None:
            kept_bytes += num_bytes
        else:
            doomed.append((entry.entry_id, num_bytes, reason))
    pruned = tuple(
        Pruned(name, num_bytes, reason, None if dry_run else _remove(store, name))
        for name, num_bytes, reason in doomed
    )
    if not dry_run:
        store.empty_trash()
    return pruned


def forget_interrupted(store: CaptureStore, *, dry_run: bool) -> tuple[Pruned, ...]:
    """Delete what interrupted builds and imports left; a build that is under way is kept and named."""
    with file_errors(f"cannot list interrupted builds in {store.staging}"):
        left = sorted(os.listdir(store.staging)) if store.staging.is_dir() else []
    forgotten: list[Pruned] = []
    for name in dict.fromkeys(file.partition(".")[0] for file in left):
        kept_because = None
        try:
            with (
                file_errors(f"cannot delete the interrupted build {name}"),
                build_lock(store.lock_file(name), on_wait=None),
            ):
                for file in left:
                    if (
                        not dry_run
                        and file.partition(".")[0] == name
                        and os.path.lexists(store.staging / file)
                    ):
                        store.throw_away(store.staging / file)
        except CacheError as error:
            kept_because = str(error)
        forgotten.append(Pruned(name, None, "an interrupted build", kept_because))
    return tuple(forgotten)


def _reason(entry: Entry, rules: PruneRules, now: datetime) -> str | None:
    if rules.max_age is not None and now - entry.last_used > rules.max_age:
        return f"not used for {(now - entry.last_used).days} days"
    if rules.misfit is not None and rules.misfit(entry):
        return "it does not fit this machine"
    return None


def _remove(store: CaptureStore, name: str) -> str | None:
    try:
        store.remove(name)
    except CacheError as error:
        return str(error)
    return None
