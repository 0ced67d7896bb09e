"""Prompts with shared prefixes, and turns that follow one another: in workloads, arrivals and both kinds of replay."""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from fakes.perf_tables import LLAMA_8B
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_replay import FakeEngine
from test_replay_async import Scripted, VirtualTime, run

from bullet_graph.config import EngineConfig, Policy
from bullet_graph.engine.replay import Replay, TimedRequest, timed_requests
from bullet_graph.engine.replay import replay as replay_engine
from bullet_graph.engine.simulation import SimulationSettings, simulate
from bullet_graph.errors import ConfigError, PromptError, WorkloadError
from bullet_graph.hardware import H200
from bullet_graph.perf.metrics import ServedRequest
from bullet_graph.perf.roofline import Roofline
from bullet_graph.sampling_params import SamplingParams
from bullet_graph.slo import NO_TARGETS
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload
from bullet_graph.workloads.workload import TurnBefore

ANSWER = -1  # a token that no prompt has


def whole_prompts(workload: Workload, seed: int = 0) -> list[list[int]]:
    """Every request's prompt, where the tokens of answers are all the same."""
    timed = timed_requests(workload, [0.0] * len(workload.requests), vocab_size=50_000, slo=NO_TARGETS, seed=seed)
    prompts: list[list[int]] = []
    for request, one in zip(workload.requests, timed, strict=True):
        before = request.follows
        start = [] if before is None else prompts[before.index]
        num_answer = 0 if before is None else workload.requests[before.index].output_tokens
        prompts.append([*start, *[ANSWER] * num_answer, *one.prompt_token_ids])
    return prompts


