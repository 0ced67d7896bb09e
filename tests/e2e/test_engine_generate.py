"""Generation on the CPU: forms of prompts, where outputs end, metrics; deltas and aborts of single requests."""

from itertools import pairwise

import numpy as np
import pytest
from checkpoints import EOS_TOKEN_ID
from engines import GREEDY, Model, block_bytes, force_tokens, make_engine, run_to_end, tokens_of

from bullet_graph import CompletionOutput, Engine, OutputKind, RequestOutput, SamplingParams
from bullet_graph.engine.output import TokenLogprobs
from bullet_graph.runtime.cpu import CpuExecutor

PROMPT = [5, 17, 300, 8]


# ---- forms of prompts ----


def test_text_and_its_ids_give_the_same_alone_and_in_a_list(engine: Engine, model: Model) -> None:
    text = "A request waits."
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(text)
    (from_text,) = engine.generate(text, GREEDY, use_tqdm=False)
    alone = [engine.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in (ids, np.array(ids))]
    listed = engine.generate([text, (9, 9), np.array([7, 8])], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in (*alone, *listed)] == [tuple(ids)] * 3 + [(9, 9), (7, 8)]
    assert [tokens_of(output) for output in (*alone, listed[0])] == [tokens_of(from_text)] * 3
    assert tokens_of(listed[1]) == [model.greedy([9, 9], GREEDY.max_tokens)]
    assert len({output.request_id for output in (from_text, *alone, *listed)}) == 6
    assert from_text.finished
    assert from_text.error is None
    assert from_text.outputs[0].text == engine.tokenizer.decode(list(from_text.outputs[0].token_ids))


def test_no_prompts_give_no_outputs(engine: Engine) -> None:
    assert engine.generate([], use_tqdm=False) == []
    assert engine.generate([], [], use_tqdm=False) == []


def test_an_engine_of_dummy_weights_is_the_same_each_time() -> None:
    results = []
    for seed in (0, 0, 1):
        with make_engine(seed=seed) as engine:
            results.append(tokens_of(engine.generate(PROMPT, GREEDY, use_tqdm=False)[0]))
    assert results[0] == results[1]
    assert results[0] != results[2]


# ---- where outputs end ----


@pytest.mark.usefixtures("depth")
def test_max_model_len_ends_an_output(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    with make_engine(model.folder, max_model_len=20) as engine:
        outputs = engine.generate([PROMPT, list(range(2, 21))], params, use_tqdm=False)
    assert tokens_of(outputs[0]) == [model.greedy(PROMPT, 16)]
    assert tokens_of(outputs[1]) == [model.greedy(list(range(2, 21)), 1)]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]


@pytest.mark.usefixtures("depth")
def test_end_of_sequence_ends_an_output_unless_ignored(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tokens(monkeypatch, [40, 41, EOS_TOKEN_ID, 42, 43, 44], len(PROMPT))
    ending, going_on = engine.generate(
        [PROMPT, PROMPT], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, ignore_eos=True)], use_tqdm=False
    )
    assert ending.outputs[0].token_ids == (40, 41, EOS_TOKEN_ID)
    assert ending.outputs[0].finish_reason == "stop"
    assert "eos" not in ending.outputs[0].text
    assert going_on.outputs[0].token_ids == (40, 41, EOS_TOKEN_ID, 42, 43, 44)
    assert going_on.outputs[0].finish_reason == "length"
    assert going_on.outputs[0].text.startswith(ending.outputs[0].text)


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("policy", ["serial", "mixed:3"])
def test_min_tokens_keeps_stop_tokens_from_being_sampled(model: Model, policy: str) -> None:
    # Stop at what comes first anyway: it must be passed over, then may come.
    stop = model.greedy(PROMPT, 1)[0]
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=7, stop_token_ids=[stop], ignore_eos=True)
    expected = model.greedy(PROMPT, 20, masked_until={stop: 7})
    assert stop not in expected[:7]
    end = expected.index(stop) + 1 if stop in expected else 20
    with make_engine(model.folder, policy=policy) as engine:
        (output,) = engine.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[:end]


# ---- metrics ----


def test_metrics_by_a_clock_that_counts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(CpuExecutor, "now", lambda _: float(next(ticks)))
    with make_engine(model.folder, policy="serial:4") as engine:
        engine.add_request("a", list(range(2, 12)), SamplingParams(max_tokens=3, ignore_eos=True))
        engine.add_request("b", PROMPT, SamplingParams(max_tokens=1))
        outputs = run_to_end(engine)
    # Arrivals at 0 and 1. Each step asks the time when it is planned, at its launch and at its end: (2, 3, 4),
    # (5, 6, 7), (8, 9, 10) for the prompt of ten in chunks of 4, 4 and 2 (beside 2 of the other's),
    # (11, 12, 13) for the rest of that; then two decode steps.
    a, b = outputs["a"][-1].metrics, outputs["b"][-1].metrics
    assert (a.arrival_s, a.first_scheduled_s, a.token_times_s) == (0, 3, (10, 16, 19))
    assert (b.arrival_s, b.first_scheduled_s, b.token_times_s) == (1, 9, (13,))


