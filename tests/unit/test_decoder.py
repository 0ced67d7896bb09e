"""The forward can stop and resume between any two layers."""

from dataclasses import dataclass

import pytest
import torch

from bullet_graph.models.attention import ReferenceAttention
from bullet_graph.models.decoder import Decoder, Hidden, eager_functions
from bullet_graph.models.kv_cache import KVCache
from bullet_graph.models.loader import dummy_weights
from bullet_graph.models.ops import TorchOps
from bullet_graph.models.presets import PRESETS
from bullet_graph.models.rope import cos_sin_table

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

    def run(self, hidden: Hidden, first: int, last: int | None) -> Hidden:
        positions = torch.arange(ROWS)
        kv_slots = torch.where(positions < 8, 24 + positions, positions)
        functions = eager_functions(TorchOps())
        return self.decoder.run_layers(
            hidden, positions, kv_slots, self.attention, functions, first=first, last=last
        )

    def logits(self, hidden: Hidden, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.decoder.logits(hidden, rows, TorchOps())


@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]])
@torch.inference_mode()
def test_layer_ranges_add_up_to_the_whole(cuts: list[int]) -> None:
    whole, sliced = Forward.new(), Forward.new()
    expected = whole.logits(whole.run(whole.start(), 0, None))
    hidden = sliced.start()
    for first, last in zip([0, *cuts], [*cuts, None], strict=True):
        hidden = sliced.run(hidden, first, last)
    assert torch.equal(sliced.logits(hidden), expected)
    for layer in range(CONFIG.num_layers):
        for ours, theirs in zip(
            sliced.decoder.cache.layer(layer), whole.decoder.cache.layer(layer), strict=True
        ):
            assert torch.equal(ours, theirs)


@torch.inference_mode()
def test_logits_of_chosen_rows_are_those_of_all_rows() -> None:
    forward = Forward.new()
    hidden = forward.run(forward.start(), 0, None)
    rows = torch.tensor([8, 0])
    torch.testing.assert_close(forward.logits(hidden, rows), forward.logits(hidden)[rows])
