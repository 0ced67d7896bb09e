"""Requests one at a time on the CPU: cumulative and delta outputs, aborts."""

from itertools import pairwise

import pytest
from engines import GREEDY, Model, at_any_depth, block_bytes, make_engine, run_to_end, tokens_of

from bullet_graph import CompletionOutput, Engine, OutputKind, RequestOutput, SamplingParams
from bullet_graph.engine.output import TokenLogprobs

PROMPT = [5, 17, 300, 8]


def stream(engine: Engine, kind: OutputKind, params: SamplingParams) -> list[RequestOutput]:
    engine.add_request("a", PROMPT, params, output_kind=kind)
    outputs = run_to_end(engine)
    assert list(outputs) == ["a"]
    assert [output.finished for output in outputs["a"]][:-1] == [False] * (len(outputs["a"]) - 1)
    assert outputs["a"][-1].finished
    return outputs["a"]


# ---- output kinds ----


def joined(deltas: list[CompletionOutput]) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return "".join(delta.text for delta in deltas), ids, logprobs


@at_any_depth
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


# ---- abort ----


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


@at_any_depth
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