def test_stats_count_steps_and_blocks(model: Model) -> None:
    with make_engine(model.folder, max_model_len=64) as engine:
        assert engine.stats().num_steps == 0
        engine.generate(list(range(2, 35)), SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        stats = engine.stats()
    # A prompt of 33 tokens in one step, which samples, and three decode steps; 33 to 36 tokens are 3 blocks.
    assert (stats.num_steps, stats.num_preemptions) == (4, 0)
    assert (stats.kv_blocks_used, stats.kv_blocks_peak) == (0, 3)
    assert stats.kv_blocks_total == engine.memory.num_kv_blocks - 1
    assert (stats.num_running, stats.num_waiting) == (0, 0)


# ---- one request at a time ----


def stream(engine: Engine, kind: OutputKind, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("a", PROMPT, params, output_kind=kind)
    outputs = run_to_end(engine)
    assert list(outputs) == ["a"]
    assert [output.finished for output in outputs["a"]][:-1] == [False] * (len(outputs["a"]) - 1)
    assert outputs["a"][-1].finished
    return outputs["a"]


def joined(deltas: list[CompletionOutput]) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return "".join(delta.text for delta in deltas), ids, logprobs


@pytest.mark.usefixtures("depth")
@pytest.mark.parametrize("n", [1, 3])
def test_deltas_join_to_the_final_output(engine: Engine, n: int) -> None:
    params = SamplingParams(seed=3, n=n, max_tokens=20, min_tokens=2, logprobs=2, stop="e")
    (final,) = stream(engine, OutputKind.FINAL_ONLY, params)
    assert ("stop" in {completion.finish_reason for completion in final.outputs}) == (n == 3)
    deltas = stream(engine, OutputKind.DELTA, params)
    cumulative = stream(engine, OutputKind.CUMULATIVE, params)
    assert cumulative[-1].outputs == final.outputs
    for index, completion in enumerate(final.outputs):
        whole = completion.text, completion.token_ids, completion.logprobs
        assert joined([delta.outputs[index] for delta in deltas]) == whole
        texts = [output.outputs[index].text for output in cumulative]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


@pytest.mark.parametrize(
    ("depth", "num_steps", "policy"),
    [(1 + i // 6 * 2, (0, 1, 2, 3, 4, 8)[i % 6], ("serial:8", "mixed:8")[(i + i // 6) % 2]) for i in range(12)],
    indirect=["depth"],
)
@pytest.mark.usefixtures("depth")
def test_aborting_frees_all_blocks(model: Model, num_steps: int, policy: str) -> None:
    # Two slots: "a" prefills 20 tokens in three chunks, then decodes; "b" comes behind; "c" waits throughout.
    long = SamplingParams(max_tokens=50, ignore_eos=True)
    with make_engine(model.folder, max_num_seqs=2, policy=policy) as engine:
        for name in "abc":
            engine.add_request(name, list(range(2, 22)), long)
        for _ in range(num_steps):
            engine.step()
        for name in "cab":
            engine.abort(name)
        outputs = run_to_end(engine)
        assert sorted(outputs) == ["a", "b", "c"]
        for last in outputs.values():
            assert last[-1].finished
            assert last[-1].outputs[0].finish_reason == "abort"
        assert engine.stats().kv_blocks_used == 0
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
        # Slots and blocks serve others.
        again = engine.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
    assert {tokens_of(output)[0] for output in again} == {model.greedy(PROMPT, 12)}


@pytest.mark.usefixtures("depth")
def test_an_abort_keeps_what_was_generated(model: Model, engine: Engine) -> None:
    engine.add_request("a", PROMPT, GREEDY)
    engine.add_request("other", [9, 9], GREEDY)
    while True:
        (output,) = [o for o in engine.step() if o.request_id == "a"] or [None]
        if output is not None and len(output.outputs[0].token_ids) >= 4:
            break
    engine.abort("a")
    outputs = run_to_end(engine)
    (aborted,) = outputs["a"]
    assert aborted.outputs[0].token_ids == model.greedy(PROMPT, 12)[: len(aborted.outputs[0].token_ids)]
    assert len(aborted.outputs[0].token_ids) >= 4
    assert tokens_of(outputs["other"][-1]) == [model.greedy([9, 9], 12)]


def test_aborting_the_unknown_or_the_finished_does_nothing(engine: Engine) -> None:
    engine.abort("nobody")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.add_request("a", PROMPT, GREEDY)
    run_to_end(engine)
    engine.abort("a")
    assert run_to_end(engine) == {}


def test_an_abort_ends_the_samples_that_still_run(engine: Engine) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True)
    first, second = tokens_of(engine.generate(PROMPT, params, use_tqdm=False)[0])
    assert first[0] not in second
    params = SamplingParams(n=2, seed=1, max_tokens=30, ignore_eos=True, stop_token_ids=[first[0]])
    engine.add_request("a", PROMPT, params)
    for _ in range(3):
        engine.step()
    engine.abort("a")
    (output,) = run_to_end(engine)["a"]
    assert [completion.finish_reason for completion in output.outputs] == ["stop", "abort"]
    assert tokens_of(output) == [first[:1], second]


def test_preemption_of_a_request_under_way_loses_nothing(model: Model) -> None:
    params = [SamplingParams(temperature=n / 2, seed=n, max_tokens=40, ignore_eos=True) for n in range(4)]
    prompts = [[n, n + 1, n + 2] for n in range(4)]
    with make_engine(model.folder, max_model_len=64) as probe:
        expected = [tokens_of(output)[0] for output in probe.generate(prompts, params, use_tqdm=False)]
    with make_engine(model.folder, max_model_len=64, kv_cache_bytes=6 * block_bytes(model)) as engine:
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params[index], output_kind=OutputKind.DELTA)
        outputs = run_to_end(engine)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().kv_blocks_peak == engine.stats().kv_blocks_total == 5
    for index in range(4):
        text, ids, _ = joined([output.outputs[0] for output in outputs[str(index)]])
        assert ids == expected[index]
        assert engine.tokenizer is not None
        assert text == engine.tokenizer.decode(ids)
        metrics = outputs[str(index)][-1].metrics
        assert len(metrics.token_times_s) == 40
        # Being scheduled once more does not count as the first time.
        assert metrics.first_scheduled_s is not None
        assert metrics.first_scheduled_s < metrics.token_times_s[0]
