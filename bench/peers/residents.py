"""The systems that are installed here, the memory they need, and starting them."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import torch

from bench.peers import sglang_system, vllm_system
from bench.peers.own import OwnEngine
from bench.peers.peer_process import require_peer
from bench.peers.systems import Candidate, Kind, OwnSetting, Setup, System, log
from bullet_graph.errors import ConfigError, DeviceError
from bullet_graph.perf.provenance import installed_version
from bullet_graph.runtime.memory import format_bytes
from bullet_graph.slo import Slo

_PATIENCE_S = 60
"""Processes that are ending may hold their memory for so long."""


async def open_system(
    setup: Setup,
    candidates: Sequence[Candidate],
    *,
    slo: Slo,
    options: Mapping[Kind, Mapping[str, Any]],
    logs: Mapping[Kind, Path | None],
    own_decisions: Path | None = None,
) -> System:
    """Start what these candidates share.

    Of the targets that will be asked for, ``slo`` is one for TPOT if there is any. ``options`` are further arguments of
    each peer, and ``own_decisions`` is a new file for the decisions of this engine's planner.
    """
    kind, setting = candidates[0].kind, candidates[0].setting
    if kind == "own":
        return OwnEngine(setup, [OwnSetting.parse(candidate.setting) for candidate in candidates], slo, own_decisions)
    folder = peer_folder(setup.model)
    if kind == "vllm":
        return vllm_system.VllmSystem(setup, folder, options["vllm"], logs["vllm"])
    if kind == "sglang":
        memory = torch.cuda.mem_get_info if torch.cuda.is_available() else None
        return sglang_system.SglangSystem(setup, setting, folder, options["sglang"], logs["sglang"], memory)
    # aiohttp is needed for servers alone.
    from bench.peers.server_system import ServerSystem  # noqa: PLC0415

    return await ServerSystem.connect(candidates[0].url)


def peer_folder(model: str) -> Path:
    """A folder for the peers' files of a model, which comparisons on other GPUs of this machine do not share."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or "all"
    return platformdirs.user_cache_path("bullet_graph") / "peers" / gpus / Path(model).name


def require_installed(candidates: Sequence[Candidate]) -> None:
    """Raise DeviceError where something that the candidates need is not installed."""
    kinds = {candidate.kind for candidate in candidates}
    for peer in (vllm_system, sglang_system):
        if peer.NAME in kinds:
            require_peer(peer.NAME, peer.VERSION)
    if "openai" in kinds and installed_version("aiohttp") is None:
        raise DeviceError("openai:URL needs aiohttp, which is not installed: pip install 'bullet-graph[bench]'")


def require_memory(
    candidates: Sequence[Candidate],
    share: float,
    memory: Callable[[], tuple[int, int]],
    *,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until the GPU has the memory that these candidates' systems are to fill, all at the same time.

    This engine would make do with less, and be slower than it is; processes that have just ended may hold some still.
    Each system that this process starts gets the ``share``; ``memory`` tells (free, total) bytes of the GPU now.

    Raises ConfigError where their shares are more than the whole, DeviceError if others hold too much for a minute.
    """
    num_systems = len({candidate.resident for candidate in candidates if candidate.kind != "openai"})
    wanted = share * num_systems
    if not num_systems:
        return
    if wanted > 1:
        raise ConfigError(
            f"{num_systems} systems with {share:.0%} of the GPU's memory each do not fit: lower "
            "--gpu-memory-utilization, or give --one-at-a-time"
        )
    for waited_s in range(_PATIENCE_S + 1):
        free, total = memory()
        if free >= wanted * total:
            return
        if waited_s == 0:
            log(f"waiting for memory: {free / total:.0%} of the GPU's is free, {wanted:.0%} is wanted")
        pause(1.0)
    raise DeviceError(
        f"the systems are to fill {wanted:.0%} of the GPU's {format_bytes(total)}, but only {format_bytes(free)} are "
        "free: stop what else uses it, or lower --gpu-memory-utilization"
    )


def group(candidates: Sequence[Candidate], *, one_at_a_time: bool) -> list[list[Candidate]]:
    """Candidates that are up at the same time: all, or those of one process or server after the other."""
    if not one_at_a_time:
        return [list(candidates)]
    residents = dict.fromkeys(candidate.resident for candidate in candidates)
    return [[c for c in candidates if c.resident == resident] for resident in residents]
