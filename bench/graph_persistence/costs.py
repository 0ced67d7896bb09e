"""Step F in the process that captured: what capturing costs, and what is cheaper without leaving the process."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from bench.graph_persistence.job import ROWS
from bench.graph_persistence.rebuild import USE_NODE_PRIORITY
from bench.graph_persistence.step import Captured, Step, capture
from bench.graph_persistence.step_log import StepLog, mean_ms
from bullet_graph.graphs.decode_graph import DecodeGraphs
from bullet_graph.graphs.halves import DEFAULT_HALVES
from bullet_graph.partition.driver import CudaDriver
from bullet_graph.partition.spec import WHOLE_GPU

THREADS = 4
SMALL_REPEATS = 32


def measure_costs(
    step: Step,
    captured: Mapping[int, Captured],
    outcomes: Mapping[int, str],
    driver: CudaDriver,
    log: StepLog,
) -> None:
    """Log every way."""
    log.run("F: capture again", lambda: capture_again(step))
    log.run("F: capture again, small graphs", lambda: capture_small(step))
    log.run("F: cuGraphClone and instantiate", lambda: clone(captured[ROWS[0]], driver))
    log.run("F: cuGraphExecUpdate to another batch size", lambda: update(step, captured, outcomes, driver))
    log.run("F: set all kernels' parameters", lambda: set_parameters(captured[ROWS[0]], driver))
    log.run(f"F: capture in {THREADS} threads", lambda: capture_in_threads(step))


def capture_again(step: Step) -> dict[str, Any]:
    """Twice each size: compiled, loaded and warm."""
    found = {rows: [step.capture(rows) for _ in range(2)] for rows in ROWS}
    return {
        "capture_ms": {rows: [one.capture_ms for one in all_of] for rows, all_of in found.items()},
        "instantiate_ms": {rows: [one.instantiate_ms for one in all_of] for rows, all_of in found.items()},
    }


def capture_small(step: Step) -> dict[str, Any]:
    """Chains of eight kernels, as pieces of prefill are."""
    with step.on_stream():
        found = [capture(step.run_triton) for _ in range(SMALL_REPEATS)]
    return {
        "capture_ms": round(sum(one.capture_ms for one in found) / len(found), 4),
        "instantiate_ms": round(sum(one.instantiate_ms for one in found) / len(found), 4),
    }


def clone(captured: Captured, driver: CudaDriver) -> dict[str, Any]:
    """A copy of the graph, and an executable of the copy."""
    start = time.perf_counter()
    copy = driver.call("cuGraphClone", driver.api.CUgraph(int(captured.graph.raw_cuda_graph())))
    cloned = time.perf_counter()
    executable = driver.call("cuGraphInstantiate", copy, USE_NODE_PRIORITY)
    end = time.perf_counter()
    driver.call("cuGraphExecDestroy", executable)
    driver.call("cuGraphDestroy", copy)
    return {"clone_ms": round(1e3 * (cloned - start), 3), "instantiate_ms": round(1e3 * (end - cloned), 3)}


def exec_update(driver: CudaDriver, executable: Any, graph: Any) -> dict[str, Any]:
    """Give an executable another graph's parameters: the driver's verdict and the time."""
    start = time.perf_counter()
    status, info = driver.api.cuGraphExecUpdate(executable, graph)
    milliseconds = round(1e3 * (time.perf_counter() - start), 3)
    verdict = "" if info is None else getattr(info.result, "name", str(info.result))
    return {
        "works": status == driver.api.CUresult.CUDA_SUCCESS,
        "status": status.name,
        "result": verdict,
        "update_ms": milliseconds,
    }


def update(
    step: Step, captured: Mapping[int, Captured], outcomes: Mapping[int, str], driver: CudaDriver
) -> dict[str, Any]:
    """From each size's graph into a new executable of the first size; launched, and compared with its own capture."""
    found: dict[str, Any] = {"works": True}
    for rows in ROWS[1:]:
        first = driver.api.CUgraph(int(captured[ROWS[0]].graph.raw_cuda_graph()))
        executable = driver.call("cuGraphInstantiate", first, USE_NODE_PRIORITY)
        other = driver.api.CUgraph(int(captured[rows].graph.raw_cuda_graph()))
        verdict = exec_update(driver, executable, other)
        if verdict["works"]:
            seen = step.outcome(
                rows,
                lambda stream: driver.call("cuGraphLaunch", executable, stream),  # noqa: B023
            )
            verdict["same_outcome"] = seen == outcomes[rows]
        found["works"] &= verdict["works"] and verdict["same_outcome"]
        found[f"{ROWS[0]} to {rows} rows"] = verdict
        driver.call("cuGraphExecDestroy", executable)
    return found


