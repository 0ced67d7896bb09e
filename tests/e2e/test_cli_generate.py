"""``bullet-graph generate`` and the console script's front door, end to end on the CPU."""

import json
from pathlib import Path

import pytest
from cli_runner import TINY, run
from click.testing import Result
from engines import Model

from bullet_graph import Engine, SamplingParams, __version__


def generate(*arguments: str, stdin: bytes | None = None) -> Result:
    return run("generate", *TINY, *arguments, stdin=stdin)


def of_model(model: Model, *arguments: str, stdin: bytes | None = None) -> Result:
    sampling = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos")
    return run("generate", "--model", str(model.folder), "--device", "cpu", *sampling, *arguments, stdin=stdin)


@pytest.fixture(scope="module")
def expected_text(model: Model) -> str:
    """What the engine itself makes of one prompt."""
    with Engine(str(model.folder), device="cpu") as engine:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = engine.generate("The dog", params, use_tqdm=False)
    return output.outputs[0].text


# ---- what is printed ----


@pytest.mark.usefixtures("no_tokenizer")
def test_ids_are_streamed_where_there_is_no_tokenizer() -> None:
    result = generate("--prompt-ids", "1,2,3", "--max-tokens", "5", "--temperature", "0")
    assert result.exit_code == 0, result.output
    with Engine("tiny", device="cpu", max_model_len=512) as engine:
        (output,) = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert tuple(map(int, result.stdout.split())) == output.outputs[0].token_ids
    assert "Memory ledger" in result.stderr
    assert result.stderr.endswith("tiny: the weights are random, so its text means nothing\n")


def test_text_from_every_source(model: Model, expected_text: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\nThe dog\n   \n", encoding="utf-8")
    for result in (
        of_model(model, "--prompt", "The dog"),
        of_model(model, "--prompt-file", str(prompts)),
        of_model(model, stdin=b"The dog\n"),
    ):
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{expected_text}\n"


def test_several_prompts_are_labelled_and_in_order(model: Model, expected_text: str) -> None:
    result = of_model(model, "--prompt", "The dog", "--prompt", "Another prompt", "--n", "2")
    parts = result.stdout.split("=== ")
    assert [part.splitlines()[0] for part in parts[1:]] == [
        "prompt 1, output 1 of 2: The dog",
        "prompt 1, output 2 of 2: The dog",
        "prompt 2, output 1 of 2: Another prompt",
        "prompt 2, output 2 of 2: Another prompt",
    ]
    assert parts[1].endswith(f"The dog\n{expected_text}\n")
    assert parts[2].endswith(f"The dog\n{expected_text}\n")


def test_json_lines(model: Model, expected_text: str) -> None:
    result = of_model(model, "--json", "--logprobs", "2", "--prompt", "The dog", "--prompt-ids", "5,6")
    assert result.stderr == ""
    records = {r["request_id"]: r for r in map(json.loads, result.stdout.splitlines())}
    assert set(records) == {"0", "1"}
    record = records["0"]
    assert record["prompt"] == "The dog"
    assert record["error"] is None
    (output,) = record["outputs"]
    assert output["text"] == expected_text
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == len(output["logprobs"]) == 12
    assert len(output["logprobs"][0]["top"]) == 2
    assert 0 < record["metrics"]["ttft_ms"] <= record["metrics"]["e2e_ms"]
    assert records["1"]["prompt"] is None
    assert records["1"]["prompt_token_ids"] == [5, 6]


def test_chat_uses_the_models_template(model: Model) -> None:
    variables = ("--chat-template-kwargs", '{"speaker": "dog"}')
    result = of_model(model, "--chat", *variables, "--json", "--prompt", "Hello")
    (record,) = map(json.loads, result.stdout.splitlines())
    with Engine(str(model.folder), device="cpu") as engine:
        assert engine.tokenizer is not None
        ids = record["prompt_token_ids"]
        text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|bos|>[user] Hello<|eos|>\n[dog] "
    assert record["prompt"] == "Hello"


def test_sampling_follows_the_seed() -> None:
    def ids(seed: str, *others: str) -> str:
        arguments = ("--prompt-ids", "1,2,3", *others, "--seed", seed, "--max-tokens", "8", "--json")
        records = [json.loads(line) for line in generate(*arguments).stdout.splitlines()]
        return next(r["outputs"][0]["token_ids"] for r in records if r["request_id"] == "0")

    assert ids("1") == ids("1", "--prompt-ids", "4,5")
    assert ids("1") != ids("2")


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_batch_the_bad_prompt_fails_alone(as_json: bool) -> None:
    arguments = ("--prompt-ids", "1,2", "--prompt-ids", "999", "--max-tokens", "4")
    result = generate(*arguments, *(["--json"] if as_json else []))
    assert result.exit_code == 2
    assert "error: prompt 2: token id 999" in result.stderr
    if as_json:
        records = {r["request_id"]: r for r in map(json.loads, result.stdout.splitlines())}
        assert "999" in records["1"]["error"]
        assert len(records["0"]["outputs"][0]["token_ids"]) == 4
    else:
        assert len(result.stdout.split()) == 4


# ---- the front door ----


def test_version() -> None:
    assert run("--version").stdout == f"bullet-graph, version {__version__}\n"


def test_help_shows_examples_a_line_each() -> None:
    result = run("generate", "--help")
    assert result.exit_code == 0
    assert "Examples:\n    bullet-graph" in result.stdout