def shareable(workload: Workload) -> int:
    """By brute force: each prompt against every sequence of before, in blocks of 16."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for request, prompt in zip(workload.requests, whole_prompts(workload), strict=True):
        ends = range(16, len(prompt), 16)  # the last token is always computed
        total += 16 * sum(tuple(prompt[:end]) in known for end in ends)
        written = [*prompt, *[ANSWER] * (request.output_tokens - 1)]
        known.update(tuple(written[:end]) for end in range(16, len(written) + 1, 16))
    return total


# ---- what prompts have in common ----


@st.composite
def mooncake_rows(draw: st.DrawFn) -> list[dict[str, object]]:
    """Rows as in the published traces: an id names a block and all before it, so a part of a block has its own."""
    names: dict[object, int] = {}
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        path: tuple[int, ...] = ()
        ids = []
        num_blocks = draw(st.integers(0, 3))
        for _ in range(num_blocks):
            path += (draw(st.integers(0, 1)),)
            ids.append(names.setdefault(path, len(names)))
        rest = draw(st.sampled_from([0, 1, 17, 300]) if num_blocks else st.sampled_from([1, 17, 300]))
        if rest and draw(st.booleans()):
            ids.append(names.setdefault((path, rest), len(names)))
        rows.append({"timestamp": 0, "input_length": 512 * num_blocks + rest, "output_length": 3, "hash_ids": ids})
    return rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(rows=mooncake_rows())
def test_prompts_share_the_tokens_of_their_leading_hash_ids(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    workload = load_workload(str(path), num_requests=None)
    prompts = whole_prompts(workload)
    assert [len(prompt) for prompt in prompts] == [row["input_length"] for row in rows]
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for other, earlier in zip(rows[:i], prompts[:i], strict=True):
            common = 0
            for a, b in zip(row["hash_ids"], other["hash_ids"], strict=False):  # type: ignore[call-overload]
                if a != b:
                    break
                common += 1
            same = min(512 * common, len(prompt), len(earlier))
            assert prompt[:same] == earlier[:same]
            assert prompt[same : same + 8] != earlier[same : same + 8] or same == len(prompt) == len(earlier)
    assert workload.shareable_prompt_tokens == shareable(workload)
    assert whole_prompts(workload, seed=1)[0] != prompts[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    conversations=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    fewer=st.integers(1, 16),
)
def test_sharegpt_turns_begin_with_all_before_them(
    tmp_path: Path, conversations: list[list[tuple[int, int]]], fewer: int
) -> None:
    def text(length: int) -> str:
        return " ".join(str(i) for i in range(length))

    records = [
        {
            "conversations": [
                {"from": who, "value": text(n)} for turn in turns for who, n in zip(("human", "gpt"), turn, strict=True)
            ]
        }
        for turns in conversations
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(records), encoding="utf-8")

    def load(num_requests: int | None) -> Workload:
        return load_workload(str(path), num_requests=num_requests, tokenize=lambda t: [int(word) for word in t.split()])

    workload = load(None)
    count = min(fewer, len(workload.requests))
    assert load(count).requests == workload.requests[:count]
    assert [r.output_tokens for r in workload.requests] == [n for turns in conversations for _, n in turns]
    prompts = whole_prompts(workload)
    expected: list[list[int]] = []
    for turns in conversations:
        so_far: list[int] = []
        for question, answer in turns:
            expected.append([*so_far, *range(question)])
            so_far = [*expected[-1], *[ANSWER] * answer]
    assert prompts == expected
    assert [r.prompt_tokens for r in workload.requests] == [len(prompt) for prompt in prompts]
    # Turns may also be like those of other conversations, which the count leaves out.
    assert workload.shareable_prompt_tokens <= shareable(workload)
    if len(conversations) == 1:
        assert workload.shareable_prompt_tokens == shareable(workload)


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), count=st.integers(1, 60))
def test_chat_shares_system_prompts_and_turns(seed: int, count: int) -> None:
    workload = load_workload("synthetic:chat", num_requests=count, seed=seed)
    prompts = whole_prompts(workload)
    systems: dict[tuple[int, ...], list[int]] = {}
    for request, prompt in zip(workload.requests, prompts, strict=True):
        assert len(prompt) == request.prompt_tokens
        if request.follows is None:
            start = prompt[: request.prefix_tokens]
            assert systems.setdefault(request.prefix_ids, start) == start
        else:
            assert not request.prefix_ids
    if len(systems) > 1:
        one, other, *_ = systems.values()
        assert one[:16] != other[:16]
    assert workload.shareable_prompt_tokens == shareable(workload)


def test_prompts_that_share_nothing() -> None:
    half = Workload("w", (WorkloadRequest(6, 2, None), WorkloadRequest(6, 3, None)))
    half.require_fit(8, 0.5)
    with pytest.raises(WorkloadError, match="1 of the 2 requests of w are longer than max_model_len=8"):
        half.require_fit(8, 0.6)
    workload = load_workload("azure:conv", num_requests=20)
    assert (workload.shareable_prompt_tokens, workload.shares_prefixes) == (0, False)
    # Equal recorded prompts are shared, but for the block of the last token.
    twice = Workload("w", (WorkloadRequest(32, 1, None, tuple(range(32))),) * 2)
    assert (twice.shareable_prompt_tokens, twice.shares_prefixes) == (16, False)
    # Equal blocks after others are not.
    other = WorkloadRequest(33, 1, None, (*range(50, 66), *range(16, 33)))
    same_end = Workload("w", (WorkloadRequest(33, 1, None, tuple(range(33))), other))
    assert same_end.shareable_prompt_tokens == shareable(same_end) == 0


# ---- arrivals ----


def turn(index: int, think_s: float) -> WorkloadRequest:
    """A request that follows the one at ``index``, of 3 tokens in and 2 out."""
    return WorkloadRequest(20, 3, None, follows=TurnBefore(index, 5, think_s))


FIRST = WorkloadRequest(3, 2, None)
CHAT = Workload("chat", (FIRST, turn(0, 0.5), FIRST, FIRST, turn(3, 2.0)))


def test_first_turns_arrive_at_the_rate_of_requests_divided_by_the_turns() -> None:
    times = Arrivals(request_rate=10, seed=3).times(CHAT)
    # 5 requests in 3 conversations: 6 conversations per second are 10 requests per second.
    assert times[[0, 2, 3]] == pytest.approx(Arrivals(request_rate=6, seed=3).times(Workload("first", (FIRST,) * 3)))
    assert times[-1] == pytest.approx(5 / 10)
    assert times[[1, 4]].tolist() == times[[0, 3]].tolist()
    assert Arrivals(request_rate=float("inf")).times(CHAT).tolist() == [0.0] * 5


# ---- replays ----


def timed(workload: Workload, arrivals_s: Sequence[float]) -> list[TimedRequest]:
    return timed_requests(workload, arrivals_s, vocab_size=100, slo=NO_TARGETS, seed=0)


def test_a_later_turn_arrives_when_its_user_has_read_and_thought() -> None:
    engine = FakeEngine(service_s=1.0)
    done: list[ServedRequest] = []
    requests = timed(CHAT, [0.0, 0.0, 0.25, 4.0, 7.5])  # the last has a time of its own
    result = replay_engine(engine, requests, on_done=done.append)
    assert [row.metrics.arrival_s - 50 for row in result.served] == [0, 1.5, 0.25, 4, 7.5]
    assert [row.input_tokens for row in result.served] == [3, 20, 3, 3, 20]
    assert [row.output_tokens for row in result.served] == [2, 3, 2, 2, 3]
    assert result.duration_s == 8.5
    assert [result.served.index(row) for row in done] == [0, 2, 1, 3, 4]
    # The prompt before, the output as it came, and what the turn adds.
    assert [added[0] for added in engine.added] == ["0", "2", "1", "3", "4"]
    assert engine.prompts[2] == [*engine.prompts[0], 0, 0, *requests[1].prompt_token_ids]
    assert len(requests[1].prompt_token_ids) == 15


def test_a_run_leaves_out_turns_that_come_after_its_last_conversation() -> None:
    workload = Workload("chat", (FIRST, turn(0, 2.0), turn(1, 0.5), FIRST, turn(3, 0.5)))
    result = replay_engine(FakeEngine(service_s=1.0), timed(workload, [0.0, 0.0, 0.0, 2.5, 2.5]))
    # The second turn would come at 3 s.
    assert ([row.metrics.arrival_s - 50 for row in result.served], result.unsent) == ([0, 2.5], (1, 2, 4))
    fields = result.result(Arrivals(request_rate=2.0), started=datetime.now(), backend="", model_id="").fields()
    assert fields | {"num_prompts": 2, "num_unsent": 3, "completed": 2, "waiting_tokens_half": 0} == fields
    assert workload.without(result.unsent).requests == (FIRST, FIRST)


async def test_a_conversation_ends_with_a_failed_turn() -> None:
    params = SamplingParams(max_tokens=2)
    requests = [
        TimedRequest(0.0, [-1], params, is_followed=True),
        TimedRequest(0.0, [9], params, follows=TurnBefore(0, 3, 0.5), is_followed=True),
        TimedRequest(0.0, [9], params, follows=TurnBefore(1, 6, 0.5)),
        TimedRequest(2.0, [7], params),
    ]
    system = Scripted(VirtualTime(), {-1: [(0.5, 1), PromptError("negative token")], 7: [(0.5, 2)]})
    failed = "the turn before it in the conversation failed"
    for result in (
        replay_engine(FakeEngine(), requests, max_concurrency=1),
        await run(system, requests, max_concurrency=1),
    ):
        assert [row.error for row in result.served] == ["negative token", failed, failed, None]


def test_turns_out_of_order_are_refused() -> None:
    request = TimedRequest(0.0, (1,), SamplingParams(max_tokens=1), follows=TurnBefore(0, 2, 0.0))
    with pytest.raises(ConfigError, match="each turn of a conversation after the turn before"):
        replay_engine(FakeEngine(), [request])


CONVERSATIONS = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 20), min_size=1, max_size=4)), min_size=1, max_size=5
)
"""When each begins, in eighths of a second, and its users' think times; the first of them does not count."""


