"""A campaign's jobs run side by side, stop in time, and go on where they were."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.campaign import Campaign, Job, main, read_campaign
from bullet_graph.errors import ConfigError

APPEND = "python -c \"import os; open('{results}/out','a').write(os.environ.get('CUDA_VISIBLE_DEVICES','-')+' %s;')\""
SLEEP = 'python -c "import time; time.sleep(90)"'


def states(jobs: list[Job], results: Path, gpus: list[int | None], *, time_limit_s: float = 60) -> list[str]:
    return [o.state for o in Campaign(jobs, gpus, results, time_limit_s=time_limit_s).run()]


def test_commands_of_a_job_run_in_order_on_its_gpu_and_not_again(tmp_path: Path) -> None:
    job = Job("one", (APPEND % "a", APPEND % "b"))
    assert states([job], tmp_path, [3]) == ["done", "done"]
    assert (tmp_path / "out").read_text() == "3 a;3 b;"
    assert states([job], tmp_path, [3]) == ["done before", "done before"]
    assert (tmp_path / "out").read_text() == "3 a;3 b;"


def test_jobs_share_no_gpu(tmp_path: Path) -> None:
    # A second mkdir of the same GPU's folder would fail.
    (tmp_path / "nap.py").write_text(
        "import os, time\n"
        f"folder = {str(tmp_path)!r} + '/gpu' + os.environ['CUDA_VISIBLE_DEVICES']\n"
        "os.mkdir(folder)\n"
        "time.sleep(0.3)\n"
        "os.rmdir(folder)\n"
    )
    jobs = [Job(f"job{i}", (f"python {{results}}/nap.py {i}",)) for i in range(4)]
    assert states(jobs, tmp_path, [0, 1]) == ["done"] * 4


def test_a_failure_ends_its_job_alone(tmp_path: Path) -> None:
    bad = Job("bad", ('python -c "import sys; sys.exit(3)"', APPEND % "never"))
    good = Job("good", (APPEND % "good",))
    assert states([bad, good], tmp_path, [None]) == ["failed (3)", "not begun", "done"]
    assert (tmp_path / "out").read_text().endswith(" good;")


def test_the_time_limit_interrupts_and_the_next_start_goes_on(tmp_path: Path) -> None:
    job = Job("slow", (APPEND % "first", SLEEP, APPEND % "last"))
    start_s = time.monotonic()
    assert states([job], tmp_path, [None], time_limit_s=2) == ["done", "stopped", "not begun"]
    assert time.monotonic() - start_s < 45
    again = Job("slow", (APPEND % "first", APPEND % "last"))
    assert states([again], tmp_path, [None]) == ["done before", "done"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job = 3", "is no campaign"),
        ("[[job]]\nname = 'a'", "is no campaign"),
        ("[[job]]\nname = 'a'\ncommands = []", "each with commands"),
        ("[[job]]\nname='a'\ncommands=['x']\n[[job]]\nname='a'\ncommands=['y']", "different names"),
        ("= no toml", "is no campaign"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_campaign(path)


def test_bad_options_exit_with_2(tmp_path: Path) -> None:
    path = tmp_path / "campaign.toml"
    path.write_text("[[job]]\nname='a'\ncommands=['python -V']")
    for options in (["--gpus", "0,0"], ["--gpus", "x"], ["--only", "b"]):
        result = CliRunner().invoke(main, [str(path), "--results", str(tmp_path / "r"), *options])
        assert result.exit_code == 2, result.output
    result = CliRunner().invoke(main, [str(path), "--results", str(tmp_path / "r"), "--gpus", "cpu"])
    assert result.exit_code == 0, result.output
    assert len(json.loads((tmp_path / "r" / "campaign.json").read_text())) == 1


def test_the_campaigns_of_the_repository_can_be_read() -> None:
    for path in (Path(__file__).parents[2] / "bench" / "campaigns").glob("*.toml"):
        assert read_campaign(path)
