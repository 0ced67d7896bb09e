"""Workloads by name and from files, what is said of broken ones; arrival times; prompts for requests without."""

import contextlib
import json
import math
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bullet_graph.errors import ConfigError, WorkloadError
from bullet_graph.workloads import Arrivals, Workload, WorkloadRequest, load_workload, make_prompt_token_ids
from bullet_graph.workloads.workload import Times, TurnBefore

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:17:03.9799600,4808,10"
MOONCAKE_ROW = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}'

# The temporary folder is shared by a property's examples, each of which writes its own file anew.
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def read(path: Path, content: str | bytes, num_requests: int | None = None) -> tuple[WorkloadRequest, ...]:
    return load_workload(write(path, content), num_requests=num_requests, tokenize=tokenize).requests


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


class TestAzure:
    @pytest.mark.parametrize(
        ("spec", "second", "means", "last_s"),
        [
            ("azure:conv", (396, 109, 4.31458), (1014.189, 247.262), 216.027393),
            ("azure:code", (3180, 8, 0.052), (2122.354, 27.621), 521.588576),
        ],
    )
    def test_excerpts_are_the_first_thousand_rows(
        self, spec: str, second: tuple[float, ...], means: tuple[float, ...], last_s: float
    ) -> None:
        whole = load_workload(spec, num_requests=None)
        rows = [(r.prompt_tokens, r.output_tokens, r.arrival_s) for r in whole.requests]
        assert (whole.name, len(rows), rows[0][2]) == (spec, 1000, 0)
        assert rows[1] == pytest.approx(second)
        assert np.mean(rows, axis=0)[:2] == pytest.approx(means)
        assert rows[-1][2] == pytest.approx(last_s)
        assert load_workload(spec, num_requests=64).requests == whole.requests[:64]
        assert load_workload(spec, num_requests=1000) == whole
        for number in 1001, 10**30:
            with pytest.raises(WorkloadError, match=f"{number} requests were asked for, the file holds 1000"):
                load_workload(spec, num_requests=number)

    @pytest.mark.parametrize("line_end", ["\n", "\r\n"])
    @pytest.mark.parametrize("last", ["", "END"])
    def test_line_ends_and_a_last_line_without_one(self, tmp_path: Path, line_end: str, last: str) -> None:
        text = line_end.join([HEADER, ROW, "2023-11-16 18:17:05.9799600,7,3", ""])
        requests = read(tmp_path / "t.csv", text if last else text.rstrip())
        assert requests == (WorkloadRequest(4808, 10, 0.0), WorkloadRequest(7, 3, 2.0))

    def test_byte_order_mark_blank_lines_quotes_and_offsets_from_utc(self, tmp_path: Path) -> None:
        first, second = '"2024-05-10 00:00:00.00993+00:00","5","2"', "2024-05-10 00:00:01.00993+00:00, 6 ,3"
        requests = read(tmp_path / "T.CSV", "\ufeff" + "\n".join([HEADER, first, "", second, ""]))
        assert requests == (WorkloadRequest(5, 2, 0.0), WorkloadRequest(6, 3, 1.0))

    @pytest.mark.parametrize(
        ("content", "line", "message"),
        [
            (b"", 1, "header"),
            (f"{ROW}\n", 1, "header"),
            ("TIMESTAMP,GeneratedTokens,ContextTokens\n", 1, "header"),
            (f"{HEADER}\n{ROW},1", 2, "3 columns"),
            (f"{HEADER}\n{ROW}\n{ROW[:-3]}", 3, "3 columns"),
            (f"{HEADER}\nyesterday,1,1", 2, "TIMESTAMP"),
            (f"{HEADER}\n2023-11-31 18:17:03.9799600,1,1", 2, "TIMESTAMP"),
            (f"{HEADER}\n{ROW}\n2023-11-16 18:17:04+00:00,1,1", 3, "TIMESTAMP"),
            (f"{HEADER}\n{ROW}\n\n2023-11-16 18:17:03.8799600,1,1", 4, "earlier"),
            (f"{HEADER}\n2023-11-16 18:17:03,0,1", 2, "ContextTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,1.5,1", 2, "ContextTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,1_0,1", 2, "ContextTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,٣,1", 2, "ContextTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,{'9' * 5000},1", 2, "ContextTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,1,0", 2, "GeneratedTokens"),
            (f"{HEADER}\n2023-11-16 18:17:03,1,", 2, "GeneratedTokens"),
            (f'{HEADER}\n"2023-11-16 18:17:03,1,1', 2, "CSV"),
            (b"\x7fELF\x00\xff\xfe\x80", 1, "UTF-8"),
            (f"{HEADER}\n".encode() + ROW.encode("utf-16"), 2, "UTF-8"),
        ],
    )
    def test_broken_input(self, tmp_path: Path, content: str | bytes, line: int, message: str) -> None:
        spec = write(tmp_path / "t.csv", content)
        with pytest.raises(WorkloadError, match=message) as caught:
            load_workload(spec, num_requests=None)
        assert f"{spec}, line {line}:" in str(caught.value)

    def test_reads_no_further_than_asked(self, tmp_path: Path) -> None:
        assert len(read(tmp_path / "t.csv", f"{HEADER}\n{ROW}\nbroken", 1)) == 1
        with pytest.raises(WorkloadError, match="holds none"):
            read(tmp_path / "t.csv", HEADER + "\n")

    @SHARED_FOLDER
    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 10**9), st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=20
        )
    )
    def test_what_was_written_is_read(self, tmp_path: Path, rows: list[tuple[int, int, int]]) -> None:
        start = datetime(2023, 11, 16, 18, 17, 3, 979960)
        microseconds = sorted(row[0] for row in rows)
        lines = [
            f"{start + timedelta(microseconds=at):%Y-%m-%d %H:%M:%S.%f}0,{prompt},{output}"
            for at, (_, prompt, output) in zip(microseconds, rows, strict=True)
        ]
        requests = read(tmp_path / "t.csv", "\n".join([HEADER, *lines]))
        assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [row[1:] for row in rows]
        assert [r.arrival_s for r in requests] == pytest.approx([(at - microseconds[0]) / 1e6 for at in microseconds])