def chat_of(plan: list[tuple[int, list[int]]]) -> tuple[Workload, list[float]]:
    requests: list[WorkloadRequest] = []
    arrivals_s = []
    for at, thoughts in sorted(plan):
        for number, thought in enumerate(thoughts):
            prompt = 3 + 5 * number
            before = TurnBefore(len(requests) - 1, prompt - 3, thought / 8) if number else None
            requests.append(WorkloadRequest(prompt, 2, None, follows=before))
            arrivals_s.append(at / 8)
    return Workload("plan", tuple(requests)), arrivals_s


def delays_s(workload: Workload, replayed: Replay, arrivals_s: Sequence[float]) -> list[float]:
    """How much later than it could each request arrived: its own time, and the end of the turn before, have come.

    Only what could not arrive before the last conversation began may be left out, unless all begin at once.
    """
    found, last_s = [], arrivals_s[-1] or float("inf")
    sent = [index for index in range(len(arrivals_s)) if index not in replayed.unsent]
    served = dict(zip(sent, replayed.served, strict=True))
    for index, (request, arrival_s) in enumerate(zip(workload.requests, arrivals_s, strict=True)):
        earliest_s = arrival_s
        if request.follows is not None:
            before = served.get(request.follows.index)
            end_s = float("inf") if before is None else before.metrics.token_times_s[-1] - replayed.start_s
            earliest_s = max(earliest_s, end_s + request.follows.think_s)
        if index in replayed.unsent:
            assert earliest_s > last_s
        else:
            row = served[index]
            assert (row.error, row.input_tokens) == (None, request.prompt_tokens)
            found.append(row.metrics.arrival_s - replayed.start_s - earliest_s)
    return found


