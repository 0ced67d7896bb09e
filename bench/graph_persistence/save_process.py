"""The first process: build the step at fixed addresses, capture it, read the graphs, save them (steps A to C, F)."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
import torch._inductor.config

from bench.graph_persistence.allocations import AllocationTable, pointers
from bench.graph_persistence.arena import Arena, enter_primary_context, use_in_torch
from bench.graph_persistence.costs import measure_costs
from bench.graph_persistence.images import CuptiRecorder, ImageStore, Origins
from bench.graph_persistence.job import ROWS, TRITON, Job
from bench.graph_persistence.saved import SavedGraph
from bench.graph_persistence.step import Captured, Step, arena_bytes, capture
from bench.graph_persistence.step_log import StepLog
from bench.graph_persistence.template import template_fit
from bench.graph_persistence.walk import Walk, Walker
from bullet_graph.partition.driver import CudaDriver


def read_bytes(driver: CudaDriver, address: int, num_bytes: int) -> str:
    """SHA-256 of device memory."""
    data = bytearray(num_bytes)
    driver.call("cuMemcpyDtoH", data, address, num_bytes)
    return hashlib.sha256(data).hexdigest()


def figures(walk: Walk, table: AllocationTable) -> dict[str, Any]:
    """What is in a graph: nodes, edges, attributes, and what its parameters point to."""
    kernels = walk.graph.kernels()
    targets: Counter[str] = Counter()
    with_pointers = 0
    for node in walk.graph.nodes:
        found = pointers(node, table)
        with_pointers += bool(found)
        targets.update(one.name.partition(".")[0] for one in found)
    attributes = Counter(key for kernel in kernels for key, _ in kernel.attributes)
    return {
        "node_types": walk.node_types,
        "functions": len(walk.graph.functions),
        "function_names": sorted(one.name[:90] for one in walk.graph.functions),
        "nodes_with_pointers": with_pointers,
        "argument_bytes": sum(len(kernel.arguments) for kernel in kernels),
        "argument_words": sum(len(kernel.arguments) // 8 for kernel in kernels),
        "pointer_words_by_target": dict(targets),
        "kernels_by_attribute": {str(key): count for key, count in attributes.items()},
        "edges": len(walk.graph.edges),
        "programmatic_edges": sum(edge.kind != 0 for edge in walk.graph.edges),
        "parameters_in_one_buffer": walk.from_buffer,
        "nodes_naming_a_kernel_handle": walk.kernel_handles,
        "kernels_by_context": {hex(key): count for key, count in walk.contexts.items()},
    }


class Saver:
    """One saving process's objects, and its steps one by one."""

    def __init__(self, job: Job, log: StepLog, driver: CudaDriver, arena: Arena) -> None:
        self.job, self.log, self.driver, self.arena = job, log, driver, arena
        self.step = Step(job.layers)
        self.state_end = arena.end
        self.captured: dict[int, Captured] = {}
        self.outcomes: dict[int, str] = {}
        self.store = ImageStore(job.image_folder)
        self.triton_images: set[str] = set()

    def capture(self) -> dict[str, Any]:
        """Capture every batch size and the chain of Triton kernels."""
        for rows in ROWS:
            self.captured[rows] = self.step.capture(rows)
        with self.step.on_stream():
            self.step.run_triton()
            self.triton = capture(self.step.run_triton)
        return {
            "capture_ms": {rows: one.capture_ms for rows, one in self.captured.items()},
            "instantiate_ms": {rows: one.instantiate_ms for rows, one in self.captured.items()},
        }

    def outcome(self, rows: int) -> str:
        """Of the captured graph itself."""
        return self.step.outcome(rows, lambda _: self.captured[rows].graph.replay())

    def repeat(self) -> dict[str, Any]:
        """Whether replays agree bit for bit: else nothing can be compared."""
        self.outcomes = {rows: self.outcome(rows) for rows in ROWS}
        return {"works": all(self.outcome(rows) == self.outcomes[rows] for rows in ROWS)}

    def forget_scratch(self) -> dict[str, Any]:
        """Whether the graph needs anything but the state: with all later memory zeroed, is the outcome the same?"""
        num_bytes = self.arena.end - self.state_end
        self.driver.call("cuMemsetD8", self.state_end, 0, num_bytes)
        self.driver.call("cuCtxSynchronize")
        same = all(self.outcome(rows) == self.outcomes[rows] for rows in ROWS)
        return {"works": same, "zeroed_bytes": num_bytes}

    def save(self, name: str | int, graph: torch.cuda.CUDAGraph, table: AllocationTable) -> dict[str, Any]:
        """Read a graph, save it, and read the file back."""
        origins = Origins(self.driver, self.store)
        walk = Walker(self.driver, origins.image_of).read(int(graph.raw_cuda_graph()))
        self.triton_images |= origins.triton
        text = walk.graph.to_json()
        self.job.graph_file(name).write_text(text, encoding="utf-8")
        fit = template_fit(walk.graph, table, self.job.layers) if name != TRITON else None
        return {
            "works": SavedGraph.from_json(text) == walk.graph,
            "file_bytes": len(text),
            **figures(walk, table),
            "functions_by_origin_of_code": origins.counts,
            "functions_without_code": [unknown[:90] for unknown in origins.unknown],
            "template": None if fit is None else asdict(fit),
        }

    def meta(self) -> dict[str, Any]:
        """Write what the loading process needs besides the graphs."""
        replay = self.triton.graph
        with self.step.on_stream():
            replay.replay()
            torch.cuda.synchronize()
        output = self.triton.outputs[0]
        num_bytes = output.numel() * output.element_size()
        state = [entry for entry in self.arena.log if entry[0] < self.state_end]
        value = {
            "state": state,
            "arena_end": self.arena.end,
            "triton_images": sorted(self.triton_images),
            "outcomes": {str(rows): outcome for rows, outcome in self.outcomes.items()},
            "triton": [output.data_ptr(), num_bytes, read_bytes(self.driver, output.data_ptr(), num_bytes)],
        }
        self.job.meta_file.write_text(json.dumps(value), encoding="utf-8")
        return {
            "state_bytes": self.state_end - self.arena.base,
            "scratch_bytes": self.arena.end - self.state_end,
            "refused_allocations": self.arena.refused,
        }


