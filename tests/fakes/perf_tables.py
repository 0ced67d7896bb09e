"""A performance table like one measured on an H200 with Llama-3.1-8B, made by formulas.

The formulas are fitted to ``bench/results/h200/sm_scaling_smctrl.json`` and to the decode steps of
``bench/LOG.md``; what was never measured (other batches beside prefill, mixed forwards) is plausible only.
"""

import random
from bisect import bisect_left
from dataclasses import replace

from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.table import PerfTable, ProfilePoint, TableKey, shape_numbers

NUM_SMS = 132
LLAMA_8B = PRESETS["llama-3.1-8b"]

H200_KEY = TableKey(
    gpu="NVIDIA H200",
    num_sms=NUM_SMS,
    model="llama-3.1-8b",
    shape=shape_numbers(LLAMA_8B),
    dtype="bfloat16",
    kernels={"torch": "2.11.0", "triton": "3.6.0", "flashinfer": "0.6.12", "bullet_graph_kernels": "1"},
)

# By SMs of the decode lane, batch 64, context 1,000, 2,048-token prompts: decode step alone and beside prefill
# in milliseconds, prefill on the other SMs alone and beside decode in tokens per second.
_MEASURED = {
    16: (24.108, 30.315, 32723.7, 29376.5),
    24: (17.342, 22.269, 32189.6, 27516.3),
    32: (13.700, 17.873, 31535.2, 25923.8),
    48: (10.531, 13.728, 30374.6, 23503.5),
    64: (8.876, 11.475, 28092.2, 20127.4),
    80: (8.659, 10.537, 20871.7, 14998.0),
    96: (8.167, 9.491, 15209.9, 10544.9),
    112: (7.941, 8.675, 8611.8, 5923.0),
}
_WHOLE_DECODE_MS = 7.318
_WHOLE_PREFILL_TOKENS_PER_S = 42095.1

# A decode step without its attention, by batch size; at a context of 1,000 the measured steps come out.
_STEP_MS = ((1, 4.204), (8, 4.869), (64, 4.988), (256, 6.76), (512, 12.5), (1024, 24.0))
_KV_TOKEN_MS = 3.64e-5
_PAIR_MS = 1.165e-6
_ROW_MS = 0.021587


def decode_ms(batch_size: int, context_tokens: int, sms: int | None = None) -> float:
    """A decode step, alone."""
    whole = _step_ms(batch_size) + batch_size * context_tokens * _KV_TOKEN_MS
    return whole if sms is None else whole * _MEASURED[sms][0] / _WHOLE_DECODE_MS


def prefill_ms(tokens: int, cached_tokens: int = 0, sms: int | None = None) -> float:
    """A prefill forward, alone, on so many SMs of the prefill lane."""
    whole = _rows_ms(tokens) + attention_pairs(tokens, cached_tokens) * _PAIR_MS
    return whole if sms is None else whole * _WHOLE_PREFILL_TOKENS_PER_S / _MEASURED[NUM_SMS - sms][2]


def mixed_ms(tokens: int, batch_size: int, context_tokens: int) -> float:
    """A forward of a prompt chunk and decode rows."""
    attention = attention_pairs(tokens) * _PAIR_MS + batch_size * context_tokens * _KV_TOKEN_MS
    return _rows_ms(tokens + batch_size) + attention + 0.8


def split_ms(decode_sms: int, batch_size: int, context_tokens: int, tokens: int) -> tuple[float, float]:
    """A decode step and a prefill forward, beside each other; larger batches slow prefill a little more."""
    alone_ms, beside_ms, alone_rate, beside_rate = _MEASURED[decode_sms]
    return (
        decode_ms(batch_size, context_tokens, decode_sms) * beside_ms / alone_ms,
        prefill_ms(tokens, sms=NUM_SMS - decode_sms)
        * (alone_rate / beside_rate)
        * (batch_size * context_tokens / 64000) ** 0.02,
    )


def h200_table(
    *,
    key: TableKey = H200_KEY,
    decode_sms: tuple[int, ...] = tuple(_MEASURED),
    mixed: bool = True,
    noise: float = 0.0,
    seed: int = 0,
) -> PerfTable:
    """The table for ``key``, without mixed forwards if so asked; each time is off by at most a share ``noise``.

    ``decode_sms``: the partitions measured, of those above; none gives a table without partitions.
    """
    factor = random.Random(seed)
    grid = [
        *(
            ProfilePoint("decode", sms, batch_size, context_tokens)
            for sms in (None, *decode_sms)
            for batch_size in (1, 8, 32, 64, 128, 256, 512)
            for context_tokens in (250, 1000, 4000)
            # What fits into the KV cache of such a GPU.
            if batch_size * context_tokens <= 800_000
        ),
        *(
            ProfilePoint("prefill", sms, tokens=tokens, cached_tokens=cached_tokens)
            for sms in (None, *(NUM_SMS - sms for sms in decode_sms))
            for tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192)
            for cached_tokens in ((0, 8192) if tokens in (256, 2048) else (0,))
        ),
        *(
            ProfilePoint("mixed", None, batch_size, 1000, tokens)
            for tokens in (64, 128, 256, 512, 1024, 2048, 4096)
            for batch_size in (16, 64, 128, 256)
        ),
        *(
            ProfilePoint("split", sms, batch_size, 1000, tokens)
            for sms in decode_sms
            for batch_size, tokens in ((64, 2048), (256, 2048), (64, 8192), (16, 512))
        ),
    ]
    held_back = [
        ProfilePoint("decode", None, 96, 1500),
        ProfilePoint("decode", None, 16, 600),
        *(ProfilePoint("decode", sms, 96, 1500) for sms in decode_sms),
        ProfilePoint("prefill", tokens=1536),
        ProfilePoint("prefill", tokens=3000, cached_tokens=2000),
        ProfilePoint("mixed", None, 96, 1000, 768),
        ProfilePoint("mixed", None, 192, 1500, 384),
        *(ProfilePoint("split", sms, 96, 1200, 2048) for sms in decode_sms),
    ]
    points, points_held_back = (
        {
            point: [tuple(ms * (1 + factor.uniform(-noise, noise)) for ms in _times_ms(point))]
            for point in wanted
            if mixed or point.kind != "mixed"
        }
        for wanted in (grid, held_back)
    )
    provenance = {"driver_version": "580.159.04", "note": "made by formulas, for tests"}
    return PerfTable(key, points, points_held_back, provenance)


def interrupted_table() -> PerfTable:
    """A profile that has measured decode only."""
    table = h200_table()
    decode = {point: repeats for point, repeats in table.points.items() if point.kind == "decode"}
    return replace(table, points=decode, held_back={}, complete=False)


def _times_ms(point: ProfilePoint) -> tuple[float, ...]:
    decode = (point.batch_size, point.context_tokens)
    if point.kind == "decode":
        return (decode_ms(*decode, point.sms),)
    if point.kind == "prefill":
        return (prefill_ms(point.tokens, point.cached_tokens, point.sms),)
    return (mixed_ms(point.tokens, *decode),) if point.sms is None else split_ms(point.sms, *decode, point.tokens)


def _step_ms(batch_size: int) -> float:
    index = min(max(bisect_left(_STEP_MS, (batch_size,)), 1), len(_STEP_MS) - 1)
    (low, low_ms), (high, high_ms) = _STEP_MS[index - 1 : index + 1]
    return low_ms + (high_ms - low_ms) * (batch_size - low) / (high - low)


def _rows_ms(rows: int) -> float:
    """The forward's matrix products; a few rows cost what reading the weights costs."""
    return max(5.0, 2.0 + rows * _ROW_MS)
