"""FlashInfer's tensor-core decode and the Triton kernels on one batch: a case of ``decode_attention.py``."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from bench.kernels.decode_inputs import DEVICE, DTYPE, Cache, Int32Array, lengths, scattered_blocks
from bench.kernels.graph_timing import us_per_layer
from bullet_graph.kernels import flashinfer_attention
from bullet_graph.kernels.decode_attention import (
    DecodeBatch,
    DecodeKernelSettings,
    TritonDecodeAttention,
)
from bullet_graph.kernels.flashinfer_attention import AttentionLane, PagedBatch
from bullet_graph.kernels.shapes import prefill_workspace_bytes
from bullet_graph.models.config import ModelConfig

MAX_ROWS = 256
HND_LAYOUT = 1


def paged_batch(kv_lens: Int32Array, num_blocks: int, block_tokens: int, rows_each: int = 1) -> PagedBatch:
    """What kernels are told of a batch.

    Args:
        kv_lens: tokens that each sequence attends to.
        num_blocks: that the cache holds.
        block_tokens: of a block.
        rows_each: query rows of a sequence, its last tokens; decode rows are alone.
    """
    indptr, indices = scattered_blocks(kv_lens, num_blocks, block_tokens)
    q_indptr = torch.arange(len(kv_lens) + 1, dtype=torch.int32) * rows_each
    return PagedBatch(
        q_indptr=q_indptr.to(DEVICE),
        kv_indptr=torch.from_numpy(indptr).to(DEVICE),
        kv_indices=torch.from_numpy(indices).to(DEVICE),
        last_block_tokens=torch.from_numpy((kv_lens - 1) % block_tokens + 1).to(DEVICE),
        host_q_indptr=q_indptr,
        host_kv_indptr=torch.from_numpy(indptr),
        host_kv_lens=torch.from_numpy(kv_lens),
        num_rows=int(q_indptr[-1]),
    )


def decode_batch(paged: PagedBatch) -> DecodeBatch:
    """The same for the Triton kernels, whose rows are alone."""
    return DecodeBatch(paged.kv_indptr, paged.kv_indices, paged.last_block_tokens)


@dataclass
class Bench:
    """One model's cache and both kinds of kernels."""

    config: ModelConfig
    cache: Cache
    hnd: bool
    num_sms: int
    num_layers: int
    overlap: bool

    def __post_init__(self) -> None:
        self.flashinfer = AttentionLane(
            self.config,
            self.cache,  # type: ignore[arg-type]
            dtype=DTYPE,
            backend="fa2",
            causal=False,
            float_workspace=torch.zeros(
                prefill_workspace_bytes(self.config), dtype=torch.uint8, device=DEVICE
            ),
        )
        self.triton_cache = self.cache.turned() if self.hnd else self.cache
        self.lanes: dict[DecodeKernelSettings, TritonDecodeAttention] = {}

    def lane(self, settings: DecodeKernelSettings) -> TritonDecodeAttention:
        if settings not in self.lanes:
            self.lanes[settings] = TritonDecodeAttention(
                self.config,
                self.triton_cache,  # type: ignore[arg-type]
                max_rows=MAX_ROWS,
                num_sms=self.num_sms,
                settings=settings,
                overlap_launches=self.overlap,
            )
        return self.lanes[settings]

    def case(
        self,
        shape: tuple[int, int, bool],
        kernels: list[DecodeKernelSettings],
        num_sms: int,
        stream: torch.cuda.Stream,
    ) -> dict[str, Any]:
        kv_lens = lengths(*shape)
        batch = paged_batch(kv_lens, len(self.cache.layer(0)[0]), self.cache.block_tokens)
        num_bytes = int(kv_lens.sum()) * 2 * self.config.kv_size * DTYPE.itemsize
        q = torch.randn(len(kv_lens), self.config.num_heads, self.config.head_dim, device=DEVICE).to(DTYPE)
        expected, out = torch.empty_like(q), torch.empty_like(q)
        layout = HND_LAYOUT if self.hnd else flashinfer_attention._NHD_LAYOUT

        def timed(run_layer: Callable[[int], None]) -> dict[str, float]:
            us = us_per_layer(run_layer, self.num_layers, stream)
            return {"us_per_layer": us, "gb_per_s": num_bytes / us / 1e3}

        def flashinfer_timed() -> dict[str, float]:
            # Planned on the stream that runs it, whose copy it waits for.
            with torch.cuda.stream(stream):
                planned = self.flashinfer.plan(batch, captured=True, num_sms=num_sms)
            return timed(lambda layer: planned.run_into(layer, q, expected))

        results: list[dict[str, Any]] = []
        with mock.patch.object(flashinfer_attention, "_NHD_LAYOUT", layout):
            before = flashinfer_timed()
            for settings in kernels:
                plan = self.lane(settings).plan(decode_batch(batch), num_sms=num_sms)
                row: dict[str, Any] = {"settings": dataclasses.asdict(settings)}
                out.fill_(float("nan"))
                try:
                    row |= timed(lambda layer, plan=plan: plan.run_into(layer, q, out))  # type: ignore[misc]
                except OutOfResources as error:
                    row["error"] = str(error)
                else:
                    difference = (out.float() - expected.float()).norm() / expected.float().norm()
                    row["relative_error"] = float(difference)
                results.append(row)
            after = flashinfer_timed()
        return {
            "rows": shape[0],
            "context": shape[1],
            "lognormal": shape[2],
            "tokens": int(kv_lens.sum()),
            "num_sms": num_sms,
            "layout": "HND" if self.hnd else "NHD",
            "block_tokens": self.cache.block_tokens,
            "flashinfer": before,
            "flashinfer_after": after,
            "triton": results,
        }
