"""Machines as the doctor finds them, and readers of what it says."""

import dataclasses
from typing import Any

from bullet_graph.config import EngineConfig
from bullet_graph.partition.offsets import DriverId, TrustedOffset
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.runtime.diagnose import Diagnosis, Finding, Level
from bullet_graph.runtime.machine import BackendCheck, CacheFolder, Gpu, Machine, PartitionChecks, SizeCheck
from bullet_graph.runtime.resolve import FLASHINFER_RELEASE

DRIVER = DriverId(13000, "580.159.04", "x86_64")
GPU = Gpu("NVIDIA H200", (9, 0), 132, 66, 140 * 1024**3, 130 * 1024**3, 1)


def asked_for(**settings: Any) -> EngineConfig:
    """What the doctor is asked for: no model unless it is named."""
    return EngineConfig(**{"model": ""} | settings)


def complete_machine(**changes: Any) -> Machine:
    """An H200 with everything an engine needs, apart from these changes."""
    sizes = (SizeCheck(None, "0-131", 0.01), SizeCheck(16, "0-15", 0.01), SizeCheck(32, "0-31", 0.01))
    backends = (BackendCheck("smctrl", 2, sizes), BackendCheck("green", 8, sizes), BackendCheck("none", 132, sizes[:1]))
    provenance = collect_provenance("cpu")
    versions = {**provenance.versions, "triton": "3.6.0", "flashinfer": FLASHINFER_RELEASE}
    machine = Machine(
        platform="Linux",
        provenance=dataclasses.replace(provenance, versions=versions),
        cuda_python="13.0.1",
        torch_cuda="13.0",
        driver=DRIVER,
        driver_problem=None,
        uses_gpu=True,
        gpu=GPU,
        gpu_problem=None,
        several_gpus=None,
        gpu_path_problem=None,
        missing_compilers=(),
        mask_offset=TrustedOffset(0x51C, "table"),
        mask_offset_problem=None,
        partitions=PartitionChecks((16, 32), backends, "smctrl", "smctrl: 3 partitions verified"),
        caches=(CacheFolder("FlashInfer", "/home/somebody/.cache/flashinfer", 1024**2, True),),
        ledger=None,
        model_problem=None,
    )
    return dataclasses.replace(machine, **changes)


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    (found,) = (finding for finding in diagnosis.findings if finding.name == name)
    return found


def not_green(diagnosis: Diagnosis) -> dict[str, Level]:
    """What is not green; all of it comes with advice, and nothing else does."""
    assert all((line.level is Level.GREEN) == (line.advice is None) for line in diagnosis.findings)
    return {line.name: line.level for line in diagnosis.findings if line.level is not Level.GREEN}
