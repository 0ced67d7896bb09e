"""``bullet-graph capture``: listing, explaining, exporting, importing and pruning."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import FILES, PACKAGE, build, flip_byte
from cli_runner import refused, run

from bullet_graph.captures.store import MANIFEST_NAME, CaptureStore, Entry
from bullet_graph.config import EngineConfig
from bullet_graph.graphs.capture_plan import default_plan, format_plan
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime.fingerprint import machine_components, model_components

EXPLAIN = ("explain", "--model", "tiny", "--device", "cpu")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CaptureStore:
    # Wide enough for a row of any table, so that lines can be looked for.
    monkeypatch.setenv("COLUMNS", "250")
    return CaptureStore(tmp_path / "captures")


@pytest.fixture
def foreign(store: CaptureStore) -> Entry:
    """An entry of another machine."""
    return build(store)


def here(**changed: str) -> dict[str, str]:
    return machine_components(torch.device("cpu")) | model_components(PRESETS["tiny"], "float32") | changed


def capture(store: CaptureStore, *arguments: str) -> Any:
    return run("capture", *arguments, "--cache-dir", str(store.root))


def page(store: CaptureStore, *arguments: str, exit_code: int = 0) -> Any:
    result = capture(store, *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_an_empty_store(store: CaptureStore) -> None:
    assert "There are no capture caches in" in capture(store, "list").stdout
    assert page(store, "list")["entries"] == []
    assert "everything has to be built" in capture(store, *EXPLAIN).stdout
    assert not store.root.exists()


def test_list_says_what_fits_and_what_is_damaged(store: CaptureStore, foreign: Entry) -> None:
    fitting, broken = build(store, here()), build(store, here(torch="0"))
    (broken.folder / MANIFEST_NAME).unlink()
    listed = page(store, "list")
    by_name = {entry["entry_id"]: entry for entry in listed["entries"]}
    assert by_name[fitting.entry_id]["differences"] == []
    assert "gpu" in [difference["component"] for difference in by_name[foreign.entry_id]["differences"]]
    assert [entry["entry_id"] for entry in listed["damaged"]] == [broken.entry_id]
    lines = capture(store, "list").stdout.splitlines()
    assert any(fitting.entry_id in line and "fits" in line and "today" in line for line in lines)
    assert any(foreign.entry_id in line and "llama-3.1-8b, bfloat16, NVIDIA H200" in line for line in lines)
    assert any(broken.entry_id in line and "damaged" in line for line in lines)


def test_list_shows_one_and_checks_its_files(store: CaptureStore, foreign: Entry) -> None:
    shown = page(store, "list", foreign.entry_id[:6])
    assert (shown["entry_id"], shown["problems"]) == (foreign.entry_id, [])
    assert {file["path"] for file in shown["files"]} == FILES.keys()
    text = capture(store, "list", foreign.entry_id).stdout
    for expected in ("flashinfer", "350.5 s", "580.159.04", "batch_sizes", "[1, 2, 4]", "as they were built"):
        assert expected in text
    flip_byte(foreign.files / PACKAGE)
    assert "another checksum" in capture(store, "list", foreign.entry_id).stdout


def test_imported_text_cannot_control_the_terminal(store: CaptureStore) -> None:
    entry = build(store, plan={"model": "\x1b[2J[bold]", "\x1b": 1, "note": "[red]x[/red]"})
    for arguments in (("list",), ("list", entry.entry_id), EXPLAIN):
        assert "\x1b" not in capture(store, *arguments).stdout
    assert "[red]x[/red]" in capture(store, "list", entry.entry_id).stdout


def test_explain_a_hit(store: CaptureStore) -> None:
    entry = build(store, here(), plan={"model": "tiny"})
    found = page(store, *EXPLAIN)
    assert (found["hit"], found["nearest"]) == (entry.entry_id, None)
    assert found["here"]["torch"] == torch.__version__
    text = capture(store, *EXPLAIN).stdout
    assert "It fits this machine (for any plan: none was given)" in text
    assert "differs" not in text


def test_explain_a_miss_by_the_nearest_entry(store: CaptureStore, foreign: Entry) -> None:
    del foreign
    near = build(store, here(code="other"))
    found = page(store, *EXPLAIN, exit_code=1)
    assert found["hit"] is None
    assert (found["nearest"]["entry_id"], found["nearest"]["build_seconds"]) == (near.entry_id, 350.5)
    (difference,) = found["nearest"]["differences"]
    assert (difference["component"], difference["cached"]) == ("code", "other")
    text = capture(store, *EXPLAIN).stdout
    row = next(line for line in text.splitlines() if " code " in line)
    assert "other" in row
    assert "differs" in row
    assert "took 350.5 s" in text


def test_explain_compares_the_plan(store: CaptureStore, tmp_path: Path) -> None:
    device: dict[str, Any] = {"dtype": "float32", "num_sms": 132, "shape": PRESETS["tiny"], "decode_sms": ()}
    configs = [EngineConfig(model="tiny", max_num_seqs=n, max_num_batched_tokens=64 - n) for n in (4, 8)]
    plans = [default_plan(config, **device) for config in configs]
    entry = build(store, here(), plan=asdict(plans[0]))
    for index, plan in enumerate(plans):
        (tmp_path / f"{index}.toml").write_text(format_plan(plan))
    assert page(store, *EXPLAIN, "--plan", str(tmp_path / "0.toml"))["hit"] == entry.entry_id
    missed = page(store, *EXPLAIN, "--plan", str(tmp_path / "1.toml"), exit_code=1)
    assert {d["component"] for d in missed["nearest"]["differences"]} == {"plan.decode", "plan.max_num_seqs"}


def test_an_entry_travels_as_a_file(store: CaptureStore, foreign: Entry, tmp_path: Path) -> None:
    archive, fleet = tmp_path / "captures.tgz", CaptureStore(tmp_path / "fleet")
    exported = page(store, "export", foreign.entry_id[:4], str(archive))
    assert (exported["num_bytes"], exported["signed"]) == (archive.stat().st_size, False)
    assert "add --overwrite" in refused(capture(store, "export", foreign.entry_id, str(archive)))
    text = capture(fleet, "import", str(archive)).stdout
    for expected in ("is in the store", "Its origin was not checked", "does not fit this machine"):
        assert expected in text
    again = page(fleet, "import", str(archive))
    assert (again["is_new"], again["signature_checked"]) == (False, False)
    assert "cannot be used" in refused(capture(fleet, "import", str(archive), "--trusted-key", str(archive)))


def test_prune(store: CaptureStore, foreign: Entry) -> None:
    fitting = build(store, here())
    old = build(store, here(torch="0"))
    os.utime(old.folder / MANIFEST_NAME, (0, 0))
    (planned,) = page(store, "prune", "--unused-for", "8w", "--dry-run")
    assert planned["entry_id"] == old.entry_id
    assert "would remove" in capture(store, "prune", "--unused-for", "8w", "--dry-run").stdout
    assert f"removed {old.entry_id}" in capture(store, "prune", "--unused-for", "8w").stdout
    with store.open(foreign):
        told = capture(store, "prune", "--max-size", "1B").stdout
    assert f"kept {foreign.entry_id}" in told
    assert "in use by a running engine" in told
    assert f"removed {fitting.entry_id}" in told
    assert [entry["entry_id"] for entry in page(store, "prune", foreign.entry_id)] == [foreign.entry_id]
    assert "nothing to remove" in capture(store, "prune", "--max-size", "1GiB").stdout
    assert store.entries() == ((), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prune",), "say what to remove"),
        (("prune", "3f2a", "--max-size", "1GiB"), "say what to remove"),
        (("prune", "--unused-for", "soon"), "is no age: write 12h, 30d or 8w"),
        (("prune", "--max-size", "much"), "much"),
        (("list", "zzzz"), "has to begin with 'zzzz', but none does"),
        (("list", ""), "has to begin with ''"),
        (("export", "zzzz", "x.tgz"), "but none does"),
        (("import", "nonesuch.tgz"), "No such file"),
        (("explain", "--model", "gpt-9"), "unknown model"),
    ],
)
def test_bad_input_is_refused(store: CaptureStore, foreign: Entry, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(capture(store, *arguments))
    assert foreign.folder.is_dir()