class TestMooncake:
    def test_lengths_and_arrivals(self, tmp_path: Path) -> None:
        rows = [
            {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
            {"timestamp": 3000, "input_length": 7322, "output_length": 490},
            {"timestamp": 6052.5, "input_length": 1, "output_length": 1},
        ]
        assert read(tmp_path / "m.jsonl", "\n\n".join(json.dumps(row) for row in rows)) == (
            WorkloadRequest(6758, 500, 0.0, None, (0, 1), 512),
            WorkloadRequest(7322, 490, 0.0),
            WorkloadRequest(1, 1, 3.0525),
        )
        from_0 = [rows[1] | {"timestamp": at} for at in (0, 1000, 2500)]
        read_back = read(tmp_path / "z.jsonl", "\n".join(json.dumps(row) for row in from_0))
        assert [r.arrival_s for r in read_back] == [0.0, 1.0, 2.5]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"timestamp": "1"}, "timestamp: Input should be"),
            ({"timestamp": math.nan}, "timestamp: Input should be"),
            ({"timestamp": 10**400}, "timestamp: Input should be"),
            ({"timestamp": -1}, "timestamp: Input should be"),
            ({"timestamp": True}, "timestamp: Input should be"),
            ({"input_length": 0}, "input_length: Input should be"),
            ({"input_length": 2.0}, "input_length: Input should be"),
            ({"output_length": True}, "output_length: Input should be"),
            ({"output_length": 0}, "output_length: Input should be"),
            ({"hash_ids": 7}, "hash_ids: Input should be a valid array"),
            ({"hash_ids": [1.0]}, r"hash_ids.0: Input should be"),
            ({"hash_ids": [-1]}, r"hash_ids.0: Input should be"),
            ({"hash_ids": [2**64]}, r"hash_ids.0: Input should be"),
            (
                {"input_length": 513, "hash_ids": [1, 2, 3]},
                ".*for each 512 tokens of input_length=513 is required, found 3",
            ),
        ],
    )
    def test_a_field_out_of_range(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        row = json.dumps({"timestamp": 1, "input_length": 2, "output_length": 3} | changes)
        with pytest.raises(WorkloadError, match=f"m.jsonl, line 2: {message}"):
            read(tmp_path / "m.jsonl", f"{MOONCAKE_ROW}\n{row}\n")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (f'{MOONCAKE_ROW}\n{{"timestamp": 1, "input_length"\n', "line 2: Invalid JSON"),
            (f"{MOONCAKE_ROW}\n[1, 2]", "line 2: Input should be an object"),
            (f"{MOONCAKE_ROW}\n{'[' * 100_000}", "line 2: Invalid JSON"),
            (f"{MOONCAKE_ROW}\n{{}}", "line 2: timestamp: Field required"),
            (f"{MOONCAKE_ROW.replace(': 0', ': 1500')}\n{MOONCAKE_ROW}", r"line 2: .* earlier .* 1.5 s"),
            (f"{MOONCAKE_ROW}\n".encode() + b"\xff", "line 2: UTF-8"),
            ("\n", "holds none"),
        ],
    )
    def test_broken_file(self, tmp_path: Path, content: str | bytes, message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            read(tmp_path / "m.jsonl", content)


class TestShareGpt:
    def test_all_turns_of_each_conversation(self, tmp_path: Path) -> None:
        records = [
            conversation(("human", "one two"), ("gpt", "a bc d"), ("human", "three"), ("gpt", "e")),
            conversation(("gpt", "begins here"), ("human", "a question"), ("gpt", "answered")),
            conversation(("human", "x"), ("gpt", "y"), ("human", "of nothing"), ("gpt", ""), ("human", "z")),
        ]
        first, second, *others = read(tmp_path / "s.json", json.dumps(records, indent=1))
        assert first == WorkloadRequest(2, 3, None, (3, 3))
        assert second.follows is not None
        think_s = second.follows.think_s
        assert 0 < think_s <= 120
        # Its prompt is 2 + 3 tokens of the first turn and the new one.
        assert second == WorkloadRequest(6, 1, None, (5,), follows=TurnBefore(0, 5, think_s))
        assert others == [WorkloadRequest(2, 1, None, (1, 8)), WorkloadRequest(1, 1, None, (1,))]
        path = write(tmp_path / "t.json", json.dumps(records[:1] * 2))
        loads = (load_workload(path, num_requests=None, seed=seed, tokenize=tokenize) for seed in (0, 0, 1))
        one, same, other = ([r.follows.think_s for r in each.requests if r.follows] for each in loads)
        assert (one, len({*one, *other})) == (same, 4)

    def test_conversations_without_an_exchange_are_passed_over(self, tmp_path: Path) -> None:
        records = [
            conversation(),
            conversation(("human", "no answer")),
            conversation(("gpt", "before"), ("human", "after")),
            conversation(("human", ""), ("gpt", "to nothing")),
            conversation(("human", "says"), ("gpt", "")),
            conversation(("human", " "), ("gpt", "to no tokens")),
            conversation(("system", "s"), ("human", "kept"), ("gpt", "yes")),
        ]
        spec = write(tmp_path / "s.json", json.dumps(records))
        requests = load_workload(spec, num_requests=None, tokenize=tokenize).requests
        assert [request.prompt_token_ids for request in requests] == [(4,)]
        with pytest.raises(WorkloadError, match="2 requests were asked for, the file holds 1"):
            load_workload(spec, num_requests=2, tokenize=tokenize)
        with pytest.raises(WorkloadError, match="tokenizer is required"):
            load_workload(spec, num_requests=None)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "JSON list"),
            ('[\n{"conversations": []},\n\n{"conv', "JSON list of conversations .* at line 4"),
            ("{}", "JSON list"),
            ("[" * 100_000, "JSON list"),
            ("[]", "holds none"),
            ('[{"conversations": []}, 3]', "0 the first; 1: Input should be an object"),
            ('[{"id": "x"}]', r"0\.conversations: Field required"),
            ('[{"conversations": "text"}]', r"0\.conversations: Input should be a valid array"),
            ('[{"conversations": [{"from": "human"}]}]', r"0\.conversations\.0\.value: Field required"),
            ('[{"conversations": ["hello"]}]', r"0\.conversations\.0: Input should be an object"),
            (b"[\n\n\xff]", "line 3: UTF-8"),
            # Half a surrogate pair, which a tokenizer cannot encode.
            (r'[{"conversations": [{"from": "human", "value": "\ud800"}]}]', "Invalid JSON"),
        ],
    )
    def test_broken_input(self, tmp_path: Path, content: str | bytes, message: str) -> None:
        spec = write(tmp_path / "s.json", content)
        with pytest.raises(WorkloadError, match=message) as caught:
            load_workload(spec, num_requests=None, tokenize=tokenize)
        assert spec in str(caught.value)


