"""The systems that are installed here, the memory they need, and starting them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from bench.peers.own import OwnEngine
from bench.peers.systems import Candidate, OwnSetting, Setup, System, log
from bench.peers.vllm_system import VllmSystem, require_vllm
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
    vllm_options: dict[str, Any],
    vllm_log: Path | None,
    own_decisions: Path | None = None,
) -> System:
    """Start what these candidates share.

    Args:
        setup: what every system is given.
        candidates: of one kind and URL.
        slo: targets that will be asked for, one for TPOT among them if there is any.
        vllm_options: further arguments of vLLM's.
        vllm_log: a file for its messages.
        own_decisions: a new file for the decisions of this engine's planner.
    """
    kind, url = candidates[0].resident
    if kind == "own":
        return OwnEngine(
            setup, [OwnSetting.parse(candidate.setting) for candidate in candidates], slo, own_decisions
        )
    if kind == "vllm":
        folder = platformdirs.user_cache_path("bullet_graph") / "peers" / Path(setup.model).name
        return VllmSystem(setup, folder, vllm_options, vllm_log)
    # aiohttp is needed for servers alone.
    from bullet_graph.serve.client import OpenAiServer  # noqa: PLC0415

    return await OpenAiServer.connect(url)


def installed(candidates: Sequence[Candidate], *, skip: bool) -> list[Candidate]:
    """The candidates whose software is here.

    Args:
        candidates: those asked for.
        skip: leave the others out, and say so on stderr.

    Raises:
        DeviceError: one is missing and ``skip`` is unset.
        ConfigError: none is left.
    """
    checks: dict[str, Callable[[], None]] = {
        "own": lambda: None,
        "vllm": require_vllm,
        "openai": _require_aiohttp,
    }
    there = []
    for candidate in candidates:
        try:
            checks[candidate.kind]()
        except DeviceError as error:
            if not skip:
                raise
            log(f"left out {candidate.kind}:{candidate.setting or candidate.url}: {error}")
        else:
            there.append(candidate)
    if not there:
        raise ConfigError("none of the systems is installed: nothing is left to compare")
    return there


def require_memory(
    candidates: Sequence[Candidate],
    share: float,
    memory: Callable[[], tuple[int, int]],
    *,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until the GPU has the memory that these candidates' systems are to fill, all at the same time.

    This engine would make do with less, and be slower than it is; processes that have just ended may hold some still.

    Args:
        candidates: of one group.
        share: of the memory, for each system that this process starts.
        memory: tells (free, total) bytes of the GPU now.
        pause: waits so many seconds.

    Raises:
        ConfigError: their shares are more than the whole.
        DeviceError: other programs hold too much for a minute.
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


def _require_aiohttp() -> None:
    if installed_version("aiohttp") is None:
        raise DeviceError(
            "aiohttp is not installed, and openai:URL needs it: pip install aiohttp, or leave the servers out "
            "with --skip-missing"
        )


def group(candidates: Sequence[Candidate], *, one_at_a_time: bool) -> list[list[Candidate]]:
    """Candidates that are up at the same time: all, or those of one process or server after the other."""
    if not one_at_a_time:
        return [list(candidates)]
    residents = dict.fromkeys(candidate.resident for candidate in candidates)
    return [[c for c in candidates if c.resident == resident] for resident in residents]
