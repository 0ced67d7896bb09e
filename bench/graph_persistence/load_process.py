"""The second process: same memory, saved graphs, functions found anew, launched and compared (steps B, C, D, F)."""

import json
import time
from typing import Any

import torch

from bench.graph_persistence.arena import Arena, enter_primary_context, use_in_torch
from bench.graph_persistence.costs import exec_update
from bench.graph_persistence.functions import ImageFunctions, LoadedFunctions, require_all
from bench.graph_persistence.images import ImageStore
from bench.graph_persistence.job import ROWS, TRITON, Job
from bench.graph_persistence.rebuild import Rebuilt, rebuild
from bench.graph_persistence.save_process import read_bytes
from bench.graph_persistence.saved import SavedGraph
from bench.graph_persistence.step import Step, arena_bytes
from bench.graph_persistence.step_log import StepLog, mean_ms
from bullet_graph.partition.driver import CudaDriver

REPEATS = 5
SMALL_REPEATS = 64


class Loader:
    """One loading process's objects, and its steps one by one."""

    def __init__(self, job: Job, driver: CudaDriver, arena: Arena) -> None:
        self.job, self.driver, self.arena = job, driver, arena
        self.meta: dict[str, Any] = json.loads(job.meta_file.read_text(encoding="utf-8"))
        self.step = Step(job.layers)
        self.state = [list(entry) for entry in arena.log]
        arena.skip_to(self.meta["arena_end"])
        self.store = ImageStore(job.image_folder)
        self.images = ImageFunctions(driver, self.store)
        self.modules = LoadedFunctions(driver)
        self.graphs: dict[str | int, SavedGraph] = {}
        self.functions: dict[str | int, list[Any]] = {}

    def same_addresses(self) -> dict[str, Any]:
        """Whether torch's allocations of the state lie where they lay."""
        saved = self.meta["state"]
        differing = sum(a != b for a, b in zip(saved, self.state, strict=False))
        return {
            "works": saved == self.state,
            "allocations": [len(saved), len(self.state)],
            "differing": differing,
        }

    def read(self) -> dict[str, Any]:
        """Parse the saved graphs."""
        milliseconds = {}
        for name in (TRITON, *ROWS):
            start = time.perf_counter()
            text = self.job.graph_file(name).read_text(encoding="utf-8")
            self.graphs[name] = SavedGraph.from_json(text)
            milliseconds[name] = round(1e3 * (time.perf_counter() - start), 3)
        return {"parse_ms": milliseconds}

    def warm_up(self) -> dict[str, Any]:
        """Load the libraries' modules by one layer's launches for each batch size, captured to see their handles."""
        lane = self.step.eager_one_layer()
        kept = []
        start = time.perf_counter()
        for rows in ROWS:
            captured = self.step.capture(rows, lane)
            self.modules.harvest(int(captured.graph.raw_cuda_graph()))
            kept.append(captured)
        return {
            "functions_listed": self.modules.listed,
            "modules_refused": self.modules.modules_refused,
            "seconds": round(time.perf_counter() - start, 3),
        }

    def resolve(self, name: str | int) -> dict[str, Any]:
        """Find a graph's functions; Triton's always come out of their own cubins."""
        found, sources = [], {"image": 0, "loaded module": 0, "nowhere": 0}
        start = time.perf_counter()
        for wanted in self.graphs[name].functions:
            by_image = self.job.images or wanted.image in self.meta["triton_images"]
            function = self.images.find(wanted) if by_image else self.modules.find(wanted)
            found.append(function)
            sources["nowhere" if function is None else "image" if by_image else "loaded module"] += 1
        milliseconds = round(1e3 * (time.perf_counter() - start), 3)
        missing = [
            one.name[:90]
            for one, function in zip(self.graphs[name].functions, found, strict=True)
            if function is None
        ]
        self.functions[name] = found
        return {
            "works": not missing,
            "functions": sources,
            "missing": missing,
            "resolve_ms": milliseconds,
            "images_loaded": len(self.images.loaded),
        }

    def make(self, name: str | int) -> Rebuilt:
        """Rebuild one of the saved graphs."""
        graph = self.graphs[name]
        return rebuild(self.driver, graph, require_all(graph, self.functions[name]))

    def triton(self) -> dict[str, Any]:
        """Rebuild, launch and compare the chain of Triton kernels."""
        rebuilt = self.make(TRITON)
        address, num_bytes, expected = self.meta["triton"]
        with self.step.on_stream() as stream:
            self.driver.call("cuMemsetD8", address, 0, num_bytes)
            self.driver.call("cuGraphLaunch", rebuilt.executable, stream)
            torch.cuda.synchronize()
        same = read_bytes(self.driver, address, num_bytes) == expected
        return {"works": same, "same_outcome": same, **rebuilt.milliseconds}

    def whole(self, rows: int) -> dict[str, Any]:
        """Rebuild, launch and compare a whole step."""
        rebuilt = self.make(rows)
        same = self.outcome(rows, rebuilt) == self.meta["outcomes"][str(rows)]
        again = self.outcome(rows, rebuilt) == self.meta["outcomes"][str(rows)]
        return {"works": same and again, "same_outcome": same, "same_outcome_again": again}

    def outcome(self, rows: int, rebuilt: Rebuilt) -> str:
        """Of a rebuilt graph."""
        return self.step.outcome(
            rows, lambda stream: self.driver.call("cuGraphLaunch", rebuilt.executable, stream)
        )

    def rebuild_times(self) -> dict[str, Any]:
        """Of the first batch size: each part, and all of it."""
        parts: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            rebuilt = self.make(ROWS[0])
            for name, milliseconds in rebuilt.milliseconds.items():
                parts.setdefault(name, []).append(milliseconds)
            rebuilt.destroy(self.driver)
        total = [round(sum(all_of), 3) for all_of in zip(*parts.values(), strict=True)]
        return {"nodes": len(self.graphs[ROWS[0]].nodes), "parts_ms": parts, "total_ms": total}

    def small_times(self) -> dict[str, Any]:
        """Of a piece of eight kernels."""
        return {
            "nodes": len(self.graphs[TRITON].nodes),
            "total_ms": mean_ms(lambda: self.make(TRITON).destroy(self.driver), SMALL_REPEATS),
        }

    def update(self) -> dict[str, Any]:
        """Turn the rebuilt executable of one batch size into another's; launch and compare."""
        first, found = self.make(ROWS[0]), {}
        for rows in ROWS[1:]:
            other = self.make(rows)
            verdict = exec_update(self.driver, first.executable, other.graph)
            if verdict["works"]:
                verdict["same_outcome"] = self.outcome(rows, first) == self.meta["outcomes"][str(rows)]
            found[f"to {rows} rows"] = verdict
        works = all(one["works"] and one["same_outcome"] for one in found.values())
        return {"works": works, **found}


def run(job: Job, log: StepLog) -> None:
    """All of it."""
    driver = CudaDriver()
    enter_primary_context(driver)
    arena = log.run("C: arena at a fixed address", lambda: Arena.create(driver, arena_bytes(job.layers)))
    if arena is None:
        return
    keep = use_in_torch(arena)
    loader: Loader | None = log.run("D: build the state", lambda: Loader(job, driver, arena))
    if loader is None:
        return
    log.run("C: torch's state has the same addresses", loader.same_addresses)
    log.run("D: read the saved graphs", loader.read)
    if not job.images:
        log.run("B: warm-up launches load the libraries' modules", loader.warm_up)
    for name in loader.graphs:
        log.run(f"B: find the functions of {name}", lambda: loader.resolve(name))  # noqa: B023
    log.run("D: Triton chain", loader.triton)
    log.run("F: rebuild a piece of eight kernels", loader.small_times)
    for rows in ROWS:
        log.run(f"D: whole step of {rows} rows", lambda: loader.whole(rows))  # noqa: B023
    log.run("F: rebuild a whole step", loader.rebuild_times)
    log.run("F: cuGraphExecUpdate of a rebuilt graph", loader.update)
    del keep
