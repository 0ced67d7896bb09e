"""The bench of ``bullet-graph profile`` on the CPU, as far as it goes there: the largest forwards that it measures."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from decoders import new_decoder
from fakes.flashinfer_prefill import install

from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.models.presets import PRESETS
from bullet_graph.perf.profile_plan import ProfileLimits, ProfilePoint
from bullet_graph.runtime.bursts import Workbench
from bullet_graph.runtime.rows import lay_out

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")

CPU = torch.device("cpu")
NUM_BLOCKS, MAX_BATCH_SIZE = 16, 4


@torch.inference_mode()
def test_a_prompt_beside_the_most_rows_that_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("synchronize", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    config = replace(PRESETS["tiny"], num_layers=1)
    backend: Any = None
    bench = Workbench(
        new_decoder(config, num_blocks=NUM_BLOCKS, block_tokens=KV_BLOCK_TOKENS),
        backend,
        limits=ProfileLimits(MAX_BATCH_SIZE, 8, 64, NUM_BLOCKS * KV_BLOCK_TOKENS),
        seed=0,
    )
    point = ProfilePoint("mixed", batch_size=MAX_BATCH_SIZE, context_tokens=20, tokens=8, cached_tokens=20)
    logits, _ = bench._eager.run(lay_out(bench._chunk(point), bench._decode_rows(point), KV_BLOCK_TOKENS))
    # All of them are sampled, and one more.
    assert logits.shape == (MAX_BATCH_SIZE + 1, config.vocab_size)
    assert logits.isfinite().all()
