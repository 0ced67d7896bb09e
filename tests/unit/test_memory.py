"""The memory ledger against sums worked by hand."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig, Policy
from bullet_graph.errors import InsufficientMemoryError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.sharding import shard
from bullet_graph.planner.tuning import TUNING
from bullet_graph.runtime import memory
from bullet_graph.runtime.memory import GIB, DeviceMemory, MemoryLedger, held_tokens, plan_memory

TINY, LLAMA = PRESETS["tiny"], PRESETS["llama-3.1-8b"]
H200 = DeviceMemory(total_bytes=140 * GIB, free_bytes=139 * GIB)

# 4 layers, keys and values, 16 tokens, 2 heads of 32, float32.
TINY_BLOCK_BYTES = 4 * 2 * 16 * 64 * 4


def plan(config: EngineConfig, device: DeviceMemory, model: ModelConfig | None = None, **settings: int) -> MemoryLedger:
    model = model or PRESETS[config.model]
    defaults = {"max_model_len": 256, "workspaces_bytes": 0, "graphs_bytes": 0}
    return plan_memory(
        config, model, dtype_bytes=4 if config.model == "tiny" else 2, device=device, **(defaults | settings)
    )


def tiny(**settings: object) -> EngineConfig:
    return EngineConfig(model="tiny", **({"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings))  # type: ignore[arg-type]


def fixed_bytes(ledger: MemoryLedger) -> int:
    return ledger.weights_bytes + ledger.activations_bytes + ledger.workspaces_bytes + ledger.graphs_bytes


def test_an_8b_model_on_one_large_gpu() -> None:
    limits = {"max_model_len": 131072, "workspaces_bytes": GIB, "graphs_bytes": 2 * GIB}
    ledger = plan(EngineConfig(model="llama-3.1-8b"), H200, **limits)
    assert ledger.weights_bytes == 2 * LLAMA.num_parameters == 2 * 8_030_261_248
    # 90 % of the device, less what others use of it.
    assert ledger.budget_bytes == int(140 * GIB * 0.9) - GIB
    # The cache takes what is left, to the last whole block of 16 × 128 KiB.
    block = 16 * 131_072
    assert 0 <= ledger.budget_bytes - fixed_bytes(ledger) - ledger.kv_cache_bytes < block
    assert ledger.kv_cache_bytes == ledger.num_kv_blocks * block
    assert ledger.kv_cache_tokens == (ledger.num_kv_blocks - 1) * 16
    assert 700_000 < ledger.kv_cache_tokens < 900_000
    rows = dict(ledger.rows())
    assert sum(rows.values()) == H200.total_bytes
    assert rows["left free"] >= H200.free_bytes - ledger.budget_bytes
    # A cache that is small because others hold memory must not be a riddle.
    assert rows["in use before"] == H200.total_bytes - H200.free_bytes == GIB
    assert list(rows)[-2:] == ["left free", "in use before"]
    assert (rows["workspaces"], rows["CUDA graphs"]) == (GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("settings", "limits", "num_blocks"),
    [
        # 4 sequences of 256 tokens (16 blocks each), and the padding block.
        ({}, {}, 1 + 4 * 16),
        ({}, {"max_model_len": 257}, 1 + 4 * 17),
        # A limit holds unless one sequence needs more.
        ({}, {"kv_cache_limit_bytes": 30 * TINY_BLOCK_BYTES + 1}, 30),
        ({}, {"kv_cache_limit_bytes": 1}, 1 + 16),
        ({}, {"kv_cache_limit_bytes": GIB}, 1 + 4 * 16),
        # A size that is asked for is taken as it is: more than can be used, and in spite of the limit.
        ({"kv_cache_bytes": 500 * TINY_BLOCK_BYTES + 3}, {"kv_cache_limit_bytes": 1}, 500),
        ({"kv_cache_bytes": 17 * TINY_BLOCK_BYTES}, {}, 17),
    ],
)
def test_blocks_of_the_cache(settings: dict[str, int], limits: dict[str, int], num_blocks: int) -> None:
    ledger = plan(tiny(**settings), DeviceMemory(8 * GIB, 8 * GIB), **limits)
    assert (ledger.num_kv_blocks, ledger.kv_cache_bytes) == (num_blocks, num_blocks * TINY_BLOCK_BYTES)


def test_a_windowed_model_s_cache_holds_the_window_and_what_is_in_flight() -> None:
    windowed, device = replace(TINY, layer_windows=(40,) * 4), DeviceMemory(8 * GIB, 8 * GIB)
    config = tiny(max_num_batched_tokens=32)
    # A window of 40, two chunks of 32 and a block of 16 are 120 tokens.
    assert held_tokens(config, windowed.widest_window, 256) == 120
    assert held_tokens(config, windowed.widest_window, 100) == 100
    assert held_tokens(config, replace(TINY, layer_windows=(40, None, 40, 40)).widest_window, 256) == 256
    assert plan(config, device, model=windowed).num_kv_blocks == 1 + 4 * 8
    assert plan(config, device, model=windowed, kv_cache_limit_bytes=1).num_kv_blocks == 1 + 8


@given(utilization=st.floats(0.3, 1.0), free_gib=st.integers(60, 140))
def test_the_engine_stays_within_its_budget(utilization: float, free_gib: int) -> None:
    config = EngineConfig(model="llama-3.1-8b", gpu_memory_utilization=utilization)
    device = DeviceMemory(140 * GIB, free_gib * GIB)
    try:
        ledger = plan(config, device)
    except InsufficientMemoryError:
        return
    used_before = device.total_bytes - device.free_bytes
    assert fixed_bytes(ledger) + ledger.kv_cache_bytes <= ledger.budget_bytes
    assert used_before + ledger.budget_bytes == int(utilization * device.total_bytes)
    assert dict(ledger.rows())["left free"] >= 0
    assert ledger.num_kv_blocks >= 1 + 256 // KV_BLOCK_TOKENS


def test_wider_forwards_cost_activations() -> None:
    device = DeviceMemory(8 * GIB, 8 * GIB)
    narrow = plan(tiny(max_num_batched_tokens=64), device)
    wide = plan(tiny(max_num_batched_tokens=128), device)
    # A row: 4 hidden, 2 × qkv and 3 intermediate activations in float32.
    assert wide.activations_bytes - narrow.activations_bytes == 64 * 4 * (4 * 128 + 2 * 256 + 3 * 384)
    chunked = plan(tiny(max_num_batched_tokens=128, policy=Policy("mixed", 64)), device)
    assert chunked.activations_bytes == narrow.activations_bytes
    # The prefill lane runs a forward of its own beside the decode lane's.
    both = plan(tiny(max_num_batched_tokens=64, policy=Policy("split")), device)
    assert both.activations_bytes - narrow.activations_bytes == 64 * 4 * (4 * 128 + 2 * 256 + 3 * 384)
    # Its chunks are the planner's.
    mixed, split = (plan(tiny(max_num_batched_tokens=8192, policy=Policy(name)), device) for name in ("mixed", "split"))
    rows = TUNING.lane_chunk_tokens
    assert split.activations_bytes - mixed.activations_bytes == rows * 4 * (4 * 128 + 2 * 256 + 3 * 384)


def test_more_sequences_cost_logits() -> None:
    few, many = (plan(tiny(max_num_seqs=n), DeviceMemory(8 * GIB, 8 * GIB)).activations_bytes for n in (64, 256))
    # Logits twice in float32, and a mark; log-probabilities are of few rows at once.
    assert many - few == 192 * (4 * (4 * 128 + 2 * 256 + 3 * 384) + TINY.vocab_size * (2 * 4 + 4))


def test_the_activations_of_a_rank() -> None:
    half = shard(TINY, 2, 0)
    per_row = 4 * half.hidden_size + 2 * (half.q_size + 2 * half.kv_size) + half.mlp_result_size
    # Logits also as they are gathered and joined. Few sequences have 64 rows that are scored, and a mark each.
    logits = 64 * (6 * 4 + 2 * 4) + 4 * 4
    tables = 256 * TINY.head_dim * 4  # sines and cosines, for each position
    expected = 68 * per_row * 4 + logits * TINY.vocab_size + tables
    assert plan(tiny(), DeviceMemory(8 * GIB, 8 * GIB), model=half).activations_bytes == expected


def test_each_lane_has_a_workspace_and_another_rank_s_blocks_change_the_cache_alone() -> None:
    assert memory.workspace_bytes(LLAMA) == 2 * memory.prefill_workspace_bytes(LLAMA) + GIB
    ledger = plan(tiny(), DeviceMemory(8 * GIB, 8 * GIB))
    fewer = replace(ledger, num_kv_blocks=20, kv_cache_bytes=20 * TINY_BLOCK_BYTES)
    assert memory.with_kv_blocks(ledger, 20) == fewer


def test_a_model_too_large_says_by_how_much_and_what_to_change() -> None:
    config = EngineConfig(model="llama-3.1-8b", gpu_memory_utilization=0.5)
    device = DeviceMemory(24 * GIB, 24 * GIB)
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(config, device, max_model_len=8192)
    message = str(caught.value)
    for part in ("max_model_len=8192 tokens needs 1.00 GiB", "a budget of 12.00 GiB", "weights 14.96 GiB"):
        assert part in message
    for setting in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "utilization (now 0.5)"):
        assert setting in message[message.index("short by") :]
    # So much more is enough, and a little less is not.
    found = re.search(r"short by ([\d.]+) GiB\.", message)
    assert found
    enough, too_little = (24 + 2 * (float(found[1]) + extra) for extra in (0.02, -0.02))
    assert plan(config, DeviceMemory(*[int(enough * GIB)] * 2), max_model_len=8192).num_kv_blocks >= 513
    with pytest.raises(InsufficientMemoryError):
        plan(config, DeviceMemory(*[int(too_little * GIB)] * 2), max_model_len=8192)


@pytest.mark.parametrize(
    ("settings", "device_gib", "words"),
    [
        # 17 blocks of 32 KiB against 10.
        (
            {"kv_cache_bytes": 10 * TINY_BLOCK_BYTES},
            (8, 8),
            (
                "one sequence of max_model_len=256 tokens needs 0.53 MiB",
                "kv_cache_bytes=327680 allows 0.31 MiB",
                "short by 0.22 MiB. Raise kv_cache_bytes or lower max_model_len.",
            ),
        ),
        # The budget is 90 % of 2 GiB less the 1 GiB in use: 0.8 GiB.
        (
            {"kv_cache_bytes": 2 * GIB},
            (2, 1),
            (f"kv_cache_bytes={2 * GIB} needs 2.00 GiB", "Lower kv_cache_bytes,", "a budget of 819.20 MiB"),
        ),
        # A device in use beyond the budget leaves less than nothing.
        ({"gpu_memory_utilization": 0.5}, (16, 4), ("a budget of -4.00 GiB",)),
    ],
)
def test_a_cache_too_large(settings: dict[str, float], device_gib: tuple[int, int], words: tuple[str, ...]) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        plan(tiny(**settings), DeviceMemory(*(size * GIB for size in device_gib)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_ledger_of_a_small_model_shows_no_zeros() -> None:
    text = str(plan(tiny(), DeviceMemory(8 * GIB, 7 * GIB)))
    assert "KV cache (1,024 tokens)" in text
    assert re.search(r"weights +\d+\.\d\d MiB", text)
    assert text.splitlines()[-1].split() == ["device", "8.00", "GiB"]
    assert len({len(line) for line in text.splitlines()}) == 1
