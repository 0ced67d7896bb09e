"""Builds an entry of a capture cache: a start that keeps what it compiles and measures."""

import dataclasses
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bullet_graph.captures.manifest import Manifest, entry_id, list_files
from bullet_graph.captures.store import FILES_NAME, CaptureStore, Entry
from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.errors import io_errors
from bullet_graph.graphs.compile_counts import CompileCounter, CompileCounts
from bullet_graph.kernels.communicator import on_all_ranks
from bullet_graph.kernels.flashinfer_attention import needed_modules
from bullet_graph.kernels.gpu import Gpu
from bullet_graph.partition import offsets
from bullet_graph.partition.masks import LANES, Lane
from bullet_graph.partition.smctrl import identify_driver
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.table import read_table
from bullet_graph.runtime import capture_cache
from bullet_graph.runtime.build import Start, build_executor, entry_plan
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.fingerprint import fingerprint_of
from bullet_graph.runtime.performance import ROOFLINE, find_performance, table_file
from bullet_graph.runtime.resolve import Runtime, resolve
from bullet_graph.runtime.rows import Chunk, make_batches
from bullet_graph.runtime.self_check import SEED, STEPS, SelfCheckPoint
from bullet_graph.runtime.step import Placement, SlotInit, Step
from bullet_graph.runtime.tensor_parallel import agreed, of_rank, other_ranks


def build_entry(
    config: EngineConfig, store: CaptureStore, *, progress: bool, tell: Callable[[str], None]
) -> tuple[Entry, CompileCounts | None]:
    """Build the entry that an engine of this configuration starts from; tells a line when it waits for another builder.

    Each rank of tensor parallelism builds its own, and rank 0's is returned. The configuration's ``capture_cache``,
    ``self_check`` and ``ready`` are ignored: all batch sizes are checked.
    Returns the entry, and what was compiled for it; None where it was finished before.

    Raises CacheError where the store cannot be written, or what was compiled does not compute the model, and any error
    of an engine of this configuration.
    """
    runtime = resolve(config)
    if config.tensor_parallel_size == 1:
        return build_for_rank(config, runtime, store, lambda: Start(progress=progress), tell=tell)
    with other_ranks(config, runtime, lambda other: ("build", config, other, store.root)) as ranks:

        def start() -> Start:
            ranks.connect(runtime.device)
            return Start(progress=progress, agree=partial(agreed, ranks), communicators=ranks.communicators)

        built = build_for_rank(config, of_rank(config, runtime, 0), store, start, tell=tell)
        ranks.gather("built")
        return built


def build_for_rank(
    config: EngineConfig,
    runtime: Runtime,
    store: CaptureStore,
    connect: Callable[[], Start],
    *,
    tell: Callable[[str], None],
) -> tuple[Entry, CompileCounts | None]:
    """As :func:`build_entry`, on one rank; rank 0 connects to the others once no other process builds its entry."""
    start_s = time.perf_counter()
    # On the CPU, only compiled layers are worth keeping.
    is_gpu = runtime.device.type == "cuda"
    config = dataclasses.replace(
        config, capture_cache=None, self_check="sample", ready="all", compile=config.compile or not is_gpu
    )
    here, plan = needed_entry(config, runtime, store)
    name = entry_id(here, plan)
    with store.building(name, tell=tell) as staged:
        start, there = connect(), store.whole(name)
        is_everywhere = on_all_ranks(start.communicators, there is not None, runtime.device)
        if there is not None and is_everywhere:
            return there, None
        compiles, points = _fill(staged / FILES_NAME, config, runtime, start)
        checked = None
        if points:
            errors = {str(point.batch_size): point.relative_error for point in points}
            checked = {"seed": SEED, "steps": STEPS, "tolerance": points[0].tolerance, "relative_error": errors}
        manifest = Manifest(
            fingerprint=here,
            plan=plan,
            files=list_files(staged / FILES_NAME),
            self_check=checked,
            created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
            build_seconds=time.perf_counter() - start_s,
            provenance=dataclasses.asdict(collect_provenance(runtime.device)),
        )
        return store.place(manifest, staged), compiles


def needed_entry(config: EngineConfig, runtime: Runtime, store: CaptureStore) -> tuple[dict[str, str], dict[str, Any]]:
    """The fingerprint and the plan of the entry that an engine of this configuration, or a rank of it, starts from."""
    cached_table = partial(capture_cache.cached_perf_table, store, runtime)
    performance = find_performance(config, runtime, cached_table=cached_table)
    return fingerprint_of(runtime), entry_plan(config, runtime, performance)


