"""This project's engine, through its asyncio interface, as a client in the same process sees it."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.peers.systems import OwnSetting, Setup
from bullet_graph import AsyncEngine, Engine, OutputKind, Slo
from bullet_graph.cli.engine_run import config_for
from bullet_graph.config import EngineConfig
from bullet_graph.engine.replay import TimedRequest, require_forced_length

_IDLE_LIMIT_S = 30.0


class OwnEngine:
    """One engine, made so that every policy wanted can be had; :meth:`configure` changes between them.

    Args:
        wanted: that will be asked for.
        slo: targets that will be asked for: one for TPOT lets ``mixed`` choose its chunks by predictions.
        decisions: a new file for every decision of the planner, which costs the engine's thread some time; None: none.
    """

    def __init__(self, setup: Setup, wanted: Sequence[OwnSetting], slo: Slo, decisions: Path | None) -> None:
        settings = dataclasses.asdict(setup)
        del settings["shares_prefixes"]
        config = EngineConfig(**settings)
        config = config_for(config, list(dict.fromkeys(one.policy for one in wanted)), slo)
        engine = Engine(**config.values(), trace_decisions=decisions)
        self._engine = AsyncEngine(engine)
        self.settings: Mapping[str, Any] = dataclasses.asdict(setup) | {
            "opened_for": str(config.policy),
            "device": engine.device_name,
            "partition_backend": engine.partition_backend,
            "kv_cache_tokens": engine.memory.kv_cache_tokens,
        }

    async def configure(self, setting: str, slo: Slo) -> None:
        """Change the policy and the targets; waits for what is still in flight of requests that have ended."""
        deadline_s = time.monotonic() + _IDLE_LIMIT_S
        while self._engine.engine.has_unfinished_requests() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.002)
        wanted = OwnSetting.parse(setting)
        await self._engine.set_policy(wanted.policy, slo, wanted.prompt_order)

    async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        """Serve a request, with its targets."""
        require_forced_length(
            len(request.prompt_token_ids), request.params.max_tokens, self._engine.engine.max_model_len
        )
        outputs = self._engine.generate(
            request.prompt_token_ids, request.params, output_kind=OutputKind.DELTA, slo=request.slo
        )
        async with aclosing(outputs) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta.outputs[0].token_ids

    def counters(self) -> Mapping[str, Any]:
        """Steps, preemptions, time by policy, and the planner's corrections."""
        stats = self._engine.engine.stats()
        return {
            "num_steps": stats.num_steps,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
            "kv_blocks_peak": stats.kv_blocks_peak,
            "kv_blocks_total": stats.kv_blocks_total,
            "policy_seconds": dict(stats.policy_seconds),
            "corrections": {"{} {} of {} rows".format(*key): factor for key, factor in stats.corrections.items()},
        }

    async def close(self) -> None:
        """Shut the engine down."""
        await asyncio.to_thread(self._engine.shutdown)