@settings(max_examples=30)
@given(CONVERSATIONS, st.none() | st.integers(1, 3))
def test_turns_wait_for_each_other_in_every_replay(plan: list[tuple[int, list[int]]], limit: int | None) -> None:
    workload, arrivals_s = chat_of(plan)
    requests = timed(workload, arrivals_s)
    stepped = FakeEngine(service_s=0.625, busy_s=0.5)
    streaming = Scripted(VirtualTime(), dict.fromkeys(range(100), ((0.5, 1), (0.125, 1))))
    outcomes = (
        replay_engine(stepped, requests, max_concurrency=limit),
        asyncio.run(run(streaming, requests, max_concurrency=limit)),
    )
    for replayed in outcomes:
        delays = delays_s(workload, replayed, arrivals_s)
        assert min(delays) >= 0
        assert limit is not None or max(delays) == 0
    # With a limit, one may be later than the other, and leave out a turn more.
    if outcomes[0].unsent == outcomes[1].unsent:
        assert sorted(streaming.prompts) == sorted(stepped.prompts)


@pytest.mark.parametrize("policy", ["serial", "auto"])
def test_the_simulator_serves_conversations(policy: str) -> None:
    workload = load_workload("synthetic:chat", num_requests=40, seed=1)
    arrivals_s = Arrivals(request_rate=0.5).times(workload)
    config = EngineConfig(model="tiny", policy=Policy.parse(policy), max_num_seqs=64)
    engine = SimulationSettings(config=config, kv_cache_tokens=100_000, max_model_len=16_384)
    replayed, stats = simulate(Roofline(H200, LLAMA_8B), workload, arrivals_s, engine)
    # The cache has room for everything.
    assert 20 < len(replayed.served) < 40
    assert stats.prefix_cache_hits == workload.without(replayed.unsent).shareable_prompt_tokens
    assert delays_s(workload, replayed, arrivals_s.tolist()) == pytest.approx([0.0] * len(replayed.served))