def run(job: Job, log: StepLog) -> None:
    """All of it."""
    driver = CudaDriver()
    # Inductor's own launcher forgets a cubin once it is loaded; Triton's keeps it beside the handle.
    torch._inductor.config.use_static_cuda_launcher = False
    recorder = log.run("B: CUPTI shows the cubins of modules", CuptiRecorder) if job.images else None
    enter_primary_context(driver)
    arena = log.run("C: arena at a fixed address", lambda: Arena.create(driver, arena_bytes(job.layers)))
    if arena is None:
        return
    keep = use_in_torch(arena)
    saver: Saver | None = log.run("A: build the step in the arena", lambda: Saver(job, log, driver, arena))
    if saver is None or log.run("A: capture", saver.capture) is None:
        return
    log.run("A: replays agree bit for bit", saver.repeat)
    log.run("A: graphs need no memory but the state", saver.forget_scratch)
    if recorder is not None:
        recorder.close()
        log.run("B: load CUPTI's cubins as libraries", lambda: saver.store.index(driver, recorder.cubins))
    table = AllocationTable(saver.step.allocations(arena, saver.state_end))
    for rows in ROWS:
        graph = saver.captured[rows].graph
        log.run(f"A: walk and save the step of {rows} rows", lambda: saver.save(rows, graph, table))  # noqa: B023
    log.run("A: walk and save the Triton chain", lambda: saver.save(TRITON, saver.triton.graph, table))
    log.run("C: state to share", saver.meta)
    if job.costs:
        measure_costs(saver.step, saver.captured, saver.outcomes, driver, log)
    del keep
