"""What the commands on a store of captures share: where it is, and how an entry is named and told."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.text import Text

from bullet_graph.captures.entry import Entry
from bullet_graph.captures.store import CaptureStore, default_root
from bullet_graph.errors import CacheError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB")
_STEP = 1024


def cache_dir_option(command: _Command) -> _Command:
    """Give a command ``store: CaptureStore``."""
    return click.option(
        "--cache-dir",
        "store",
        metavar="DIR",
        callback=lambda _, __, value: CaptureStore(Path(value) if value is not None else default_root()),
        help="The folder of captures.  [default: in your cache folder]",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


def find_entry(store: CaptureStore, prefix: str) -> Entry:
    """The entry whose name begins so.

    Raises:
        CacheError: none does, several do, or it is damaged.
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


def title(entry: Entry) -> str:
    """What an entry is for, in a few words."""
    values = entry.manifest.fingerprint.values
    model = entry.manifest.plan.get("model")
    # An imported manifest may say anything.
    named = model if isinstance(model, str) and model.isprintable() else values.get("model", "?")
    where = values.get("gpu") or values.get("host_cpu") or values.get("device", "?")
    return f"{named}, {values.get('dtype', '?')}, {where}"


def size_text(num_bytes: int) -> str:
    """A number of bytes for people."""
    size, unit = float(num_bytes), 0
    while size >= _STEP and unit < len(_BINARY_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_BINARY_UNITS[unit]}"


def age_text(moment: datetime) -> str:
    """How long ago, for people."""
    days = (datetime.now(UTC) - moment).days
    return "today" if days < 1 else f"{days} days ago" if days > 1 else "a day ago"


def plain(values: Iterable[str]) -> list[Text]:
    """Cells of a table whose text is no markup."""
    return [Text(value) for value in values]
