"""The forward is the same whole, in ranges of layers, for sampled rows alone, and in pieces between attentions."""

from unittest.mock import Mock

import pytest
import torch
from decoders import VARIANTS, new_decoder

from bullet_graph.graphs.piecewise import PiecewiseForward, PiecewiseGraphs
from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.decoder import Decoder, Hidden, SampledRows
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.runtime.memory import piecewise_scratch_bytes

CONFIG = PRESETS["tiny"]
ROWS, BLOCK_TOKENS = 9, 8
BLOCKS = torch.tensor([3, 1])
POSITIONS = torch.arange(ROWS)
TOKEN_IDS = POSITIONS * 7
KV_SLOTS = BLOCKS[POSITIONS // BLOCK_TOKENS] * BLOCK_TOKENS + POSITIONS % BLOCK_TOKENS
FUNCTIONS = eager_functions(TorchOps())


def fresh_decoder(config: ModelConfig = CONFIG) -> Decoder:
    return new_decoder(config, num_blocks=4, block_tokens=BLOCK_TOKENS)


def attention_of(decoder: Decoder, first_row: int = 0) -> ReferenceAttention:
    """Of one prompt's rows from ``first_row`` on."""
    return ReferenceAttention(
        decoder.cache, q_indptr=[0, ROWS - first_row], kv_lens=[ROWS], kv_indptr=[0, 2], kv_indices=BLOCKS
    )


def last_row(decoder: Decoder) -> SampledRows:
    return SampledRows(torch.tensor([ROWS - 1]), attention_of(decoder, ROWS - 1))


def run(decoder: Decoder, cuts: tuple[int, ...] = (), sampled: SampledRows | None = None) -> Hidden:
    """The prompt's forward, in ranges of layers that end at ``cuts``."""
    hidden = decoder.embed(TOKEN_IDS, TorchOps())
    for first, last in zip((0, *cuts), (*cuts, None), strict=True):
        batch = POSITIONS, KV_SLOTS, attention_of(decoder), FUNCTIONS
        hidden = decoder.run_layers(hidden, *batch, first=first, last=last, sampled=sampled)
    return hidden


def logits(decoder: Decoder, hidden: Hidden) -> torch.Tensor:
    return decoder.logits(hidden, TorchOps())


def assert_same_cache(one: Decoder, other: Decoder, *, exactly: bool = True) -> None:
    """But for the padding block, which padding leaves its trace in."""
    for layer in range(CONFIG.num_layers):
        for ours, theirs in zip(one.cache.layer(layer), other.cache.layer(layer), strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], **({"rtol": 0, "atol": 0} if exactly else {}))


# ---- ranges of layers, and sampled rows ----


@pytest.mark.parametrize("cuts", [(2,), (1, 3), (1, 2, 3)])
@torch.inference_mode()
def test_layer_ranges_add_up_to_the_whole(cuts: tuple[int, ...]) -> None:
    whole, sliced = fresh_decoder(), fresh_decoder()
    assert torch.equal(logits(sliced, run(sliced, cuts)), logits(whole, run(whole)))
    assert_same_cache(sliced, whole)


@pytest.mark.parametrize("cuts", [(), (1, 3), (CONFIG.num_layers - 1,)])
@torch.inference_mode()
def test_the_last_layer_gives_the_sampled_rows_alone(cuts: tuple[int, ...]) -> None:
    whole, pruned = fresh_decoder(), fresh_decoder()
    found = logits(pruned, run(pruned, cuts, last_row(pruned)))
    assert found.shape == (1, CONFIG.vocab_size)
    torch.testing.assert_close(found, logits(whole, run(whole))[-1:])
    assert_same_cache(pruned, whole)


@torch.inference_mode()
def test_a_forward_that_samples_nothing_still_fills_the_cache() -> None:
    whole, pruned = fresh_decoder(), fresh_decoder()
    run(whole)
    nothing = SampledRows(torch.empty(0, dtype=torch.long), attention=None)
    assert logits(pruned, run(pruned, sampled=nothing)).shape == (0, CONFIG.vocab_size)
    assert_same_cache(pruned, whole)


