"""``bullet-graph profile`` where it cannot run: told in one line, before anything is loaded."""

import pytest
from cli_runner import refused, run

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_without_a_gpu_it_says_so() -> None:
    assert "a profile measures a GPU" in refused(run("profile", "--model", "tiny"))


def test_an_unknown_model_without_a_gpu() -> None:
    # What the machine lacks comes first: no other option could mend it.
    assert "sees no CUDA device" in refused(run("profile", "--model", "nonesuch"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--model'"),
        (("--model", "tiny", "--decode-sms", "many"), "no list of numbers"),
        (("--model", "tiny", "--time-budget-s", "0"), "--time-budget-s"),
        (("--model", "tiny", "--seed", "-1"), "--seed"),
        (("--model", "tiny", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--model", "tiny", "--dtype", "fp8"), "--dtype"),
        (("--model", "tiny", "--partition-backend", "mps"), "--partition-backend"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(run("profile", *arguments))