def _fill(
    files: Path, config: EngineConfig, runtime: Runtime, start: Start
) -> tuple[CompileCounts, tuple[SelfCheckPoint, ...]]:
    """Start an engine that keeps everything in ``files``, and run each kind of forward."""
    is_gpu = runtime.device.type == "cuda"
    captured = capture_cache.CapturedStart(files, is_build=True, self_check="all")
    with tempfile.TemporaryDirectory(prefix="bullet_graph_") as scratch, capture_cache.library_caches(Path(scratch)):
        # Triton's folder lies in the entry, Inductor's is not kept.
        with CompileCounter(gpu=is_gpu) as counter:
            if is_gpu:
                _keep_measured(files, config, runtime)
                keep_attention(files, runtime)
            built = build_executor(config, runtime, dataclasses.replace(start, captured=captured))
            try:
                exercise(
                    built.executor,
                    max_rows=config.max_forward_rows,
                    max_num_seqs=config.max_num_seqs,
                    max_model_len=runtime.max_model_len,
                    num_kv_blocks=built.memory.num_kv_blocks,
                )
                rows: tuple[int, ...] = getattr(built.executor, "row_buckets", ())
            finally:
                built.executor.shutdown()
        with io_errors("cannot write into the capture cache"):
            if is_gpu:
                capture_cache.copy_kernels(Path(scratch) / capture_cache.TRITON, files / capture_cache.TRITON)
            if built.capture is not None:
                (files / capture_cache.MEASURED).write_text(json.dumps({"piecewise_rows": rows}) + "\n")
    return counter.counts, captured.use.self_check


def _keep_measured(files: Path, config: EngineConfig, runtime: Runtime) -> None:
    """Keep the performance table that such an engine predicts from, and this driver's SM-mask offset, if known."""
    with io_errors("cannot write into the capture cache"):
        table = None if config.perf_table == ROOFLINE else table_file(config, runtime)
        if table is not None:
            read_table(table)
            shutil.copyfile(table, files / capture_cache.PERF_TABLE)
        driver = identify_driver()
        trusted = offsets.find(driver)
        if trusted is not None:
            offsets.remember(driver, trusted.offset, files / capture_cache.MASK_OFFSET)


def keep_attention(files: Path, runtime: Runtime) -> None:
    """Keep FlashInfer's modules, which FlashInfer builds or has in its own folder."""
    for module in needed_modules(Gpu.of(runtime.device), runtime.dtype, runtime.model):
        library = module.build()
        target = files / capture_cache.library_name(module)
        with io_errors("cannot write into the capture cache"):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(library, target)


# ---- forwards of each kind ----

# Triton compiles a kernel anew where a number is 1 or a multiple of 16, and where an address is a multiple of 16 bytes.
# So each forward that a lane may be given is run with rows, sequences and blocks of each such kind.

PROMPT_TOKENS = (1, 2, 5, 16, 100, 128, 1000, 1024, 2048)
"""Lengths of prompts alone: one, odd, multiples of 16, longer than a large model's piecewise graphs."""

MIXED_PROMPTS = (1, 2, 3, 4)
"""Number of prompts beside decode rows: it decides how the decode rows' arrays are aligned."""

MIXED_TOKENS = (16, 20)
"""Their lengths: one block and two."""

DECODE_ROWS = (1, 3, 16, 100, 128)

_POSITION = 5
"""Position of decode rows; any will do."""


def exercise(executor: Executor, *, max_rows: int, max_num_seqs: int, max_model_len: int, num_kv_blocks: int) -> None:
    """Launch every kind of step that fits, so that kernels which no start needs are compiled.

    ``num_kv_blocks`` includes that of padding.
    """
    # Block 0 is that of padding, block 1 the decode rows'.
    room = (num_kv_blocks - 2) * KV_BLOCK_TOKENS
    lanes: tuple[Lane, ...] = LANES if executor.has_prefill_lane else ("decode",)
    for tokens in (tokens for tokens in PROMPT_TOKENS if tokens < min(max_rows, max_model_len, room)):
        # A whole prompt, then its last token as a chunk that goes on.
        for lane, start in itertools.product(lanes, sorted({0, tokens - 1})):
            executor.wait(executor.launch(_step([(start, tokens - start, True)]), Placement(lane)))
    if max_model_len <= max(_POSITION, *MIXED_TOKENS):
        return
    # Decode rows alone, and beside prompts.
    kinds = [(0, 0), *itertools.product(MIXED_PROMPTS, MIXED_TOKENS)]
    for rows, (prompts, tokens) in itertools.product(DECODE_ROWS, kinds):
        fits = prompts + rows <= max_num_seqs and prompts * tokens + rows <= max_rows
        if fits and prompts * _num_blocks(tokens) * KV_BLOCK_TOKENS <= room:
            executor.wait(executor.launch(_step([(0, tokens, True)] * prompts, rows), Placement("decode")))


def _step(chunks: Sequence[Chunk], decode_rows: int = 0) -> Step:
    """Chunks whose prompts lie in blocks from 2 on, and decode rows that share block 1."""
    admitted = tuple(SlotInit(slot, 0.0, 0, 1.0, 0.0, 0, (), 0) for slot in range(len(chunks) + decode_rows))
    num_blocks = sum(_num_blocks(start + tokens) for start, tokens, _ in chunks)
    blocks = np.append(np.arange(2, 2 + num_blocks), [1] * decode_rows)
    return Step(admitted, *make_batches(chunks, [_POSITION] * decode_rows, blocks=blocks), None)


def _num_blocks(tokens: int) -> int:
    return -(-tokens // KV_BLOCK_TOKENS)
