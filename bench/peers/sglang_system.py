"""SGLang's engine, whose front end is in this process, through its Python API; written against SGLang 0.5.17.

How it is set up, beside what a tuned server would use:

- CUDA graphs and the overlap scheduler are on, as by default. A step is a chunk of prompts or a decode step.
  ``--sglang-option enable_mixed_chunk=true`` mixes both.
- CUDA graphs cover 256 rows on an H100 or H200; ``--sglang-option cuda_graph_max_bs_decode=1024`` captures more.
- SGLang chooses its attention kernels: FlashAttention 3 on Hopper.
- ``sglang:512`` is its ``chunked_prefill_size``. SGLang cannot change it while it runs: each is an engine of its own.
- ``sglang:pdmux`` is its PD multiplexing: prefill and decode side by side on SM partitions. SGLang demands whole
  prompts and no overlap scheduler for it.
- The radix cache is on where a workload's prompts share prefixes.
- Weights and KV cache get the memory share, or less where SGLang's own reserve for activations and CUDA graphs does not
  fit beside them. ``--sglang-option mem_fraction_static=0.88`` sets SGLang's own figure.
- Off: metrics, request logs, tokenizer, detokenizer. A preset's weights are dummies (:mod:`bench.peers.model_folder`).
"""

import asyncio
import importlib
import itertools
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.peers.model_folder import prepare_model, remove_weights
from bench.peers.peer_process import environment, output_to, plain, require_options, require_peer
from bench.peers.systems import OPTION_EXAMPLES, PD_MULTIPLEXING, Setup
from bullet_graph.engine.replay import TimedRequest
from bullet_graph.errors import ConfigError, DeviceError, EngineDeadError, RequestError
from bullet_graph.slo import Slo

NAME, VERSION = "sglang", "0.5.17"
"""The distribution, and the release that this module was written against."""

_SPARE_TOKENS = 8
"""SGLang ends requests that come closer to its ``context_length``."""

_RESOLVED = (
    *("mem_fraction_static", "chunked_prefill_size", "max_prefill_tokens", "page_size", "disable_overlap_schedule"),
    *("attention_backend", "sampling_backend", "moe_runner_backend", "cuda_graph_config"),
)
"""Of ``ServerArgs``: SGLang chooses them."""


