"""Decode graphs of the 8B shapes for several partitions: what they cost, and that calibration finds the offset."""

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bullet_graph import Engine, PartitionError, SamplingParams
from bullet_graph.config import KV_BLOCK_TOKENS
from bullet_graph.graphs.decode_graph import DecodeGraphs, DecodeInputs
from bullet_graph.graphs.key import GraphKey, row_buckets
from bullet_graph.models.presets import PRESETS
from bullet_graph.partition.calibrate import calibrate
from bullet_graph.partition.offsets import lookup
from bullet_graph.partition.smctrl import identify_driver

Record = Callable[[str, object], None]
DECODE_SMS = (16, 24, 32, 48, 64)


@torch.inference_mode()
def launch_times_us(graphs: DecodeGraphs) -> dict[str, list[float]]:
    """Host times of a decode step of 60 rows in each partition: all of it, and the replay alone."""
    rows = np.arange(60, dtype=np.int32)
    kv_indptr = np.arange(61, dtype=np.int32)
    inputs = DecodeInputs(rows, rows * 0, rows * 0 + 1, (1 + rows) * KV_BLOCK_TOKENS, kv_indptr, 1 + rows)
    times: dict[str, list[float]] = {"step": [], "replay": []}
    for partition in {key.partition for key in graphs._captured}:
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            graphs.run(inputs, partition)
            times["step"].append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()
            # The same step once more: its inputs and its plan are still on the device.
            start = time.perf_counter()
            graphs._captured[GraphKey(64, partition)][0].replay()
            times["replay"].append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


@pytest.mark.parametrize("backend", ["smctrl", "green"])
def test_capture_of_a_whole_plan(backend: str, record_property: Record) -> None:
    """24 batch sizes × 6 partitions, the whole GPU among them."""
    with Engine(
        "llama-3.1-8b",
        max_num_seqs=272,
        max_model_len=4096,
        partition_backend=backend,
        decode_sms=DECODE_SMS,
        kv_cache_bytes=8 * 2**30,
    ) as engine:
        report = engine.capture
        assert report is not None
        model = PRESETS["llama-3.1-8b"]
        pieces = len(row_buckets(engine.config.max_forward_rows, model)) * model.num_layers
        assert report.num_graphs == 24 * (1 + len(DECODE_SMS)) + pieces
        decode_s = sum(
            phase.end_s - phase.start_s for phase in engine.start_report.phases if phase.name == "decode graphs"
        )
        launch_us = launch_times_us(engine._executor._graphs)
        # The engine still serves on the whole GPU.
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = engine.generate([[1, 2, 3]] * 5, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 5
    record_property("partition_backend", backend)
    record_property("num_graphs", report.num_graphs)  # of decode steps and of pieces of short forwards
    record_property("compile_seconds", report.compile_seconds)
    record_property("capture_seconds_per_decode_graph", decode_s / (24 * (1 + len(DECODE_SMS))))
    record_property("mib_per_graph", report.num_bytes / report.num_graphs / 2**20)
    record_property("launch_us_p50", {name: statistics.median(times) for name, times in launch_us.items()})


@pytest.mark.parametrize(
    ("sms", "message"), [(33, "multiple of 2"), (4, "no whole group"), (132, "from 2 to 130 of the GPU's 132 SMs")]
)
def test_sizes_that_cannot_be_had(sms: int, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Engine("tiny", device="cuda", partition_backend="smctrl", decode_sms=(sms,), kv_cache_bytes=2**28)


def test_calibration_finds_the_offset_without_the_table(record_property: Record) -> None:
    driver = identify_driver()
    calibration = calibrate()
    known = lookup(driver)
    record_property("driver", driver.release)
    record_property("offset", hex(calibration.offset))
    record_property("seconds", round(calibration.seconds, 1))
    record_property("tries", calibration.tries)
    record_property("crashed", calibration.crashed)
    assert calibration.offset == known
    assert calibration.seconds < 120
