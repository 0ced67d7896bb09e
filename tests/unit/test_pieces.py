"""A forward in pieces is the forward."""

from dataclasses import replace

import pytest
import torch

from bullet_graph.graphs.piecewise import (
    PiecewiseForward,
    PiecewiseGraphs,
    piecewise_buffer_bytes,
    piecewise_scratch_bytes,
)
from bullet_graph.kernels.attention import LayerRows, ReferenceAttention
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, SampledRows, cos_sin_table
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import dummy_weights

CPU = torch.device("cpu")
CONFIG = PRESETS["tiny"]
ROWS = 9
BLOCK_TOKENS = 8
BLOCKS = torch.tensor([3, 1])


def new_decoder(config: ModelConfig) -> Decoder:
    cache = KVCache(config, num_blocks=4, block_tokens=BLOCK_TOKENS, dtype=torch.float32, device=CPU)
    weights = dummy_weights(config, dtype=torch.float32, device=CPU, seed=2)
    return Decoder(config, weights, cache, cos_sin_table(config, 32, CPU))


def attention_of(decoder: Decoder, first_row: int) -> ReferenceAttention:
    """Of one prompt's rows from ``first_row`` on."""
    return ReferenceAttention(
        decoder.cache, q_indptr=[0, ROWS - first_row], kv_lens=[ROWS], kv_indptr=[0, 2], kv_indices=BLOCKS
    )


def kv_slots() -> torch.Tensor:
    positions = torch.arange(ROWS)
    return BLOCKS[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def assert_same_keys(decoder: Decoder, layer: int, rows: LayerRows) -> None:
    """A piece gives the keys and values that it has put into the cache."""
    for own, cached in zip((rows.k, rows.v), decoder.cache.layer(layer), strict=True):
        assert torch.equal(own, cached.flatten(0, 1)[kv_slots()])


@pytest.mark.parametrize("bucket", [ROWS, 16])
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, qkv_bias=True)], ids=["plain", "with bias"])
@torch.inference_mode()
def test_pieces_and_attentions_make_the_forward(config: ModelConfig, bucket: int) -> None:
    whole, cut = new_decoder(config), new_decoder(config)
    functions = eager_functions(TorchOps())
    token_ids = torch.arange(ROWS) * 7
    expected = whole.run_layers(
        whole.embed(token_ids), torch.arange(ROWS), kv_slots(), attention_of(whole, 0), functions
    )

    pieces = PiecewiseForward(cut, TorchOps(), max_rows=32)
    padding = torch.zeros(bucket - ROWS, dtype=torch.long)
    attention = attention_of(cut, 0)
    for _ in range(2):  # the second time over what the first left in the buffers
        pieces.load(
            cut.embed(token_ids),
            torch.cat((torch.arange(ROWS), padding)),
            torch.cat((kv_slots(), padding)),
        )
        for layer in range(CONFIG.num_layers):
            pieces.run(layer, bucket)
            if layer < CONFIG.num_layers - 1:
                rows = pieces.rows(ROWS)
                pieces.attended[:ROWS] = attention.run(layer, rows).view_as(rows.q)
                assert_same_keys(cut, layer, rows)
        hidden = cut.finish_last_layer(
            pieces.rows(ROWS),
            pieces.residual[:ROWS],
            SampledRows(torch.tensor([ROWS - 1]), attention_of(cut, ROWS - 1)),
            functions,
        )
        torch.testing.assert_close(cut.logits(hidden, TorchOps()), whole.logits(expected, TorchOps())[-1:])
    for layer in range(CONFIG.num_layers):
        for ours, theirs in zip(cut.cache.layer(layer), whole.cache.layer(layer), strict=True):
            # Padding leaves its trace in the padding block alone.
            torch.testing.assert_close(ours[1:], theirs[1:])


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_ledger_counts_what_pieces_take(rows: int) -> None:
    pieces = PiecewiseForward(new_decoder(CONFIG), TorchOps(), max_rows=rows)
    buffers = [value for value in vars(pieces).values() if isinstance(value, torch.Tensor)]
    assert len(buffers) == 7
    expected = piecewise_buffer_bytes(CONFIG, rows, dtype_bytes=4)
    assert sum(buffer.nbytes for buffer in buffers) == expected
    # Beside them, three of hidden size, and gate, up and their product.
    results = rows * 4 * 3 * (CONFIG.hidden_size + CONFIG.intermediate_size)
    assert piecewise_scratch_bytes(CONFIG, rows, dtype_bytes=4) == expected + results


class _Graph:
    """On the CPU there is nothing to record: what is captured runs."""

    def capture_begin(self, **_: object) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.pieces.run(CONFIG.num_layers - 1, 16)  # type: ignore[attr-defined]


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: "_Event") -> float:
        return 1.0


@torch.inference_mode()
def test_captures_and_timings_leave_the_cache_of_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may capture while it serves: the buffers then hold where its last forward's rows are."""
    decoder = new_decoder(CONFIG)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = PiecewiseGraphs(decoder, TorchOps(), buckets=(16,))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event())
    monkeypatch.setattr(_Graph, "pieces", graphs.pieces, raising=False)

    def load() -> None:
        graphs.pieces.load(decoder.embed(torch.arange(ROWS)), torch.arange(ROWS), kv_slots())
        graphs.pieces.attended.fill_(1.0)

    load()
    graphs.pieces.run(0, ROWS)
    before = [half.clone() for layer in range(CONFIG.num_layers) for half in decoder.cache.layer(layer)]
    assert before[0].any()
    for layer in range(CONFIG.num_layers):
        graphs.capture_piece(16, layer)
    load()
    graphs.time_ms(16)
    after = [half for layer in range(CONFIG.num_layers) for half in decoder.cache.layer(layer)]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[1:], new[1:])