class TestLoadWorkload:
    def test_fewer_than_one(self) -> None:
        with pytest.raises(WorkloadError, match="at least 1, got 0"):
            load_workload("azure:conv", num_requests=0)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("synthetic:chats", "'chats'.*synthetic:conv, synthetic:code, synthetic:longdoc, .*synthetic:chat"),
            ("synthetic", "synthetic:conv, synthetic:code, synthetic:longdoc"),
            ("azure:chat", "azure:conv or azure:code"),
            ("azure:", "azure:conv or azure:code"),
            ("", "azure:conv, azure:code, synthetic:conv"),
            ("trace.parquet", "'trace.parquet' is no workload.*.csv.*.json.*.jsonl.*synthetic:longdoc"),
        ],
    )
    def test_unknown_name(self, spec: str, message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            load_workload(spec, num_requests=1)

    @pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl"])
    def test_missing_file_and_folder(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"trace{suffix}"
        with pytest.raises(WorkloadError, match="No such file") as caught:
            load_workload(str(path), num_requests=None, tokenize=tokenize)
        assert str(path) in str(caught.value)
        path.mkdir()
        with pytest.raises(WorkloadError, match="Is a directory"):
            load_workload(str(path), num_requests=None, tokenize=tokenize)

    @SHARED_FOLDER
    @given(
        suffix=st.sampled_from([".csv", ".json", ".jsonl"]),
        start=st.sampled_from(["", f"{HEADER}\n", f"{HEADER}\n{ROW}\n", f"{MOONCAKE_ROW}\n", '[{"conversations":']),
        rest=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    )
    def test_any_bytes_give_requests_or_our_error(self, tmp_path: Path, suffix: str, start: str, rest: bytes) -> None:
        # Anything but the project's own error fails the test.
        with contextlib.suppress(WorkloadError):
            requests = read(tmp_path / f"fuzz{suffix}", start.encode() + rest)
            assert all(request.prompt_tokens >= 1 <= request.output_tokens for request in requests)


class TestPromptTokenIds:
    @given(
        prompt_tokens=st.integers(1, 300),
        index=st.integers(0, 10**6),
        vocab_size=st.integers(1, 200_000),
        seed=st.integers(0, 2**63 - 1),
    )
    def test_length_range_and_determinism(self, prompt_tokens: int, index: int, vocab_size: int, seed: int) -> None:
        request = WorkloadRequest(prompt_tokens, 1, None)
        ids = make_prompt_token_ids(request, index, vocab_size, seed)
        assert (ids.dtype, ids.shape) == (np.int32, (prompt_tokens,))
        assert 0 <= ids.min() <= ids.max() < vocab_size
        np.testing.assert_array_equal(ids, make_prompt_token_ids(request, index, vocab_size, seed))

    def test_whole_vocabulary_is_used_and_indices_and_seeds_differ(self) -> None:
        request = WorkloadRequest(1000, 1, None)
        assert set(make_prompt_token_ids(request, 0, 50, seed=0).tolist()) == set(range(50))
        prompts = [make_prompt_token_ids(request, i, 128_256, seed) for seed in (0, 1) for i in range(20)]
        assert len({tuple(prompt[:8].tolist()) for prompt in prompts}) == 40

    def test_a_request_with_ids_keeps_them(self) -> None:
        ids = make_prompt_token_ids(WorkloadRequest(3, 1, None, (5, 0, 9)), 4, 10, seed=1)
        assert ids.dtype == np.int32
        assert ids.tolist() == [5, 0, 9]


# ---- arrival times ----


def arrival_times(num_requests: int, **settings: float) -> Times:
    workload = Workload("w", (WorkloadRequest(1, 1, None),) * num_requests)
    return Arrivals(**settings).times(workload)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("burstiness", [0.3, 1.0, 5.0, math.inf])
def test_the_mean_rate_is_exact_for_every_seed(burstiness: float, seed: int) -> None:
    times = arrival_times(400, request_rate=20, burstiness=burstiness, seed=seed)
    assert (times.shape, times.dtype) == ((400,), np.float64)
    assert times[-1] == pytest.approx(400 / 20)
    assert times[0] > 0
    assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_spread_as_a_gamma_distribution(burstiness: float) -> None:
    gaps = np.diff(arrival_times(200_000, request_rate=3, burstiness=burstiness, seed=7), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 3)
    # A gamma distribution of shape k has a coefficient of variation of 1/√k and a skewness of 2/√k.
    deviation = gaps.std()
    assert deviation / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.02)
    assert ((gaps - gaps.mean()) ** 3).mean() / deviation**3 == pytest.approx(2 * burstiness**-0.5, rel=0.1)


def test_limits_of_the_distribution() -> None:
    assert arrival_times(1, request_rate=4).tolist() == [0.25], "one request comes after one mean gap"
    assert arrival_times(5, request_rate=2, burstiness=math.inf) == pytest.approx([0.5, 1, 1.5, 2, 2.5])
    assert arrival_times(3, request_rate=math.inf).tolist() == [0, 0, 0]


def test_the_pattern_follows_from_the_seed_and_scales_with_the_rate() -> None:
    once = arrival_times(50, request_rate=10, seed=3)
    assert arrival_times(50, request_rate=10, seed=3).tolist() == once.tolist()
    assert arrival_times(50, request_rate=5, seed=3) == pytest.approx(2 * once)
    assert arrival_times(50, request_rate=10, seed=4) != pytest.approx(once)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({name: x}, name) for name in ("request_rate", "burstiness") for x in (0.0, -1.0, math.nan, 1e-308, 1e308)),
        ({"burstiness": 1e-9}, "raise the burstiness"),
        ({"seed": -1}, "seed"),
        *(({"request_rate": None, "time_scale": x}, "scale") for x in (0.0, -1.0, math.inf, math.nan, 1e-308, 1e308)),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrival_times(2, **{"request_rate": 1.0} | settings)


def test_a_traces_own_times() -> None:
    workload = load_workload("azure:conv", num_requests=20)
    times = Arrivals(request_rate=None).times(workload)
    assert times[0] == 0
    assert times.tolist() == [request.arrival_s for request in workload.requests]
    assert Arrivals(request_rate=None, time_scale=0.5).times(workload) == pytest.approx(times / 2)


def test_a_workload_without_times_has_none_to_replay() -> None:
    workload = Workload("chat", (WorkloadRequest(3, 4, 0.0), WorkloadRequest(3, 4, None)))
    with pytest.raises(WorkloadError, match=r"chat has no arrival times.*request rate"):
        Arrivals(request_rate=None).times(workload)


def test_a_workload_is_cut_and_a_synthetic_one_made_longer() -> None:
    code = load_workload("synthetic:code", num_requests=None, seed=3)
    trace = load_workload("azure:code", num_requests=9)
    longer = code.first(1500)
    assert (len(longer.requests), longer.first(1000)) == (1500, code)
    assert trace.first(20) == trace
    assert trace.first(4).requests == trace.requests[:4]
    assert len(load_workload("synthetic:code", num_requests=5).first(20).requests) == 5, "the number asked for is kept"
