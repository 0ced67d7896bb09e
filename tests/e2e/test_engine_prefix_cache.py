"""The prefix cache on the CPU: the same tokens as without it, whatever happens, and what users see of it."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from cli_runner import printed, run
from engines import PROMPTS, Launches, Model, block_bytes, make, make_engine, run_to_end, step_into_a_prefill, tokens_of

from bullet_graph import Engine, RequestError, RequestOutput, SamplingParams
from bullet_graph.engine.block_pool import BlocksRemoved, BlocksStored
from bullet_graph.engine.replay import replay, timed_requests
from bullet_graph.engine.simulation import SimulationSettings, simulate
from bullet_graph.hardware import H200
from bullet_graph.perf.roofline import Roofline
from bullet_graph.sampling_params import StructuredOutputs
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Workload, WorkloadRequest

SHARED = PROMPTS[3][:70]
PARAMS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "bad_words": ["a"]},
    {"prompt_logprobs": 1},
    {"structured_outputs": StructuredOutputs(regex="[ab]{9}")},
    {"logprobs": 2, "min_tokens": 5},
    {"cache_salt": "other"},
    {"max_tokens": 30},
]


def conversation(engine: Engine, *, gap: int = 2) -> dict[str, RequestOutput]:
    """Requests that begin alike come one after the other, then the next turn of each; one is aborted on the way."""
    outputs: dict[str, RequestOutput] = {}
    for turn in (1, 2):
        for i, params in enumerate(PARAMS):
            prompt = [*SHARED[: 70 - i % 3], i % 4, 5, 6, 7]
            if turn == 2:
                prompt = [*prompt, *outputs[f"1-{i}"].outputs[-1].token_ids, 8, 9]
            whole = SamplingParams(**{"temperature": 0, "max_tokens": 9, "ignore_eos": True} | params)
            engine.add_request(f"{turn}-{i}", prompt, whole)
            engine.add_request(f"{turn}-{i}-aborted", prompt, whole)
            for step in range(gap):
                outputs |= {output.request_id: output for output in engine.step()}
                if step == i % 2:
                    engine.abort(f"{turn}-{i}-aborted")
        outputs |= {name: states[-1] for name, states in run_to_end(engine).items()}
    return {name: output for name, output in outputs.items() if "aborted" not in name}


def found_in(outputs: dict[str, RequestOutput]) -> Any:
    """Tokens, and the log-probabilities that were asked for."""

    def rounded(entries: Any) -> list[Any]:
        return [entry and pytest.approx(entry.logprob, abs=1e-4) for entry in entries or ()]

    return {
        name: (tokens_of(output), rounded(output.prompt_logprobs), rounded(output.outputs[0].logprobs))
        for name, output in outputs.items()
    }


@pytest.fixture(scope="module")
def plain(model: Model) -> Any:
    """What comes without the cache."""
    with make_engine(model.folder, prefix_caching=False) as engine:
        found = found_in(conversation(engine))
        assert engine.stats().prefix_cache_queries == 0
    return found


@pytest.mark.parametrize(
    ("depth", "policy"),
    [(1, "serial"), (3, "mixed"), (1, "mixed:7"), (3, "mixed:7"), (1, "auto"), (3, "auto")],
    indirect=["depth"],
)
@pytest.mark.usefixtures("depth", "short_slices")
def test_tokens_are_those_without_the_cache(model: Model, plain: Any, policy: str) -> None:
    with make(model, policy) as engine:
        outputs = conversation(engine)
        stats = engine.stats()
        assert stats.prefix_cache_hits > 0.5 * stats.prefix_cache_queries
        assert stats.kv_blocks_used == 0
    assert found_in(outputs) == plain
    # A prompt that is scored is computed, and so is the first one of a salt.
    assert {name for name, output in outputs.items() if not output.num_cached_tokens} == {
        "1-0", "1-3", "2-3", "1-6"
    }  # fmt: skip


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 9), (3, 9), (3, 12), (1, 15)], indirect=["depth"])
@pytest.mark.usefixtures("depth")
def test_preempted_sequences_have_the_same_tokens(model: Model, num_blocks: int) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[*SHARED[:40], i, 3, i] for i in range(3)] * 2
    with make_engine(model.folder, kv_cache_bytes=num_blocks * block_bytes(model)) as engine:
        outputs = engine.generate(prompts, greedy, use_tqdm=False)
        stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert [tokens_of(output)[0] for output in outputs] == [model.greedy(prompt, 40) for prompt in prompts[:3]] * 2


@pytest.mark.parametrize("slides", ["some layers", "all layers"])
def test_sliding_windows(slides: str, tmp_path: Path) -> None:
    """Layers with a window read what is cached for the others; without others, there is nothing to keep."""
    kinds = ["sliding_attention"] * 2 if slides == "all layers" else ["sliding_attention", "full_attention"]
    settings = {"sliding_window": 20, "layer_types": kinds, "use_sliding_window": True, "max_window_layers": 0}
    model = Model(tmp_path, write_checkpoint(tmp_path, "qwen2", seed=1, tokenizer=False, **settings))
    prompts = [[*SHARED, i, i] for i in range(3)]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_engine(tmp_path) as engine:
        assert engine.caches_prefixes == (slides == "some layers")
        for prompt in prompts:
            (output,) = engine.generate(prompt, greedy, use_tqdm=False)
            assert output.outputs[0].token_ids == model.greedy(prompt, 6)
        assert (engine.stats().prefix_cache_hits > 0) == engine.caches_prefixes


@pytest.mark.usefixtures("short_slices")
def test_equal_prefixes_between_the_slices_of_a_prompt(model: Model, launches: Launches) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with make(model) as engine:
        engine.add_request("first", SHARED, greedy)
        step_into_a_prefill(engine, launches)
        engine.add_request("second", [*SHARED, 1], greedy)
        engine.abort("first")
        outputs = run_to_end(engine)
    # The aborted prompt runs to its last layer.
    assert outputs["second"][-1].num_cached_tokens == 64
    assert tokens_of(outputs["second"][-1]) == [model.greedy([*SHARED, 1], 4)]


def test_the_cache_can_be_emptied_between_requests() -> None:
    with make_engine() as engine:
        greedy = SamplingParams(temperature=0, max_tokens=2)

        def cached() -> int:
            return engine.generate(SHARED, greedy, use_tqdm=False)[0].num_cached_tokens

        assert [cached(), cached()] == [0, 64]
        engine.reset_prefix_cache()
        assert [cached(), cached()] == [0, 64]
        assert engine.stats().prefix_cache_hits == 128
        engine.set_policy("serial")
        assert cached() == 0
        engine.add_request("a", SHARED)
        with pytest.raises(RequestError, match="between requests"):
            engine.reset_prefix_cache()


def test_a_listener_is_told_that_another_policy_empties_the_cache() -> None:
    told: list[BlocksStored | BlocksRemoved] = []
    with make_engine(policy="mixed") as engine:
        engine.listen_to_prefix_cache(told.append)
        engine.generate(SHARED, SamplingParams(max_tokens=2), use_tqdm=False)
        engine.set_policy("serial")
        engine.generate(SHARED, SamplingParams(max_tokens=2), use_tqdm=False)
    with make_engine(policy="mixed:16") as engine:
        engine.add_request("a", SHARED)
        engine.step()
        engine.abort("a")
        run_to_end(engine)
        with pytest.raises(RequestError, match="before the first request"):
            engine.listen_to_prefix_cache(told.append)
    stored, removed, again = told
    assert isinstance(stored, BlocksStored)
    assert stored.token_ids.tolist() == list(SHARED[:64])
    assert removed == BlocksRemoved(stored.keys)
    assert again.keys == stored.keys


def test_the_simulator_finds_what_the_engine_finds() -> None:
    requests = [
        WorkloadRequest(prompt, 3, 0.0, (*SHARED[:shared], *(i + n for n in range(prompt - shared))))
        for i, (prompt, shared) in enumerate([(70, 70), (70, 64), (100, 48), (70, 70), (100, 16), (40, 33)])
    ] + [WorkloadRequest(60, 3, 0.0)] * 2
    workload = Workload("shared", tuple(requests))
    # Each comes when the one before has ended.
    times = [10.0 * index for index in range(len(requests))]
    with make_engine(policy="mixed:64", max_model_len=128, max_num_seqs=8) as engine:
        served = timed_requests(workload, [0.0] * len(requests), vocab_size=300, slo=NO_TARGETS, seed=0)
        replay(engine, served, max_concurrency=1)
        stats, model = engine.stats(), engine.model_config
    alike = SimulationSettings(config=engine.config, kv_cache_tokens=1024, max_model_len=128)
    simulated = simulate(Roofline(H200, model), workload, times, alike).stats
    found = stats.prefix_cache_queries, stats.prefix_cache_hits
    assert found == (simulated.prefix_cache_queries, simulated.prefix_cache_hits) == (570, 64 + 48 + 64 + 16 + 32)


# ---- on the command line ----


def test_bench_simulate_and_explain_tell_hits(tmp_path: Path) -> None:
    decisions = tmp_path / "decisions.jsonl"
    simulated = ("simulate", "--gpu", "roofline:h200", "--trace", "synthetic:chat", "--num-prompts", "16")
    chats = ("--request-rate", "20", "--trace-decisions", str(decisions))
    fields = printed(run(*simulated, *chats, "--json"))
    assert 0 < fields["prefix_cache_hits"] < fields["prefix_cache_queries"]
    share = f"{fields['prefix_cache_hits'] / fields['prefix_cache_queries']:.1%}".replace("%", "")
    assert f"prompt tokens in the prefix cache, % │ {share}" in " ".join(run(*simulated, *chats[:2]).output.split())
    assert f"prompt tokens in the prefix cache │ {share} %" in " ".join(run("explain", str(decisions)).output.split())
    none = printed(run(*simulated, *chats[:2], "--no-prefix-caching", "--json"))
    assert (none["prefix_cache_hits"], none["prefix_caching"]) == (0, False)
    assert none["mean_ttft_ms"] > fields["mean_ttft_ms"]


def test_a_model_that_only_slides_is_told_to_have_no_cache(tmp_path: Path) -> None:
    slides = {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2}
    write_checkpoint(tmp_path, "qwen2", **slides, use_sliding_window=True, max_window_layers=0)
    told = "prefix caching: off, as every layer of the model has a sliding window"
    generate = ("generate", "--model", str(tmp_path), "--device", "cpu", "--max-model-len", "64", "--prompt", "A")
    for more, count in (((), 1), (("--no-prefix-caching",), 0)):
        result = run(*generate, *more)
        assert (result.exit_code, result.stderr.count(told)) == (0, count), result.output
