"""Prompts scored by the server: the forms of OpenAI and vLLM, and lm_eval, against ``transformers``."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Model
from servers import MODEL, Served, serving

PROMPT = [5, 17, 300, 8, 44, 9]
CHOICES = [" dog", " sleeps on.", " 世界", " a request waits"]


@pytest.fixture(scope="module")
def scoring(model: Model) -> Iterator[Served]:
    with serving(model.folder, max_model_len=256) as served:
        yield served


def ids_of(served: Served, text: str, *, special: bool = False) -> list[int]:
    assert served.engine.engine.tokenizer is not None
    return served.engine.engine.tokenizer.encode(text, special)


def exact(model: Model, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model.logits(ids), -1)


def test_echo_writes_the_prompt_and_its_logprobs(scoring: Served, model: Model) -> None:
    texts = ["A fox;<|eos|> it sleeps", "The dog"]
    ids = [ids_of(scoring, text, special=True) for text in texts]
    create: Any = scoring.client().completions.create
    answer = create(model=MODEL, prompt=texts, max_tokens=3, echo=True, logprobs=2, temperature=0, n=2)
    (few,) = scoring.complete(prompt=ids[1], max_tokens=1, echo=True, logprobs=0, prompt_logprobs=2)["choices"]
    assert {len(top) for top in few["logprobs"]["top_logprobs"][1:]} == {1}
    (more,) = scoring.complete(prompt=ids[1], max_tokens=1, echo=True, logprobs=4, prompt_logprobs=1)["choices"]
    assert [max(map(len, each["prompt_logprobs"][1:])) for each in (few, more)] == [3, 2]
    (of_ids,) = scoring.complete(prompt=ids[1][1:], max_tokens=1, echo=True)["choices"]
    assert of_ids["text"].startswith(texts[1])
    (shown,) = scoring.complete(prompt=ids[1], max_tokens=1, echo=True, skip_special_tokens=False)["choices"]
    assert shown["text"].index(texts[1]) > 0
    for choice in answer.choices:
        prompt = choice.index // 2
        assert choice.text.startswith(texts[prompt])
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(ids[prompt]) + 3
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        rows = exact(model, ids[prompt])
        for row, token_id, found in zip(rows, ids[prompt][1:], logprobs.token_logprobs[1:], strict=False):
            assert found == pytest.approx(float(row[token_id]), abs=1e-3)
        assert all(len(top) in (1, 2, 3) for top in logprobs.top_logprobs[1:])
        # The first token is special and not in the text.
        assert logprobs.text_offset[:2] == [0, 0]
        for token, start in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
            assert "\ufffd" in token or choice.text.startswith(token, start)
    assert answer.usage.completion_tokens == 12


def test_without_tokens_to_generate_the_prompt_alone_is_answered(scoring: Served) -> None:
    before = scoring.metrics()
    answer = scoring.complete(prompt="The dog", max_tokens=0, echo=True)
    after = scoring.metrics()
    grown = [after[name] - before[name] for name in ("prompt_tokens_total", "generation_tokens_total")]
    assert grown == [len(ids_of(scoring, "The dog", special=True)), 0]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("The dog", None, "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_vllms_form(scoring: Served, model: Model) -> None:
    (choice,) = scoring.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=1)["choices"]
    messages = [{"role": "user", "content": "The fox"}]
    ask = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    chat = scoring.post("/v1/chat/completions", **ask).json()
    for ids, found, count in (
        (PROMPT, choice["prompt_logprobs"], 1),
        (chat["prompt_token_ids"], chat["prompt_logprobs"], 0),
    ):
        assert found[0] is None
        assert len(found) == len(ids)
        for row, token_id, entry in zip(exact(model, ids), ids[1:], found[1:], strict=False):
            assert entry[str(token_id)]["logprob"] == pytest.approx(float(row[token_id]), abs=1e-3)
            best = int(row.argmax())
            if count:
                assert entry[str(best)]["rank"] == 1
                assert entry[str(best)]["logprob"] == pytest.approx(float(row[best]), abs=1e-3)
            assert len(entry) == (1 + (best != token_id) if count else 1)


def test_a_stream_echoes_the_text_first(scoring: Served) -> None:
    events = scoring.client().completions.create(
        model=MODEL, prompt="The dog", max_tokens=3, echo=True, stream=True, temperature=0
    )
    texts = [event.choices[0].text for event in events]
    whole = scoring.complete(prompt="The dog", max_tokens=3, temperature=0)["choices"][0]["text"]
    assert texts[0] == "The dog"
    assert "".join(texts[1:]) == whole


def test_lm_eval_finds_the_loglikelihoods_of_transformers(
    scoring: Served, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    # Imported here, once the settings above hold: importing it takes two seconds.
    lm_eval = importlib.import_module("lm_eval")
    tasks = importlib.import_module("lm_eval.tasks")
    questions = [{"question": text, "choices": CHOICES, "answer": 1} for text in ("The lazy", "A fox;", "你好")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "choice.yaml").write_text(
        f"""task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "test.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
    )
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{scoring.url}/v1/completions",
            "model": MODEL,
            "tokenizer": str(model.folder),
            "tokenizer_backend": "huggingface",
            "max_length": 256,
        },
        tasks=["choice"],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    compared = 0
    for sample in results["samples"]["choice"]:
        question = sample["doc"]["question"]
        for choice, (loglikelihood, is_greedy) in zip(CHOICES, sample["filtered_resps"], strict=True):
            ids, start = ids_of(scoring, question + choice), len(ids_of(scoring, question))
            rows = exact(model, ids)[start - 1 : -1]
            expected = sum(float(row[token_id]) for row, token_id in zip(rows, ids[start:], strict=True))
            assert float(loglikelihood) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(bool(rows.argmax(-1).tolist() == ids[start:]))
            compared += 1
    assert compared == len(questions) * len(CHOICES)