class SglangSystem:
    """A running SGLang. Its scheduler is a process of its own; its front end runs on this process's event loop.

    Args:
        setting: ``chunked_prefill_size``, empty for ``max_num_batched_tokens``, or ``pdmux``.
        folder: for a preset's ``config.json``.
        options: further arguments of ``ServerArgs``, or other values for those set here.
        log: SGLang's messages are appended to this file; None shows its errors on stderr.
        memory: tells (free, total) bytes of the GPU now; None leaves ``mem_fraction_static`` to SGLang.

    Raises DeviceError where SGLang, or a library that it needs, is not installed, ConfigError where it has no such
    option or refuses the settings.
    """

    def __init__(
        self,
        setup: Setup,
        setting: str,
        folder: Path,
        options: Mapping[str, Any],
        log: Path | None,
        memory: Callable[[], tuple[int, int]] | None,
    ) -> None:
        require_peer(NAME, VERSION)
        arguments = engine_arguments(setup, setting, folder) | {"log_level": "info" if log else "error"} | dict(options)
        with output_to(log):
            try:
                engine = importlib.import_module("sglang.srt.entrypoints.engine").Engine
                server_args = importlib.import_module("sglang.srt.server_args").ServerArgs
            except ImportError as error:
                raise DeviceError(
                    f"sglang needs a library that is missing, or another version of it: {error}"
                ) from error
            require_options("SGLang", options, server_args, OPTION_EXAMPLES["sglang"])
            try:
                if memory is not None and "mem_fraction_static" not in arguments:
                    own = server_args(**arguments).mem_fraction_static
                    arguments["mem_fraction_static"] = static_fraction(setup.gpu_memory_utilization, own, *memory())
                # Its own handler would end this process where the scheduler fails; the engine tells that by itself.
                self._engine = engine(**arguments, custom_sigquit_handler=signal.SIG_IGN)
            except (ValueError, RuntimeError, AssertionError, ImportError) as error:
                raise ConfigError(
                    f"SGLang did not start: {error}. Its own messages say more (--sglang-log FILE keeps them all)"
                ) from error
        remove_weights(folder)
        self._kill_process_tree = importlib.import_module("sglang.srt.utils").kill_process_tree
        self._names = itertools.count()
        self._is_dead = False
        self._serving: set[asyncio.Task[Any]] = set()
        # SGLang's own handlers, which its first request would install, end this process with status 0 where it dies.
        self._engine.tokenizer_manager.auto_create_handle_loop()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._die)
        resolved = self._engine.server_args
        started = self._engine._scheduler_init_result.scheduler_infos[0]  # one of each rank
        self.settings: Mapping[str, Any] = {
            "version": importlib.import_module("sglang").__version__,
            "engine_args": {name: plain(value) for name, value in arguments.items()},
            "resolved_args": {name: plain(getattr(resolved, name)) for name in _RESOLVED},
            "kv_cache_tokens": started["max_total_num_tokens"],
            "environment": environment("SGLANG_"),
        }

    def _die(self) -> None:
        self._is_dead = True
        for task in self._serving:
            task.cancel()

    async def configure(self, setting: str, slo: Slo) -> None:
        """Nothing: each setting has an engine of its own, and SGLang takes no targets."""

    async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        """Serve a request."""
        task = asyncio.current_task()
        assert task is not None
        own = request.params
        params = {"temperature": own.temperature, "max_new_tokens": own.max_tokens, "ignore_eos": own.ignore_eos}
        self._serving.add(task)
        try:
            self._require_alive()
            prompt, name = list(request.prompt_token_ids), f"peer-{next(self._names)}"
            streamed = await self._engine.async_generate(
                input_ids=prompt, sampling_params=params, stream=True, rid=name
            )
            async with aclosing(streamed) as outputs:
                async for output in outputs:
                    reason = output["meta_info"]["finish_reason"]
                    if reason is not None and reason["type"] == "abort":
                        raise RequestError(f"SGLang ended the request: {reason.get('message')}")
                    yield output["output_ids"]
        except asyncio.CancelledError:
            self._require_alive()
            raise
        finally:
            self._serving.discard(task)

    def _require_alive(self) -> None:
        if self._is_dead:
            raise EngineDeadError("SGLang's scheduler has died, its messages say why (--sglang-log FILE keeps them)")

    def counters(self) -> Mapping[str, Any]:
        """Empty: SGLang's metrics are off."""
        return {}

    async def close(self) -> None:
        """End SGLang's processes, which frees their memory."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        # Not by its shutdown(), which ends all children of this process: vLLM's core, too.
        self._engine.tokenizer_manager._subprocess_watchdog.stop()
        for pid in self._engine.get_all_child_pids():
            self._kill_process_tree(pid, wait_timeout=60)


def static_fraction(share: float, own: float, free: int, total: int) -> float:
    """``mem_fraction_static``: what weights and KV cache may fill, as a share of what is free now.

    They are to fill ``share`` of the GPU's ``total`` bytes. SGLang by itself would choose the share ``own`` of them and
    reserve the rest. ValueError where that is more than the ``free`` bytes.
    """
    left = max(free - share * total, (1 - own) * total)
    if left >= free:
        raise ValueError(f"it reserves {1 - own:.0%} of the GPU's memory, and only {free / total:.0%} are free")
    return round(1 - left / free, 3)


def engine_arguments(setup: Setup, setting: str, folder: Path) -> dict[str, Any]:
    """The arguments of SGLang's ``ServerArgs``; writes a preset's model folder."""
    model = prepare_model(setup, folder, writes_fp8=True)
    prefill = {"enable_pdmux": True, "chunked_prefill_size": -1, "disable_overlap_schedule": True}
    if setting != PD_MULTIPLEXING:
        prefill = {"chunked_prefill_size": int(setting or setup.max_num_batched_tokens)}
    return prefill | {
        "model_path": model["model"],
        "load_format": model["load_format"],
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "dtype": setup.dtype,
        "kv_cache_dtype": {"fp8": "fp8_e4m3"}.get(setup.kv_cache_dtype, setup.kv_cache_dtype),
        "tp_size": setup.tensor_parallel_size,
        "random_seed": setup.seed,
        "context_length": setup.max_model_len + _SPARE_TOKENS,
        "max_running_requests": setup.max_num_seqs,
        "disable_radix_cache": not setup.shares_prefixes,
    }
