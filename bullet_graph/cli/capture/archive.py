"""``bullet-graph capture export`` and ``import``: an entry as one file."""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import click

from bullet_graph.captures.archive import export_entry, import_archive
from bullet_graph.captures.store import CaptureStore
from bullet_graph.cli.capture.listing import difference_row, differences_here
from bullet_graph.cli.capture.store_options import cache_dir_option, find_entry, json_option, size_text, title
from bullet_graph.cli.result_file import check_result_file
from bullet_graph.models.progress import progress_bar


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
    """Write an entry into one file, a compressed tar; ENTRY is its name, or how it begins.

    Its checksums are checked first. A key pair for signing: `openssl genpkey -algorithm ed25519 -out fleet.key`
    and `openssl pkey -in fleet.key -pubout -out fleet.pub`.

    \b
    Examples:
      bullet-graph capture export 3f2a captures.tgz
      bullet-graph capture export 3f2a captures.tgz --sign-key fleet.key --overwrite
    """
    check_result_file(file, overwrite=overwrite, option="FILE")
    found = find_entry(store, entry)
    with store.open(found) as opened, _bar(found.manifest.num_bytes, as_json=as_json) as advance:
        export_entry(opened, file, sign_key=sign_key, on_bytes=advance)
    num_bytes = file.stat().st_size
    if as_json:
        result = {
            "entry_id": found.entry_id,
            "file": str(file),
            "num_bytes": num_bytes,
            "signed": sign_key is not None,
        }
        click.echo(json.dumps(result, indent=2))
    else:
        signed = "signed" if sign_key is not None else "not signed"
        click.echo(f"Entry {found.entry_id} ({title(found)}) is in {file}: {size_text(num_bytes)}, {signed}.")


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

    A cache is code: import only what comes from a source you trust, or what a key you trust has signed. Checksums
    tell damage, not malice.

    \b
    Examples:
      bullet-graph capture import captures.tgz
      bullet-graph capture import captures.tgz --trusted-key fleet.pub --cache-dir /mnt/captures
    """
    with _bar(None, as_json=as_json) as advance:
        imported = import_archive(
            store,
            file,
            trusted_keys=trusted_keys,
            tell=lambda line: click.echo(line, err=True),
            on_bytes=advance,
        )
    differences = differences_here(imported.entry)
    if as_json:
        result = {
            "entry_id": imported.entry.entry_id,
            "is_new": imported.is_new,
            "is_signed": imported.is_signed,
            "signature_checked": bool(trusted_keys),
            "differences": [difference_row(difference) for difference in differences],
        }
        click.echo(json.dumps(result, indent=2))
        return
    entry = imported.entry
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


def _bar(num_bytes: int | None, *, as_json: bool) -> AbstractContextManager[Callable[[float], object]]:
    show = not as_json and sys.stderr.isatty()
    return progress_bar(show, total=num_bytes, unit="B", unit_scale=True, dynamic_ncols=True)
