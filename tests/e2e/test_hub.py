"""Models by hub id, from a small hub on loopback: what is downloaded, what is kept, and what is refused."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from cli_runner import parsed, refused, run, write_trace
from engines import GREEDY, make_engine, tokens_of
from hub_server import Hub, commit_of, point_to, serving_hub
from huggingface_hub import constants
from programs import json_printed_by

from bullet_graph.errors import ModelError
from bullet_graph.models.presets import resolve_model

REPO = "someone/Small-Llama"
NEEDED = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_checkpoint(folder, "llama", shards=2)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "m.gguf", "original/model.safetensors"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"?")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with serving_hub() as hub:
        hub.repositories[REPO] = folder
        point_to(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def test_only_the_files_needed_are_downloaded_and_once(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(folder) as local:
        expected = [tokens_of(output) for output in local.generate(["a", [5, 6]], GREEDY, use_tqdm=False)]
    found = resolve_model(REPO)
    assert (found.name, found.hub_id, found.folder and found.folder.name) == ("Small-Llama", REPO, commit_of(REPO))
    assert hub.downloaded() == NEEDED
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        with make_engine(REPO) as engine:
            assert [tokens_of(output) for output in engine.generate(["a", [5, 6]], GREEDY, use_tqdm=False)] == expected
        shards = [path.name for path in folder.glob("model-*.safetensors")]
        assert len(shards) > 1
        assert hub.downloaded() == sorted([*NEEDED, *shards, "model.safetensors.index.json"])


def test_a_folder_or_a_preset_comes_before_the_hub(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    hub.repositories[f"{folder.name}/original"] = folder
    with pytest.raises(ModelError, match=r"original/config\.json is missing"):
        resolve_model(f"{folder.name}/original")
    with pytest.raises(ModelError, match=r"no such preset; did you mean tiny\?"):
        resolve_model("tinny")
    assert hub.seen == []


def test_results_name_the_model_and_its_commit(hub: Hub, tmp_path: Path) -> None:
    trace = write_trace(tmp_path, (5, 3))
    arguments = ("--device", "cpu", "--trace", str(trace), "--kv-cache-bytes", "4MiB", "--load-format", "dummy")
    result = parsed(run("bench", "throughput", "--model", REPO, "--revision", "main", *arguments, "--json"))
    assert (result["model"], result["engine"]["revision"]) == (REPO, commit_of(REPO))
    assert hub.downloaded() == NEEDED


def test_the_librarys_settings_hold_in_a_process_of_its_own(hub: Hub, tmp_path: Path) -> None:
    hub.gated[REPO] = "Bearer hf_secret"
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_secret"}
    simulate = ("-m", "bullet_graph", "simulate", "--model", REPO, "--gpu", "roofline:h200", "--json")
    trace = ("--trace", "synthetic:conv", "--num-prompts", "3")
    assert json_printed_by(*simulate, *trace, environment=os.environ | settings)["model_id"] == REPO
    assert (tmp_path / "home" / "hub").is_dir()
    assert {token for _, path, token in hub.seen if REPO in path} == {"Bearer hf_secret"}


def test_refusals_say_what_to_do(hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(name: str, *arguments: str) -> str:
        return refused(run("generate", "--model", name, "--device", "cpu", "--prompt-ids", "1", *arguments))

    assert "hub shows no such model: check the name" in problem("nobody/nothing")
    assert "`hf download nobody/nothing`" in problem("nobody/nothing")
    assert f"{REPO} has no revision 'v9'" in problem(REPO, "--revision", "v9")
    for command in (
        ("simulate", "--trace", "synthetic:conv"),
        ("capture", "explain"),
        ("capture", "plan", "--trace", "synthetic:conv", "--request-rate", "1"),
    ):
        assert "has no revision 'v9'" in refused(run(*command, "--model", REPO, "--revision", "v9"))
    assert "--revision" in run("profile", "--help").stdout  # which looks for a GPU first
    hub.gated["big/llama"] = "Bearer another"
    hub.repositories["big/llama"] = folder
    message = problem("big/llama")
    assert "big/llama is gated: ask for access" in message
    assert "`hf download big/llama`" in message
    (tmp_path / "only-bin").mkdir()
    (tmp_path / "only-bin" / "config.json").write_bytes((folder / "config.json").read_bytes())
    hub.repositories["old/bin"] = tmp_path / "only-bin"
    assert "old/bin on the hub must hold *.safetensors at its top level" in problem("old/bin")
    hub.repositories["some/gguf"] = folder / "original"
    assert "some/gguf on the hub must hold config.json" in problem("some/gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = problem("new/model", "--revision", "v1")
    assert "there is no folder new/model here" in message
    assert "had: run `hf download new/model --revision v1` where the hub can be reached (LocalEntry" in message
    assert len(message.partition("(LocalEntry")[2]) < 180, "the library's own text is its first line"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_to(monkeypatch, "http://127.0.0.1:9", tmp_path / "empty")
    assert f"run `hf download {REPO}` where the hub can be reached" in problem(REPO)
