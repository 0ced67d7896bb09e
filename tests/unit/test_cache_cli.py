"""``bullet-graph capture`` on stores of small entries."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import FINGERPRINT, PARTS, PLAN, artifact_file, build_entry, flip_byte, quiet
from cli_runner import refused, run

from bullet_graph.captures.archive import export_entry
from bullet_graph.captures.builder import open_build
from bullet_graph.captures.entry import MANIFEST_NAME, Entry
from bullet_graph.captures.fingerprint import ArtifactKind, Fingerprint
from bullet_graph.captures.store import CaptureStore
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
    return build_entry(store)


def here(**changed: str) -> Fingerprint:
    components = machine_components("cpu") | model_components(PRESETS["tiny"], torch.float32)
    return Fingerprint.of({**components, **changed})


def capture(store: CaptureStore, *arguments: str) -> Any:
    return run("capture", *arguments, "--cache-dir", str(store.root))


def page(store: CaptureStore, *arguments: str, exit_code: int = 0) -> Any:
    result = capture(store, *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_an_empty_store(store: CaptureStore) -> None:
    assert "There are no captures in" in capture(store, "list").stdout
    assert page(store, "list")["entries"] == []
    assert "There are no captures in" in capture(store, "verify").stdout
    result = capture(store, *EXPLAIN)
    assert result.exit_code == 1
    assert "everything has to be built" in result.stdout
    assert not store.root.exists()


def test_list_tells_what_fits_and_what_is_damaged(store: CaptureStore, foreign: Entry) -> None:
    fitting = build_entry(store, here())
    broken = build_entry(store, here(torch="0"))
    (broken.folder / MANIFEST_NAME).unlink()
    listed = page(store, "list")
    by_name = {entry["entry_id"]: entry for entry in listed["entries"]}
    assert by_name[fitting.entry_id]["differences"] == []
    assert "gpu" in [difference["component"] for difference in by_name[foreign.entry_id]["differences"]]
    assert [entry["entry_id"] for entry in listed["damaged"]] == [broken.entry_id]
    lines = capture(store, "list").stdout.splitlines()
    assert any(fitting.entry_id in line and "fits" in line for line in lines)
    assert any(foreign.entry_id in line and "llama-3.1-8b, bfloat16, NVIDIA H200" in line for line in lines)
    assert any(broken.entry_id in line and "damaged" in line for line in lines)


def test_show(store: CaptureStore, foreign: Entry) -> None:
    shown = page(store, "show", foreign.entry_id[:6])
    assert shown["entry_id"] == foreign.entry_id
    assert {artifact["name"] for artifact in shown["artifacts"]} == PARTS.keys()
    text = capture(store, "show", foreign.entry_id).stdout
    for expected in (
        "flashinfer",
        "90.0 s",
        "580.159.04",
        "batch_sizes",
        "[1, 2, 4]",
        "It has a self-check.",
    ):
        assert expected in text


def test_imported_text_cannot_control_the_terminal(store: CaptureStore) -> None:
    evil = {"model": "\x1b[2J[bold]", "\x1b": 1, "note": "[red]x[/red]"}
    entry = build_entry(store, plan=evil)
    for arguments in (("list",), ("show", entry.entry_id), EXPLAIN):
        text = capture(store, *arguments).stdout
        assert "\x1b" not in text
    assert "[red]x[/red]" in capture(store, "show", entry.entry_id).stdout


def test_verify(store: CaptureStore, foreign: Entry) -> None:
    other = build_entry(store, here())
    assert page(store, "verify") == {foreign.entry_id: [], other.entry_id: []}
    flip_byte(artifact_file(foreign, "inductor"))
    found = page(store, "verify", exit_code=1)
    assert "another checksum" in found[foreign.entry_id][0]
    assert found[other.entry_id] == []
    assert page(store, "verify", other.entry_id) == {other.entry_id: []}
    (other.folder / MANIFEST_NAME).write_text("{}")
    result = capture(store, "verify")
    assert result.exit_code == 1
    assert f"{other.entry_id}: damaged" in result.stdout


def test_explain_a_hit(store: CaptureStore) -> None:
    entry = build_entry(store, here(), plan={"model": "tiny"})
    found = page(store, *EXPLAIN)
    assert (found["hit"], found["nearest"]) == (entry.entry_id, None)
    assert found["here"]["torch"] == torch.__version__
    text = capture(store, *EXPLAIN).stdout
    assert "It fits this machine (for any plan: none was asked for)" in text
    assert "differs" not in text


def test_explain_a_miss(store: CaptureStore, foreign: Entry) -> None:
    near = build_entry(store, here(code_graphs="other"))
    found = page(store, *EXPLAIN, exit_code=1)
    assert found["hit"] is None
    nearest = found["nearest"]
    assert (nearest["entry_id"], nearest["stale"], nearest["rebuild_seconds"]) == (
        near.entry_id,
        ["capture"],
        0.5,
    )
    (difference,) = nearest["differences"]
    assert (difference["component"], difference["cached"]) == ("code_graphs", "other")
    result = capture(store, *EXPLAIN)
    assert result.exit_code == 1
    row = next(line for line in result.stdout.splitlines() if "code_graphs" in line)
    assert "other" in row
    assert "differs: capture" in row
    assert "To be built anew: capture; that took 0.5 of 350.5 s" in result.stdout
    assert "1 other entries fit less" in result.stdout
    assert (
        page(store, *EXPLAIN, "--entry", foreign.entry_id, exit_code=1)["nearest"]["rebuild_seconds"] == 350.5
    )


def test_explain_compares_the_plan(store: CaptureStore, tmp_path: Path) -> None:
    from bullet_graph.graphs.capture_plan import default_plan, format_plan  # noqa: PLC0415
    from bullet_graph.runtime.fingerprint import plan_mapping  # noqa: PLC0415

    plan = default_plan(
        model="tiny",
        dtype="float32",
        num_sms=132,
        max_num_seqs=4,
        max_rows=64,
        shape=PRESETS["tiny"],
        decode_sms=(),
    )
    (tmp_path / "plan.toml").write_text(format_plan(plan))
    asked = (*EXPLAIN, "--plan", str(tmp_path / "plan.toml"))
    other = build_entry(store, here(), plan={**plan_mapping(plan), "max_num_seqs": 8})
    found = page(store, *asked, exit_code=1)["nearest"]
    assert [d["component"] for d in found["differences"]] == ["plan.max_num_seqs"]
    assert "plan.max_num_seqs" in capture(store, *asked).stdout
    assert page(store, *EXPLAIN)["hit"] == other.entry_id
    fitting = build_entry(store, here(), plan=plan_mapping(plan))
    assert page(store, *asked)["hit"] == fitting.entry_id


def test_export_and_import(store: CaptureStore, tmp_path: Path) -> None:
    entry = build_entry(store, here())
    file = tmp_path / "captures.tgz"
    exported = page(store, "export", entry.entry_id, str(file))
    assert exported["num_bytes"] == file.stat().st_size
    assert not exported["signed"]
    assert "the file exists" in refused(capture(store, "export", entry.entry_id, str(file)))
    assert "not signed" in capture(store, "export", entry.entry_id, str(file), "--overwrite").stdout
    other = CaptureStore(tmp_path / "other")
    result = capture(other, "import", str(file))
    assert result.exit_code == 0
    assert f"Entry {entry.entry_id}" in result.stdout
    assert "its origin was not checked" in result.stdout
    assert "does not fit" not in result.stdout
    assert not page(other, "import", str(file))["is_new"]
    assert page(other, *EXPLAIN)["hit"] == entry.entry_id


def test_an_import_that_does_not_fit_is_kept_and_said(
    store: CaptureStore, foreign: Entry, tmp_path: Path
) -> None:
    with store.open(foreign) as opened:
        export_entry(opened, tmp_path / "x.tgz")
    other = CaptureStore(tmp_path / "other")
    result = capture(other, "import", str(tmp_path / "x.tgz"))
    assert result.exit_code == 0
    assert "It does not fit this machine, which differs in device" in result.stdout
    assert len(other.entries()[0]) == 1


def test_a_damaged_entry_is_not_exported(store: CaptureStore, foreign: Entry, tmp_path: Path) -> None:
    flip_byte(artifact_file(foreign, "inductor"))
    assert "is damaged" in refused(capture(store, "export", foreign.entry_id, str(tmp_path / "x.tgz")))
    assert not (tmp_path / "x.tgz").exists()


def test_prune(store: CaptureStore, foreign: Entry) -> None:
    fitting = build_entry(store, here())
    assert f"would remove {foreign.entry_id}" in capture(store, "prune", "--misfits", "--dry-run").stdout
    (pruned,) = page(store, "prune", "--misfits")
    assert (pruned["entry_id"], pruned["kept_because"]) == (foreign.entry_id, None)
    os.utime(fitting.folder / MANIFEST_NAME, (0, 0))
    with store.open(fitting):
        os.utime(fitting.folder / MANIFEST_NAME, (0, 0))
        text = capture(store, "prune", "--unused-for", "30d").stdout
    assert f"kept {fitting.entry_id}" in text
    assert "in use" in text
    assert f"removed {fitting.entry_id}" in capture(store, "prune", "--max-size", "1KiB").stdout
    assert capture(store, "prune", "--max-size", "1KiB").stdout == "There is nothing to remove.\n"


def test_prune_by_name_and_what_was_interrupted(store: CaptureStore, foreign: Entry) -> None:
    with open_build(store, FINGERPRINT, {}, tell=quiet) as build:
        build.add_bytes("a", ArtifactKind.TRITON, b"a", path="a", build_seconds=1)
    (forgotten,) = page(store, "prune", "--interrupted")
    assert forgotten["reason"] == "an interrupted build"
    assert not list(store.staging.iterdir())
    assert "it was named" in capture(store, "prune", foreign.entry_id[:5]).stdout
    broken = build_entry(store, plan=PLAN)
    (broken.folder / MANIFEST_NAME).unlink()
    assert page(store, "prune", broken.entry_id)[0]["num_bytes"] is None
    assert store.entries() == ((), ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "zz"), "one entry of"),
        (("show", ""), "has to begin with ''"),
        (("verify", "zz"), "none does"),
        (("export", "zz", "x.tgz"), "none does"),
        (("export", "zz", "/nonexistent/x.tgz"), "does not exist"),
        (("import", "/nonexistent.tgz"), "No such file"),
        (("import", __file__), "is refused, and nothing of it is placed into the cache"),
        (("prune",), "say what to remove"),
        (("prune", "zz", "--misfits"), "not both"),
        (("prune", "zz"), "none does"),
        (("prune", "--unused-for", "30"), "is no age"),
        (("prune", "--unused-for", "0d"), "is no age"),
        (("prune", "--max-size", "many"), "is no size"),
        (("explain",), "Missing option '--model'"),
        (("explain", "--model", "nonesuch"), "unknown model"),
        (("explain", "--model", "tiny", "--dtype", "fp8"), "--dtype"),
        ((*EXPLAIN, "--entry", "zz"), "none does"),
        ((*EXPLAIN, "--plan", "/nonexistent.toml"), "nonexistent.toml"),
    ],
)
def test_bad_input_is_told_in_one_line(store: CaptureStore, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(capture(store, *arguments))


def test_a_beginning_that_several_entries_share(store: CaptureStore) -> None:
    names = [build_entry(store, plan={"n": index}).entry_id for index in range(17)]
    shared = next(name[0] for name in names if sum(other[0] == name[0] for other in names) > 1)
    assert "do (there:" in refused(capture(store, "show", shared))
