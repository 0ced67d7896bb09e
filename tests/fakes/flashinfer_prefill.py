"""FlashInfer's prefill modules in plain torch, with the arguments of release 0.6.12.

As there, a plan lies in the integer workspace that it was made with, until another is made in it. fa3's kernels find
all of a batch in the plan; fa2's read ``indptr`` and the last page's length from the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bullet_graph.kernels import flashinfer_attention, memory
from bullet_graph.kernels.fp8 import FP8
from bullet_graph.kernels.gpu import Gpu

Runs = list[tuple[str, str, int]]
"""(backend, kind, number of sequences)."""


@dataclass(frozen=True)
class _Plan:
    q_indptr: list[int]
    kv_indptr: list[int]
    kv_lens: list[int]
    window_left: int


class FakeModule:
    """What ``tvm_ffi.load_module`` gives: functions without names or defaults of arguments."""

    def __init__(self, spec: flashinfer_attention.ModuleSpec, runs: Runs) -> None:
        self._backend = spec.backend
        self._settings = _SETTINGS["fa3 fp8" if spec.fp8_q else spec.backend]
        self._windowed = spec.windowed
        self._fp8_kv = spec.fp8_kv
        self._fp8_q = spec.fp8_q
        assert spec.fp8_q == (spec.fp8_kv and spec.backend == "fa3"), "fa3 reads FP8 keys only for FP8 queries"
        self._plans: dict[int, _Plan] = {}
        self.runs = runs

    def _scale(self, settings: Sequence[object], window_left: int) -> float:
        """The scale of the scores; the window is the plan's, and all else must be off, in the kind it is told in."""
        expected = [window_left if told == "window" else told for told in self._settings]
        (scale,) = (value for value, told in zip(settings, expected, strict=True) if told == "scale")
        for value, told in zip(settings, expected, strict=True):
            assert told == "scale" or (type(value), value) == (type(told), told)
        assert isinstance(scale, float)
        return scale

    def plan(self, *arguments: Any) -> list[int]:
        _, workspace, page_locked, qo_indptr, kv_indptr, kv_lens, num_rows, batch_size, *others = arguments
        num_qo_heads, num_kv_heads, page_size, enable_cuda_graph, head_dim_qk, head_dim_vo, *others = others
        causal, window_left, *fa2_only = others
        if self._backend == "fa2":
            fixed_split_size, disable_split_kv, num_colocated_ctas = fa2_only
            assert (fixed_split_size, disable_split_kv) == (-1, False)
            assert isinstance(num_colocated_ctas, int)
        else:
            assert not fa2_only
        assert len(page_locked) >= len(workspace) > 0
        for array in (qo_indptr, kv_indptr, kv_lens):
            assert array.dtype == torch.int32
            assert array.is_contiguous()
        assert batch_size == len(kv_lens) == len(qo_indptr) - 1 == len(kv_indptr) - 1
        assert num_rows == int(qo_indptr[-1] - qo_indptr[0])
        assert num_qo_heads % num_kv_heads == 0 < page_size
        assert head_dim_qk == head_dim_vo
        assert (enable_cuda_graph, causal) == (False, True)
        assert (window_left >= 0) is self._windowed, "a module masks what it was compiled for"
        plan = _Plan(qo_indptr.tolist(), kv_indptr.tolist(), kv_lens.tolist(), window_left)
        self._plans[workspace.data_ptr()] = plan
        return [0] * 9

    def ragged_run(self, *arguments: Any) -> None:
        _, workspace, _, q, k, v, qo_indptr, kv_indptr, o, *settings = arguments
        for tensor in (k, v):
            # What TMA asks for.
            assert tensor.stride(-1) == 1
            assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
            assert tensor.data_ptr() % 16 == 0
        plan = self._plans[workspace.data_ptr()]
        sm_scale = self._scale(settings, plan.window_left)
        starts, kv_starts = plan.q_indptr, plan.kv_indptr
        assert qo_indptr.tolist() == starts
        assert kv_indptr.tolist() == kv_starts
        self.runs.append((self._backend, "ragged", len(plan.kv_lens)))
        for i, kv_len in enumerate(plan.kv_lens):
            kv = slice(kv_starts[i], kv_starts[i] + kv_len)
            _attend(q, k[kv], v[kv], o, slice(starts[i], starts[i + 1]), sm_scale, plan.window_left)

    def paged_run(self, *arguments: Any) -> None:
        _, workspace, _, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, *others = arguments
        last_page_len, o, *settings = others
        plan = self._plans[workspace.data_ptr()]
        sm_scale = self._scale(settings, plan.window_left)
        page_tokens = k_cache.shape[1]
        if self._backend == "fa2":
            starts, pages = qo_indptr.tolist(), kv_indptr.tolist()
            assert (kv_indptr.diff() * page_tokens - page_tokens + last_page_len).tolist() == plan.kv_lens
        else:
            starts, pages = plan.q_indptr, plan.kv_indptr
        self.runs.append((self._backend, "paged", len(plan.kv_lens)))
        for i, kv_len in enumerate(plan.kv_lens):
            blocks = kv_indices[pages[i] :][: -(-kv_len // page_tokens)].long()
            assert (k_cache.dtype is FP8) == (v_cache.dtype is FP8) == self._fp8_kv
            assert (q.dtype is FP8) == self._fp8_q
            k, v = (cache[blocks].flatten(0, 1)[:kv_len].to(o.dtype) for cache in (k_cache, v_cache))
            _attend(q.to(o.dtype), k, v, o, slice(starts[i], starts[i + 1]), sm_scale, plan.window_left)


_COMMON = (None, 1, 0, "window", True)  # the numbers: causal, NHD
"""No log-sum-exp, the mask, the layout, the window, programmatic dependent launch."""
_SETTINGS: dict[str, tuple[object, ...]] = {
    # No custom mask, ALiBi, multi-item scoring nor cache in four bits; no soft cap, the scale, RoPE's reciprocals.
    "fa2": (*_COMMON, *[None] * 8, 0.0, "scale", 1.0, 1e-4, 0),
    # No multi-item scoring nor scales of values; no soft cap, the scale.
    "fa3": (*_COMMON, *[None] * 4, 0.0, "scale", 1.0, 0),
    # No scales of heads; the scale, no scales of all queries, keys and values.
    "fa3 fp8": (*_COMMON, *[None] * 3, "scale", 1.0, 1.0, 1.0),
}
"""What FlashInfer's wrappers pass where nothing else is asked for."""


def _attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor, rows: slice, scale: float, window_left: int) -> None:
    """One sequence, whose rows are the last of its tokens."""
    count = rows.stop - rows.start
    mask = torch.ones(count, len(k), dtype=torch.bool).tril(len(k) - count)
    if window_left >= 0:
        mask = mask.triu(len(k) - count - window_left)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q[rows], k, v))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    o[rows] = attended[0].transpose(0, 1)


class PlainRing:
    """One buffer: on the CPU, copies have ended when they return."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def buffer(self) -> Iterator[torch.Tensor]:
        yield self._buffer


def install(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Put these modules in place of FlashInfer's, on the CPU as a Hopper of four SMs; returns what they have run."""
    found: Runs = []
    monkeypatch.setattr(flashinfer_attention, "load_module", lambda spec: FakeModule(spec, found))
    for module in (flashinfer_attention, memory):
        monkeypatch.setattr(module, "PinnedRing", PlainRing)
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    # Triton's interpreter has no programmatic dependent launch.
    monkeypatch.setattr(Gpu, "overlaps_launches", False)
    return found
