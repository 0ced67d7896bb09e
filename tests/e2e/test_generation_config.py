"""Defaults of sampling from ``generation_config.json``: who takes them, who overrules them, and what turns them off."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from cli_runner import parsed, run
from engines import make_engine
from servers import Served, serving

from bullet_graph import Engine, ModelError, SamplingParams

PROMPT = list(range(5, 25))
# The engine's own default would sample from all tokens at temperature 1.
OWN = {"temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "max_new_tokens": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama")
    write(folder, **OWN)
    return folder


def write(folder: Path, **values: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, **values}))


@pytest.fixture(scope="module")
def greedy(folder: Path) -> tuple[int, ...]:
    """What a request gets with the model's own ``top_k`` of 1."""
    with make_engine(folder) as engine:
        return generated(engine, SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=7))


def generated(engine: Engine, params: SamplingParams | None = None) -> tuple[int, ...]:
    (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_requests_without_params_take_them(folder: Path, greedy: tuple[int, ...]) -> None:
    with make_engine(folder) as engine:
        assert SamplingParams(**engine.default_sampling_params) == SamplingParams(
            temperature=0.7, top_k=1, top_p=0.9, min_p=0.01, repetition_penalty=1.3, max_tokens=7
        )
        assert generated(engine) == greedy
        engine.add_request("alone", PROMPT)
        while engine.has_unfinished_requests():
            (last,) = engine.step()
        assert last.outputs[0].token_ids == greedy
        assert generated(engine, SamplingParams(max_tokens=7, seed=1)) != greedy
    with make_engine(folder, generation_config="none") as engine:
        assert engine.default_sampling_params == {}
        assert len(generated(engine)) == 16
        # Tuned chat models may name their end of sequence, here token 1, only in the tokenizer's files.
        assert generated(engine, SamplingParams(max_tokens=5, logit_bias={1: 100})) == (1,)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder) as served:
        yield served


def answer(served: Served, path: str, **fields: Any) -> tuple[int, ...]:
    response = served.post(f"/v1/{path}", **{"ignore_eos": True, "return_token_ids": True, "seed": 3} | fields)
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def test_fields_that_a_request_leaves_out(served: Served, greedy: tuple[int, ...]) -> None:
    assert answer(served, "completions", prompt=PROMPT)[:7] == greedy
    assert answer(served, "completions", prompt=PROMPT, temperature=None, top_k=None)[:7] == greedy
    assert answer(served, "completions", prompt=PROMPT, temperature=3, top_k=-1, top_p=1, min_p=0)[:7] != greedy
    # OpenAI's own default of a completion, the model's of a chat, and the request's.
    messages = [{"role": "user", "content": "hi"}]
    assert len(answer(served, "completions", prompt=PROMPT)) == 16
    assert len(answer(served, "chat/completions", messages=messages)) == 7
    assert len(answer(served, "chat/completions", messages=messages, max_tokens=9)) == 9


def test_the_command_line_overrules_them(folder: Path, greedy: tuple[int, ...]) -> None:
    def printed(*arguments: str) -> list[int]:
        prompt = ("--prompt-ids", ",".join(map(str, PROMPT)), "--ignore-eos", "--json")
        result = run("generate", "--model", str(folder), "--device", "cpu", *prompt, "--max-tokens", "7", *arguments)
        return parsed(result)["outputs"][0]["token_ids"]

    assert printed() == list(greedy)
    assert printed("--top-k", "-1", "--min-p", "0", "--temperature", "3") != list(greedy)
    assert printed("--generation-config", "none") != list(greedy)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -1}, r"temperature must be in .*, got -1; correct the file"),
        ({"top_p": "0.9"}, "top_p must be"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"max_new_tokens": -1}, "max_tokens must be"),
    ],
)
def test_what_no_request_may_have(tmp_path: Path, values: dict[str, object], problem: str) -> None:
    write_checkpoint(tmp_path, "llama", num_layers=1)
    write(tmp_path, **values)
    with pytest.raises(ModelError, match=rf"generation_config\.json: {problem}"):
        make_engine(tmp_path)
    with make_engine(tmp_path, generation_config="none"):
        pass
    write(tmp_path, **dict.fromkeys(values))
    with make_engine(tmp_path) as engine:
        assert engine.default_sampling_params == {}
