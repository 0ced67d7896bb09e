"""Forwards of prefill chunks, decode rows, or both: launched kernel by kernel, short ones in piecewise CUDA graphs."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.graphs.piecewise import PiecewiseGraphs
from bullet_graph.kernels import flashinfer_attention
from bullet_graph.kernels.attention import MixedAttention
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.kernels.decode_attention import DecodeBatch, TritonDecodeAttention, window_indptr
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.kernels.memory import Uploader
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.kernels.shared_blocks import SharedBlocks
from bullet_graph.kernels.triton_ops import TritonOps, sample
from bullet_graph.models.decoder import Decoder, Hidden, SampledRows
from bullet_graph.models.layers import eager_functions
from bullet_graph.runtime.memory import prefill_workspace_bytes
from bullet_graph.runtime.rows import Rows
from bullet_graph.sampling_params import SCORED_ROWS

FEW_FRESH_ROWS = 256
"""Up to this many rows, prompts that begin in a forward share the attention launch of those that continue. A launch of
their own is faster per key, but fills few SMs and adds a start and an end to each layer (bench/LOG.md)."""


@dataclass(frozen=True, slots=True)
class EagerForward:
    """A forward between two of its layers: positions and KV slots of its rows, and s rows that will be sampled.

    ``scored`` are rows, the tokens after them and a number of alternatives; the last layer then computes all rows.

    ``bucket``: rows of the piecewise CUDA graphs that the forward runs in, whose buffers then hold its activations;
    None where it is launched kernel by kernel.
    """

    hidden: Hidden
    positions: Tensor
    kv_slots: Tensor
    attention: MixedAttention
    sampled: SampledRows
    sample_slots: Tensor
    sample_positions: Tensor
    scored: tuple[Tensor, Tensor, int] | None
    bucket: int | None


class EagerLane:
    """Runs forwards eagerly for one lane, in buffers of its own; at most ``max_num_seqs`` rows decode or are sampled.

    ``graphs`` are of this lane alone; None launches every forward kernel by kernel.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: SamplingState,
        *,
        max_num_seqs: int,
        max_rows: int,
        graphs: PiecewiseGraphs | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        config, device = decoder.config, decoder.cos_sin.device
        self._decoder = decoder
        self._state = state
        gpu = Gpu.of(device)
        self._functions = eager_functions(TritonOps(gpu, communicator))
        self._partial_functions = eager_functions(TritonOps(communicator=communicator))
        self._graphs = graphs
        prompt_lane = partial(
            flashinfer_attention.PrefillAttention,
            config,
            decoder.cache,
            # The two run one after the other, so they share their workspace.
            float_workspace=torch.zeros(prefill_workspace_bytes(config), dtype=torch.uint8, device=device),
        )
        dtype = decoder.weights.lm_head.dtype
        self._cached_attention = prompt_lane(modules=flashinfer_attention.cached_modules(gpu, dtype, config))
        fresh = flashinfer_attention.fresh_modules(gpu, dtype, config)
        self._fresh_attention = prompt_lane(modules=fresh) if fresh else None
        # For decode rows in each layer, and for all sampled rows in the last: one after the other.
        self._decode_attention = TritonDecodeAttention(config, decoder.cache, max_rows=max_num_seqs, gpu=gpu)
        # The batch sizes of captured decode steps: for any other size, cuBLAS may choose a kernel that the device must
        # load first, which stalls it for some 45 ms on an H200.
        self._sampled_buckets = batch_size_buckets(max_num_seqs)
        self._windows = decoder.cache.distinct_windows
        # Fourteen arrays with an entry per row or sequence, and two more for each window. Common blocks take 2.5
        # entries per row. Then the block ids, twice for prompts that end; sequences may share blocks. A bucket has at
        # most ``max_rows``, too; scored rows are padded.
        num_arrays = 17 + 2 * len(self._windows)
        most_ids = 2 * max_num_seqs * decoder.most_blocks
        self._uploader = Uploader(num_arrays * (max_rows + SCORED_ROWS) + most_ids, device)

    def run(self, rows: Rows, *, whole_gpu: bool = True) -> tuple[Tensor, Tensor]:
        """Enqueue a whole forward on the current stream; returns as :meth:`finish`."""
        return self.finish(self.run_layers(self.begin(rows, whole_gpu=whole_gpu), whole_gpu=whole_gpu))

    def begin(self, rows: Rows, *, whole_gpu: bool = True) -> EagerForward:
        """Enqueue the inputs of a forward; its buffers are the lane's, so one forward at a time.

        ``whole_gpu``: the stream has all SMs, as piecewise CUDA graphs do, so that the forward may run in them.
        """
        num_rows = len(rows.positions)
        bucket = self._graphs.bucket(num_rows) if whole_gpu and self._graphs is not None else None
        to_score: list[NDArray[np.int32]] = []
        if rows.scored is not None:
            bucket = None
            # Logits of one number of rows: for another, the device might have to load a kernel.
            unscored = -len(rows.scored.rows) % SCORED_ROWS
            to_score = [np.pad(ids, (0, unscored)) for ids in (rows.scored.rows, rows.scored.token_ids)]
        # Padded rows write their keys and values into the first slot of the padding block.
        padding = np.zeros(0 if bucket is None else bucket - num_rows, dtype=np.int32)
        last_block_tokens = (rows.kv_lens - 1) % np.int32(self._decoder.cache.block_tokens) + np.int32(1)
        n = rows.num_prefill
        ended, ended_kv_indptr, ended_kv_indices = rows.ended_prompts()
        # Of prompts that end, then of decode rows.
        window_indptrs = [
            window_indptr(kv_lens, window, self._decoder.cache.block_tokens)
            for kv_lens in (rows.kv_lens[ended], rows.kv_lens[n:])
            for window in self._windows
        ]
        # Of decode rows, whose blocks are numbered from the first one's.
        shared = None
        if len(rows.decode_slots):
            own = rows.kv_indptr[n:] - rows.kv_indptr[n]
            shared = self._decode_attention.shared_blocks(own, rows.kv_indices[rows.kv_indptr[n] :])
        arrays = {
            "token_ids": rows.token_ids,
            "decode_slots": rows.decode_slots,
            "positions": np.concatenate((rows.positions, padding)),
            "kv_slots": np.concatenate((rows.kv_slots, padding)),
            "q_indptr": rows.q_indptr,
            "kv_indptr": rows.kv_indptr,
            "last_block": last_block_tokens,
            "sample_rows": rows.sample_rows,
            "sample_slots": rows.sample_slots,
            "sample_positions": rows.sample_positions,
            "kv_indices": rows.kv_indices,
            "ended_indptr": ended_kv_indptr,
            "ended_indices": ended_kv_indices,
            "ended_last_block": last_block_tokens[ended],
        }
        uploaded = self._uploader.upload(*arrays.values(), *window_indptrs, *(shared or ()), *to_score)
        gpu = SimpleNamespace(**dict(zip(arrays, uploaded, strict=False)))
        windows_and_scored = uploaded[len(arrays) :]
        ended_by_window, decode_by_window = (
            dict(zip(self._windows, windows_and_scored[first:], strict=False)) for first in (0, len(self._windows))
        )
        num_cached = rows.num_continued
        num_fresh_rows = rows.num_prefill_rows - int(rows.q_indptr[num_cached])
        if self._fresh_attention is None or (num_cached and num_fresh_rows <= FEW_FRESH_ROWS):
            num_cached = n
        num_cached_rows = int(rows.q_indptr[num_cached])
        cached = fresh = decode = None
        if num_cached:
            cached = self._cached_attention.plan(
                flashinfer_attention.PagedBatch(
                    q_indptr=gpu.q_indptr[: num_cached + 1],
                    kv_indptr=gpu.kv_indptr[: num_cached + 1],
                    kv_indices=gpu.kv_indices,
                    last_block_tokens=gpu.last_block[:num_cached],
                    host_q_indptr=torch.from_numpy(rows.q_indptr[: num_cached + 1]),
                    host_kv_indptr=torch.from_numpy(rows.kv_indptr[: num_cached + 1]),
                    host_kv_lens=torch.from_numpy(rows.kv_lens[:num_cached]),
                )
            )
        if self._fresh_attention is not None and num_cached < n:
            fresh = self._fresh_attention.plan_ragged(
                gpu.q_indptr[num_cached : n + 1], torch.from_numpy(rows.q_indptr[num_cached : n + 1])
            )
        if len(rows.decode_slots):
            decode = self._decode_attention.plan(
                DecodeBatch(
                    gpu.kv_indptr[n:] - int(rows.kv_indptr[n]),
                    gpu.kv_indices[rows.kv_indptr[n] :],
                    gpu.last_block[n:],
                    decode_by_window,
                    None if shared is None else SharedBlocks(*windows_and_scored[:3]),
                )
            )
        sampled = SampledRows(gpu.sample_rows, None)
        if num_sampled := len(rows.sample_rows):
            last_rows = None
            if len(ended):
                last_rows = self._decode_attention.plan(
                    DecodeBatch(gpu.ended_indptr, gpu.ended_indices, gpu.ended_last_block, ended_by_window)
                )
            sampled = SampledRows(
                gpu.sample_rows,
                MixedAttention(last_rows, None, decode, len(ended), len(ended)),
                bucket_for(num_sampled, self._sampled_buckets) - num_sampled,
            )
        fed_back = self._state.last_token[gpu.decode_slots]
        hidden = self._decoder.embed(torch.cat((gpu.token_ids, fed_back)), self._functions.ops)
        if bucket is not None and self._graphs is not None:
            self._graphs.pieces.load(hidden, gpu.positions, gpu.kv_slots)
        return EagerForward(
            hidden,
            gpu.positions,
            gpu.kv_slots,
            MixedAttention(cached, fresh, decode, num_cached_rows, rows.num_prefill_rows),
            sampled,
            gpu.sample_slots,
            gpu.sample_positions,
            None if rows.scored is None else (*windows_and_scored[-2:], rows.scored.num_logprobs),  # type: ignore[arg-type]
            bucket,
        )

    def run_layers(
        self, forward: EagerForward, first: int = 0, last: int | None = None, *, whole_gpu: bool = True
    ) -> EagerForward:
        """Enqueue layers [first, last) on the current stream; None means to the end."""
        if forward.bucket is not None and self._graphs is not None:
            return self._run_pieces(forward, forward.bucket, self._graphs, first, last)
        hidden = self._decoder.run_layers(
            forward.hidden,
            forward.positions,
            forward.kv_slots,
            forward.attention,
            self._functions if whole_gpu else self._partial_functions,
            first=first,
            last=last,
            sampled=forward.sampled if forward.scored is None else None,
        )
        return dataclasses.replace(forward, hidden=hidden)

    def _run_pieces(
        self, forward: EagerForward, bucket: int, graphs: PiecewiseGraphs, first: int, last: int | None
    ) -> EagerForward:
        num_layers, num_rows = self._decoder.config.num_layers, len(forward.hidden.x)
        pieces, layer_rows = graphs.pieces, graphs.pieces.rows(num_rows)
        attention = forward.attention.bind(layer_rows, pieces.attended[:num_rows])
        for index in range(first, num_layers if last is None else last):
            graphs.replay(index, bucket)
            if index < num_layers - 1:
                attention(index)
                continue
            hidden = self._decoder.finish_last_layer(
                layer_rows, pieces.residual[:num_rows], forward.sampled, self._functions
            )
            return dataclasses.replace(forward, hidden=hidden)
        return forward

    def score(self, forward: EagerForward) -> tuple[Tensor, Tensor, Tensor] | None:
        """Enqueue the log-probabilities of scored rows, before :meth:`finish`: those asked for, then of padding."""
        if forward.scored is None:
            return None
        return self._decoder.score(forward.hidden, *forward.scored, self._functions.ops)

    def finish(self, forward: EagerForward) -> tuple[Tensor, Tensor]:
        """Enqueue output head and sampling; returns logits [s, vocab_size] and token ids [s] of the sampled rows."""
        hidden = forward.hidden if forward.scored is None else forward.hidden.rows(forward.sampled.rows)
        logits = self._decoder.logits(hidden, self._functions.ops)[: len(forward.sample_slots)]
        return logits, sample(logits, forward.sample_slots, forward.sample_positions, self._state)
