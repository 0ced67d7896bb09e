"""Stores of capture caches for tests: small entries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bullet_graph.captures.manifest import Manifest, entry_id, list_files
from bullet_graph.captures.store import FILES_NAME, CaptureStore, Entry

FINGERPRINT = json.loads("""{
    "device": "cuda", "platform": "Linux x86_64 glibc 2.36", "python": "CPython 3.11", "torch": "2.13.0",
    "triton": "3.9.0", "code": "aaaa", "gpu": "NVIDIA H200", "num_sms": "132", "driver": "580.159.04",
    "cuda": "13.0", "host_isa": "AVX512", "flashinfer": "0.6.12", "model": "LlamaForCausalLM 32x4096 cccc",
    "dtype": "bfloat16"
}""")
PLAN: dict[str, Any] = {"model": "llama-3.1-8b", "batch_sizes": [1, 2, 4]}
PACKAGE = "layers/attention_input.pt2"
FILES = {
    PACKAGE: b"package" * 40_000,
    "triton/KEY/gemm.cubin": b"cubin" * 1000,
    "flashinfer/fa3_bfloat16_128.so": b"module" * 3000,
    "perf_table.json": b"{}",
    "empty": b"",
}


def quiet(line: str) -> None:
    """For a builder that must not wait."""
    raise AssertionError(line)


def build(
    store: CaptureStore,
    fingerprint: Mapping[str, str] = FINGERPRINT,
    plan: Mapping[str, Any] = PLAN,
    files: Mapping[str, bytes] = FILES,
) -> Entry:
    """An entry with these files."""
    with store.building(entry_id(fingerprint, plan), tell=quiet) as staged:
        for path, data in files.items():
            file = staged / FILES_NAME / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return placed(store, staged, fingerprint, plan)


def placed(
    store: CaptureStore, staged: Path, fingerprint: Mapping[str, str] = FINGERPRINT, plan: Mapping[str, Any] = PLAN
) -> Entry:
    """The entry of a staged folder."""
    manifest = Manifest(
        fingerprint=dict(fingerprint),
        plan=dict(plan),
        files=list_files(staged / FILES_NAME),
        self_check={"tolerance": 0.05},
        created_utc="2026-11-22T12:00:00+00:00",
        build_seconds=350.5,
        provenance={"host": "h"},
    )
    return store.place(manifest, staged)


def flip_byte(path: Path, index: int = 0) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)
