"""vLLM's asynchronous engine in this process, driven as its own API server drives it; written against vLLM 0.26.0.

How it is set up, beside what a tuned server would use:

- torch.compile, CUDA graphs and asynchronous scheduling are on, as by default.
- CUDA graphs cover 512 rows by default; larger batches run without. ``--vllm-option max_cudagraph_capture_size=1024``
  captures more. A small model's goodput depends on it.
- vLLM chooses its attention kernels: FlashAttention 3 on Hopper. ``--vllm-option attention_backend=FLASHINFER`` takes
  others.
- A candidate ``vllm:512`` limits the tokens of a step while vLLM runs (:mod:`bench.peers.budget`). Its memory is
  planned for ``max_num_batched_tokens``; vLLM's servers use 8,192 on such GPUs.
- Prefix caching is on where a workload's prompts share prefixes.
- Off: statistics, request logs, tokenizer and detokenizer (every system gets and returns token ids).
- FlashInfer's kernels are tuned at the start by default; ``enable_flashinfer_autotune=false`` starts sooner.
- A preset's weights are vLLM's dummies; :mod:`bench.peers.vllm_worker` tells of FP8.
"""

import importlib
import itertools
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.peers.budget import CONFIG_KEY, TokenBudget
from bench.peers.model_folder import prepare_model
from bench.peers.peer_process import environment, output_to, plain, require_options, require_peer
from bench.peers.systems import OPTION_EXAMPLES, Setup
from bullet_graph.engine.replay import TimedRequest
from bullet_graph.errors import ConfigError, EngineDeadError
from bullet_graph.slo import Slo

NAME, VERSION = "vllm", "0.26.0"
"""The distribution, and the release that this module was written against."""
SCHEDULER = "bench.peers.vllm_scheduler.BudgetedScheduler"
WORKER = "bench.peers.vllm_worker.Worker"

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # This process has a CUDA context by then, which a fork would not survive.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class VllmSystem:
    """A running vLLM. Its core is a process of its own; its front end runs on this process's event loop.

    Args:
        folder: for a preset's ``config.json`` and the budget's file. vLLM finds earlier compilations by this path.
        options: further arguments of ``AsyncEngineArgs``, or other values for those set here.
        log: vLLM's messages are appended to this file; None shows its warnings on stderr.

    Raises DeviceError where vLLM is not installed, ConfigError where it has no such option or refuses the settings.
    """

    def __init__(self, setup: Setup, folder: Path, options: Mapping[str, Any], log: Path | None) -> None:
        require_peer(NAME, VERSION)
        os.environ.update(_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO" if log else "WARNING"})
        arguments = engine_arguments(setup, folder) | dict(options)
        self._names = itertools.count()
        self._most_tokens: int = arguments["max_num_batched_tokens"]
        self._budget = TokenBudget.create(_budget_file(folder), self._most_tokens)
        with output_to(log):
            vllm = importlib.import_module("vllm")
            engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
            require_options("vLLM", options, engine_args, OPTION_EXAMPLES["vllm"])
            try:
                self._engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(
                    engine_args(**arguments)
                )
            except (ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"vLLM did not start: {error}. Its own messages say more (--vllm-log FILE keeps them all)"
                ) from error
        self._tokens_input = importlib.import_module("vllm.inputs").tokens_input
        sampling = importlib.import_module("vllm.sampling_params")
        self._sampling_params, self._delta = sampling.SamplingParams, sampling.RequestOutputKind.DELTA
        self._dead_error = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
        config = self._engine.vllm_config
        self.settings: Mapping[str, Any] = {
            "version": vllm.__version__,
            "engine_args": {name: plain(value) for name, value in arguments.items()},
            "num_kv_blocks": plain(config.cache_config.num_gpu_blocks),
            "kv_block_tokens": plain(config.cache_config.block_size),
            "async_scheduling": plain(config.scheduler_config.async_scheduling),
            "optimization_level": plain(config.optimization_level),
            "max_cudagraph_capture_size": plain(config.compilation_config.max_cudagraph_capture_size),
            "cudagraph_mode": plain(config.compilation_config.cudagraph_mode),
            "attention_backend": plain(config.attention_config.backend),
            "environment": environment("VLLM_"),
        }

    async def configure(self, setting: str, slo: Slo) -> None:
        """Set the token budget of a step; empty text is the engine's own. vLLM takes no targets."""
        del slo
        num_tokens = int(setting) if setting else self._most_tokens
        if num_tokens > self._most_tokens:
            raise ConfigError(
                f"vllm:{num_tokens} needs a larger engine: it was started with max_num_batched_tokens="
                f"{self._most_tokens}; raise --max-num-batched-tokens"
            )
        self._budget.num_tokens = num_tokens

    async def generate(self, request: TimedRequest) -> AsyncGenerator[Sequence[int], None]:
        """Serve a request."""
        params = self._sampling_params(
            temperature=request.params.temperature,
            max_tokens=request.params.max_tokens,
            ignore_eos=request.params.ignore_eos,
            output_kind=self._delta,
            detokenize=False,
        )
        prompt = self._tokens_input(list(request.prompt_token_ids))
        try:
            async with aclosing(self._engine.generate(prompt, params, f"peer-{next(self._names)}")) as outputs:
                async for output in outputs:
                    yield output.outputs[0].token_ids
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's core has died, its messages say why: {error}") from error

    def counters(self) -> Mapping[str, Any]:
        """Empty: vLLM's statistics are off."""
        return {}

    async def close(self) -> None:
        """End vLLM's core, which frees its memory."""
        self._engine.shutdown()
        self._budget.close()


def engine_arguments(setup: Setup, folder: Path) -> dict[str, Any]:
    """The arguments of vLLM's ``AsyncEngineArgs``; writes a preset's model folder."""
    return prepare_model(setup, folder, writes_fp8=False) | {
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "dtype": setup.dtype,
        "seed": setup.seed,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "gpu_memory_utilization": setup.gpu_memory_utilization,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "tensor_parallel_size": setup.tensor_parallel_size,
        "enable_prefix_caching": setup.shares_prefixes,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "scheduler_cls": SCHEDULER,
        "worker_extension_cls": WORKER,
        "additional_config": {CONFIG_KEY: str(_budget_file(folder))},
    }


def _budget_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve() / "token_budget"