# ---- pieces between attentions ----


@pytest.mark.parametrize("bucket", [ROWS, 16])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_pieces_and_attentions_make_the_forward(variant: str, bucket: int) -> None:
    config = VARIANTS[variant]
    whole, cut = fresh_decoder(config), fresh_decoder(config)
    expected = logits(whole, run(whole))[-1:]
    pieces = PiecewiseForward(cut, TorchOps(), max_rows=32)
    padding = torch.zeros(bucket - ROWS, dtype=torch.long)
    attention = attention_of(cut)
    for _ in range(2):  # the second time over what the first left in the buffers
        pieces.load(cut.embed(TOKEN_IDS, TorchOps()), torch.cat((POSITIONS, padding)), torch.cat((KV_SLOTS, padding)))
        for layer in range(CONFIG.num_layers):
            pieces.run(layer, bucket)
            if layer < CONFIG.num_layers - 1:
                rows = pieces.rows(ROWS)
                pieces.attended[:ROWS] = attention.run(layer, rows).view_as(rows.q)
                for own, cached in zip((rows.k, rows.v), cut.cache.layer(layer), strict=True):
                    assert torch.equal(own, cached.flatten(0, 1)[KV_SLOTS])
        hidden = cut.finish_last_layer(pieces.rows(ROWS), pieces.residual[:ROWS], last_row(cut), FUNCTIONS)
        torch.testing.assert_close(logits(cut, hidden), expected)
    assert_same_cache(cut, whole, exactly=False)


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_ledger_counts_what_pieces_take(rows: int) -> None:
    pieces = PiecewiseForward(fresh_decoder(), TorchOps(), max_rows=rows)
    buffers = [value for value in vars(pieces).values() if isinstance(value, torch.Tensor)]
    assert len(buffers) == 7
    held = sum(buffer.nbytes for buffer in buffers)
    # Beside them, three of hidden size, and gate, up and their product.
    results = rows * 4 * 3 * (CONFIG.hidden_size + CONFIG.intermediate_size)
    assert piecewise_scratch_bytes(CONFIG, rows, dtype_bytes=4) == held + results


@torch.inference_mode()
def test_captures_and_timings_leave_the_cache_of_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may capture while it serves: the buffers then hold where its last forward's rows are."""
    decoder = fresh_decoder()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = PiecewiseGraphs(decoder, TorchOps(), buckets=(16,))
    pieces = graphs.pieces
    # On the CPU there is nothing to record: what is captured runs.
    graph = Mock(replay=lambda: pieces.run(CONFIG.num_layers - 1, 16))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Mock(elapsed_time=lambda _: 1.0))

    def load() -> None:
        pieces.load(decoder.embed(POSITIONS, TorchOps()), POSITIONS, KV_SLOTS)
        pieces.attended.fill_(1.0)

    load()
    pieces.run(0, ROWS)
    before = [half.clone() for layer in range(CONFIG.num_layers) for half in decoder.cache.layer(layer)]
    assert before[0].any()
    for layer in range(CONFIG.num_layers):
        graphs.capture_piece(16, layer)
    load()
    graphs.time_next()
    after = [half for layer in range(CONFIG.num_layers) for half in decoder.cache.layer(layer)]
    assert all(torch.equal(old[1:], new[1:]) for old, new in zip(before, after, strict=True))


def test_the_scale_of_embeddings_is_rounded_as_in_training() -> None:
    decoder = new_decoder(VARIANTS["gemma3"], num_blocks=4, dtype=torch.bfloat16)
    scale = torch.tensor(11.3, dtype=torch.bfloat16)
    assert torch.equal(decoder.embed(TOKEN_IDS, TorchOps()).x, decoder.weights.embed[TOKEN_IDS] * scale)
