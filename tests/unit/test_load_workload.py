"""Finding a workload by its spec, and making prompts for requests that have none."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bullet_graph.errors import WorkloadError
from bullet_graph.workloads import WorkloadRequest, load_workload, make_prompt_token_ids

# Beginnings that carry arbitrary bytes past a reader's first checks.
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:17:03.9799600,4808,10\n"
MOONCAKE_ROW = '{"timestamp": 0, "input_length": 5, "output_length": 2}\n'
SHAREGPT_START = '[{"conversations":'


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class TestLoadWorkload:
    def test_takes_the_first(self) -> None:
        whole = load_workload("azure:conv", num_requests=None).requests
        assert load_workload("azure:conv", num_requests=64).requests == whole[:64]

    @pytest.mark.parametrize("spec", ["azure:conv", "azure:code"])
    def test_more_than_there_are(self, spec: str) -> None:
        assert len(load_workload(spec, num_requests=1000).requests) == 1000
        with pytest.raises(WorkloadError, match="1001 requests were asked for, the file holds 1000"):
            load_workload(spec, num_requests=1001)

    @pytest.mark.parametrize("num_requests", [0, -1])
    @pytest.mark.parametrize("spec", ["azure:conv", "synthetic:code"])
    def test_fewer_than_one(self, spec: str, num_requests: int) -> None:
        with pytest.raises(WorkloadError, match=f"at least 1, got {num_requests}"):
            load_workload(spec, num_requests=num_requests)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("synthetic:chat", "'chat'.*synthetic:conv, synthetic:code, synthetic:longdoc"),
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

    # The temporary folder is shared by the examples, each of which writes its file anew.
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        suffix=st.sampled_from([".csv", ".json", ".jsonl"]),
        start=st.sampled_from(["", AZURE_HEADER, AZURE_HEADER + AZURE_ROW, MOONCAKE_ROW, SHAREGPT_START]),
        rest=st.binary(max_size=60)
        | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    )
    def test_any_bytes_give_requests_or_the_projects_error(
        self, tmp_path: Path, suffix: str, start: str, rest: bytes
    ) -> None:
        path = tmp_path / f"fuzz{suffix}"
        path.write_bytes(start.encode() + rest)
        # Anything but the project's own error fails the test.
        with contextlib.suppress(WorkloadError):
            requests = load_workload(str(path), num_requests=None, tokenize=tokenize).requests
            assert all(request.prompt_tokens >= 1 <= request.output_tokens for request in requests)


class TestPromptTokenIds:
    @given(
        prompt_tokens=st.integers(1, 300),
        index=st.integers(0, 10**6),
        vocab_size=st.integers(1, 200_000),
        seed=st.integers(0, 2**63 - 1),
    )
    def test_length_range_and_determinism(
        self, prompt_tokens: int, index: int, vocab_size: int, seed: int
    ) -> None:
        request = WorkloadRequest(prompt_tokens, 1, None)
        ids = make_prompt_token_ids(request, index, vocab_size, seed)
        assert ids.dtype == np.int32
        assert ids.shape == (prompt_tokens,)
        assert ids.min() >= 0
        assert ids.max() < vocab_size
        np.testing.assert_array_equal(ids, make_prompt_token_ids(request, index, vocab_size, seed))

    def test_whole_vocabulary_is_used_and_indices_and_seeds_differ(self) -> None:
        request = WorkloadRequest(1000, 1, None)
        ids = make_prompt_token_ids(request, 0, 50, seed=0)
        assert set(ids.tolist()) == set(range(50))
        prompts = [make_prompt_token_ids(request, i, 128_256, seed) for seed in (0, 1) for i in range(20)]
        assert len({tuple(prompt[:8].tolist()) for prompt in prompts}) == 40

    def test_a_request_with_ids_keeps_them(self) -> None:
        request = WorkloadRequest(3, 1, None, "a b c", (5, 0, 9))
        ids = make_prompt_token_ids(request, 4, 10, seed=1)
        assert ids.dtype == np.int32
        assert ids.tolist() == [5, 0, 9]
