"""The forward can stop and resume between any two layers."""

from dataclasses import dataclass

import pytest
import torch

from bullet_graph.kernels.attention import ReferenceAttention
from bullet_graph.kernels.memory import KVCache
from bullet_graph.kernels.ops import TorchOps
from bullet_graph.models.decoder import Decoder, Hidden, SampledRows, cos_sin_table
from bullet_graph.models.layers import eager_functions
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.weights import dummy_weights

CONFIG = PRESETS["tiny"]
CPU = torch.device("cpu")
ROWS = 9


@dataclass(frozen=True)
class Forward:
    """One prompt of nine tokens in two blocks of a fresh cache."""

    decoder: Decoder
    attention: ReferenceAttention

    @classmethod
    def new(cls) -> "Forward":
        cache = KVCache(CONFIG, num_blocks=4, block_tokens=8, dtype=torch.float32, device=CPU)
        weights = dummy_weights(CONFIG, dtype=torch.float32, device=CPU, seed=2)
        attention = ReferenceAttention(
            cache, q_indptr=[0, ROWS], kv_lens=[ROWS], kv_indptr=[0, 2], kv_indices=torch.tensor([3, 1])
        )
        return cls(Decoder(CONFIG, weights, cache, cos_sin_table(CONFIG, 32, CPU)), attention)

    def start(self) -> Hidden:
        return self.decoder.embed(torch.arange(ROWS) * 7)

    def run(self, hidden: Hidden, first: int, last: int | None, sampled: SampledRows | None = None) -> Hidden:
        positions = torch.arange(ROWS)
        kv_slots = torch.where(positions < 8, 24 + positions, positions)
        functions = eager_functions(TorchOps())
        return self.decoder.run_layers(
            hidden,
            positions,
            kv_slots,
            self.attention,
            functions,
            first=first,
            last=last,
            sampled=sampled,
        )

    def logits(self, hidden: Hidden) -> torch.Tensor:
        return self.decoder.logits(hidden, TorchOps())

    def assert_same_cache(self, other: "Forward") -> None:
        for layer in range(CONFIG.num_layers):
            for ours, theirs in zip(
                self.decoder.cache.layer(layer), other.decoder.cache.layer(layer), strict=True
            ):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]])
@torch.inference_mode()
def test_layer_ranges_add_up_to_the_whole(cuts: list[int]) -> None:
    whole, sliced = Forward.new(), Forward.new()
    expected = whole.logits(whole.run(whole.start(), 0, None))
    hidden = sliced.start()
    for first, last in zip([0, *cuts], [*cuts, None], strict=True):
        hidden = sliced.run(hidden, first, last)
    assert torch.equal(sliced.logits(hidden), expected)
    sliced.assert_same_cache(whole)


@pytest.mark.parametrize("cuts", [[], [1, 3], [CONFIG.num_layers - 1]])
@torch.inference_mode()
def test_the_last_layer_gives_the_sampled_rows_alone(cuts: list[int]) -> None:
    whole, pruned = Forward.new(), Forward.new()
    expected = whole.logits(whole.run(whole.start(), 0, None))[-1:]
    attention = ReferenceAttention(
        pruned.decoder.cache,
        q_indptr=[0, 1],
        kv_lens=[ROWS],
        kv_indptr=[0, 2],
        kv_indices=torch.tensor([3, 1]),
    )
    hidden = pruned.start()
    for first, last in zip([0, *cuts], [*cuts, None], strict=True):
        hidden = pruned.run(hidden, first, last, SampledRows(torch.tensor([ROWS - 1]), attention))
    logits = pruned.logits(hidden)
    assert logits.shape == (1, CONFIG.vocab_size)
    torch.testing.assert_close(logits, expected)
    pruned.assert_same_cache(whole)


@torch.inference_mode()
def test_a_forward_that_samples_nothing_still_fills_the_cache() -> None:
    whole, pruned = Forward.new(), Forward.new()
    whole.run(whole.start(), 0, None)
    hidden = pruned.run(
        pruned.start(), 0, None, SampledRows(torch.empty(0, dtype=torch.long), attention=None)
    )
    assert pruned.logits(hidden).shape == (0, CONFIG.vocab_size)
    pruned.assert_same_cache(whole)