def set_parameters(captured: Captured, driver: CudaDriver) -> dict[str, Any]:
    """Write every kernel node's own parameters into an executable, one call a node."""
    call, api = driver.call, driver.api
    graph = api.CUgraph(int(captured.graph.raw_cuda_graph()))
    executable = call("cuGraphInstantiate", graph, USE_NODE_PRIORITY)
    _, count = call("cuGraphGetNodes", graph)
    nodes, _ = call("cuGraphGetNodes", graph, count)
    kernel = api.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    kernels = [node for node in nodes if int(call("cuGraphNodeGetType", node)) == int(kernel)]
    parameters = [call("cuGraphKernelNodeGetParams", node) for node in kernels]

    def write() -> None:
        for node, one in zip(kernels, parameters, strict=True):
            call("cuGraphExecKernelNodeSetParams", executable, node, one)

    milliseconds = mean_ms(write, 3)
    call("cuGraphExecDestroy", executable)
    return {"kernels": len(kernels), "all_ms": milliseconds}


def capture_in_threads(step: Step) -> dict[str, Any]:
    """So many graphs of the first size one after another, then one a thread, each with its own stream and lane."""
    lanes = [_lane(step) for _ in range(THREADS)]
    ready = threading.Barrier(THREADS + 1)
    errors: list[str] = []

    def alone(lane: DecodeGraphs, stream: torch.cuda.Stream, barrier: threading.Barrier | None) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            prepared = step.upload(ROWS[0], lane)
            lane._run(prepared, WHOLE_GPU)
            torch.cuda.synchronize()
            if barrier is not None:
                barrier.wait(timeout=30)
            capture(lambda: lane._run(prepared, WHOLE_GPU))

    def thread(lane: DecodeGraphs) -> None:
        try:
            alone(lane, torch.cuda.Stream(), ready)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])
            ready.abort()

    single = mean_ms(lambda: step.capture(ROWS[0]), 1)
    threads = [threading.Thread(target=thread, args=(lane,), daemon=True) for lane in lanes]
    for one in threads:
        one.start()
    try:
        ready.wait(timeout=30)
    except threading.BrokenBarrierError:
        return {"works": False, "errors": errors}
    start = time.perf_counter()
    for one in threads:
        one.join(timeout=30)
    together = round(1e3 * (time.perf_counter() - start), 3)
    in_order = [step.capture(ROWS[0]) for _ in range(THREADS)]
    return {
        "works": not errors,
        "errors": errors,
        "threads_ms": together,
        "one_after_another_ms": round(sum(one.capture_ms + one.instantiate_ms for one in in_order), 3),
        "one_with_its_warm_up_ms": single,
    }


def _lane(step: Step) -> DecodeGraphs:
    """A lane that shares the compiled halves: a thread must not compile."""
    lane = DecodeGraphs(
        step.decoder,
        step.bench.state,
        max_batch_size=ROWS[0],
        num_kv_blocks=step.bench.num_blocks,
        padding_slot=ROWS[0],
        halves=DEFAULT_HALVES,
    )
    lane._functions = step.graphs._functions
    return lane
