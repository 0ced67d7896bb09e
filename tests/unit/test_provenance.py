"""Where a measurement comes from: the checkout's state and the fields of the record."""

import subprocess
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from bullet_graph import _version
from bullet_graph.perf import provenance
from bullet_graph.perf.provenance import collect_provenance, git_state


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A committed package folder inside a new checkout, with a file beside it."""
    folder = tmp_path / "checkout" / "package"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("x = 1\n")
    (folder.parent / "notes.txt").write_text("a\n")
    git(folder.parent, "init", "-q")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "-q", "-m", "first")
    return folder


def test_only_changes_inside_the_package_make_it_dirty(package: Path) -> None:
    head = git(package, "rev-parse", "HEAD")
    (package.parent / "notes.txt").write_text("b\n")
    (package.parent / "result.json").write_text("{}")
    assert git_state(package) == (head, False)
    # A checkout counts more than a stamp.
    (package / provenance.COMMIT_STAMP).write_text("0123abc\n")
    assert git_state(package) == (head, True)


def test_a_package_installed_inside_a_foreign_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / "venv" / "other_package"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("x = 1\n")
    assert git_state(installed) is None


def test_no_checkout_and_no_git(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(package) is None


@pytest.mark.parametrize(("text", "is_dirty"), [("0123abc\n", False), ("0123abc-dirty\n", True)])
def test_a_copy_without_history_may_carry_a_stamp(tmp_path: Path, text: str, is_dirty: bool) -> None:
    (tmp_path / provenance.COMMIT_STAMP).write_text(text)
    assert git_state(tmp_path) == ("0123abc", is_dirty)


def test_record_on_the_cpu() -> None:
    record = collect_provenance("cpu")
    assert datetime.fromisoformat(record.date_utc).utcoffset() == timedelta(0)
    assert record.versions["bullet_graph"] == _version.__version__
    assert record.versions["torch"] == version("torch")
    assert provenance.installed_version("no-such-distribution-anywhere") is None
    assert set(record.versions) == {"bullet_graph", "python", "torch", "triton", "flashinfer"}
    assert record.host_num_cpus >= 1
    assert (record.device_name, record.device_memory_bytes) == ("cpu", None)
    assert (record.driver_version, record.cuda_version) == (None, None)


def test_a_kept_result_names_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert provenance.without_folder("/home/someone/models/a") == "~/models/a"
    assert provenance.without_folder("--model=/home/someone/a") == "--model=~/a"
    for other in ("/home/someone-else/a", "/mnt/home/someone/a"):
        assert provenance.without_folder(other) == other


def test_processor_name_is_in_cpuinfo_or_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for name in ("aarch64", ""):
        monkeypatch.setattr(provenance.platform, "processor", lambda name=name: name)
        assert provenance.host_cpu(cpuinfo) == (name or None)
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: Other\n")
    assert provenance.host_cpu(cpuinfo) == "Fast CPU @ 3 GHz"
