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
- A preset's weights are vLLM's dummies, below 0.001. FP8 leaves zeros of those, and under a power cap products of zeros
  are faster: of an FP8 preset, vLLM reads this engine's dummies as a checkpoint.
"""

import dataclasses
import importlib
import itertools
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.peers.budget import CONFIG_KEY, TokenBudget
from bench.peers.systems import Setup
from bullet_graph.engine.replay import TimedRequest
from bullet_graph.errors import ConfigError, DeviceError, EngineDeadError
from bullet_graph.models.config import ModelConfig
from bullet_graph.models.presets import resolve_model
from bullet_graph.models.rope import Llama3RopeScaling
from bullet_graph.models.weights import checkpoint_views, fill_dummy, zero_weights
from bullet_graph.perf.provenance import installed_version, without_home
from bullet_graph.perf.roofline import FP8_BLOCK, Fp8Weights
from bullet_graph.slo import Slo

SCHEDULER = "bench.peers.vllm_scheduler.BudgetedScheduler"

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"} | {
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

_WEIGHTS = "model.safetensors"
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # This process has a CUDA context by then, which a fork would not survive.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class VllmSystem:
    """A running vLLM. Its core is a process of its own; its front end runs on this process's event loop.

    Args:
        setup: the settings that all systems share.
        folder: for a preset's ``config.json`` and the budget's file. vLLM finds earlier compilations by this path.
        options: further arguments of ``AsyncEngineArgs``, or other values for those set here.
        log: vLLM's messages are appended to this file; None shows its warnings on stderr.

    Raises:
        DeviceError: vLLM is not installed.
        ConfigError: it has no such option, or refuses the settings.
    """

    def __init__(
        self, setup: Setup, folder: Path, options: Mapping[str, Any] | None = None, log: Path | None = None
    ) -> None:
        require_vllm()
        os.environ.update(_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO" if log else "WARNING"})
        arguments = engine_arguments(setup, folder) | dict(options or {})
        self._names = itertools.count()
        self._most_tokens: int = arguments["max_num_batched_tokens"]
        self._budget = TokenBudget.create(_budget_file(folder), self._most_tokens)
        with _output_to(log):
            vllm = importlib.import_module("vllm")
            engine_args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
            self._require_known(options or {}, engine_args)
            try:
                self._engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(
                    engine_args(**arguments)
                )
            except (ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"vLLM did not start: {error}. Its own messages say more (--vllm-log FILE keeps them all)"
                ) from error
        (folder / _WEIGHTS).unlink(missing_ok=True)
        self._tokens_input = importlib.import_module("vllm.inputs").tokens_input
        sampling = importlib.import_module("vllm.sampling_params")
        self._sampling_params, self._delta = sampling.SamplingParams, sampling.RequestOutputKind.DELTA
        self._dead_error = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
        config = self._engine.vllm_config
        self.settings: Mapping[str, Any] = {
            "version": vllm.__version__,
            "engine_args": {name: _plain(value) for name, value in arguments.items()},
            "num_kv_blocks": _plain(config.cache_config.num_gpu_blocks),
            "kv_block_tokens": _plain(config.cache_config.block_size),
            "async_scheduling": _plain(config.scheduler_config.async_scheduling),
            "optimization_level": _plain(config.optimization_level),
            "max_cudagraph_capture_size": _plain(config.compilation_config.max_cudagraph_capture_size),
            "cudagraph_mode": _plain(config.compilation_config.cudagraph_mode),
            "attention_backend": _plain(config.attention_config.backend),
            "environment": _environment(),
        }

    @staticmethod
    def _require_known(options: Mapping[str, Any], engine_args: Any) -> None:
        known = {field.name for field in dataclasses.fields(engine_args)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"this vLLM has no option {', '.join(unknown)}: give arguments of its AsyncEngineArgs, such as "
                "max_cudagraph_capture_size=1024"
            )

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


def require_vllm() -> None:
    """Check that vLLM is installed, without importing it.

    Raises:
        DeviceError: it is not installed.
    """
    if installed_version("vllm") is None:
        raise DeviceError(
            "vllm is not installed in this environment: pip install vllm==0.26.0, or leave this system out"
        )


def engine_arguments(setup: Setup, folder: Path) -> dict[str, Any]:
    """The arguments of vLLM's ``AsyncEngineArgs``; writes a preset's model folder."""
    found = resolve_model(setup.model)
    is_dummy = setup.load_format == "dummy" or (setup.load_format == "auto" and found.folder is None)
    if found.folder is None:
        write_model_folder(folder, found.config)
        if is_dummy and found.config.fp8 is not None:
            write_weights(folder, found.config, setup.seed)
            is_dummy = False
    return {
        "model": str(found.hub_id or found.folder or folder),
        "load_format": "dummy" if is_dummy else "auto",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "dtype": setup.dtype,
        "seed": setup.seed,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "gpu_memory_utilization": setup.gpu_memory_utilization,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "enable_prefix_caching": setup.shares_prefixes,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "scheduler_cls": SCHEDULER,
        "additional_config": {CONFIG_KEY: str(_budget_file(folder))},
    }


def hf_config(model: ModelConfig) -> dict[str, Any]:
    """The JSON that ``load_model_config`` reads back as ``model``, with the names of transformers 5."""
    rope: dict[str, Any] = {"rope_theta": model.rope.theta, "rope_type": "default"}
    if isinstance(model.rope.scaling, Llama3RopeScaling):
        rope |= {"rope_type": "llama3"} | dataclasses.asdict(model.rope.scaling)
    others: dict[str, Any] = {} if model.fp8 is None else {"quantization_config": quantization_config(model.fp8)}
    if model.num_experts:
        others |= dict.fromkeys(("num_experts", "num_local_experts"), model.num_experts) | {
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_intermediate_size,
            "norm_topk_prob": model.renormalize_experts,
        }
    return others | {
        "architectures": [model.architecture],
        "model_type": _MODEL_TYPES[model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "dtype": model.dtype,
        "eos_token_id": list(model.eos_token_ids) or None,
    }


def quantization_config(fp8: Fp8Weights) -> dict[str, Any]:
    """As compressed-tensors writes it: scales of channels and tokens, or of blocks and groups of 128 columns."""
    blocks = {"strategy": "block", "block_structure": [FP8_BLOCK] * 2} if fp8.blocks else {"strategy": "channel"}
    groups = {"strategy": "group", "group_size": FP8_BLOCK} if fp8.blocks else {"strategy": "token"}
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | blocks,
        "input_activations": number | groups | {"dynamic": True},
    }
    told = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return told | {"ignore": ["lm_head", "re:.*gate$"]}


def write_model_folder(folder: Path, model: ModelConfig) -> Path:
    """Write a model folder that has a shape and no weights, and return it; one that is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=2) + "\n", encoding="utf-8")
    return folder


def write_weights(folder: Path, model: ModelConfig, seed: int, device: str = "cuda") -> None:
    """Write this engine's dummy weights as a checkpoint."""
    weights = zero_weights(model, dtype=getattr(torch, model.dtype), device=torch.device(device))
    list(fill_dummy(model, weights, seed=seed))
    save_file(dict(checkpoint_views(model, weights)), folder / _WEIGHTS)
    del weights
    torch.cuda.empty_cache()


def _budget_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve() / "token_budget"


@contextmanager
def _output_to(log: Path | None) -> Iterator[None]:
    """Redirect stdout and stderr of this process and its children to a file; None: stdout to stderr.

    The descriptors too, which vLLM's core inherits: stdout is left for the results.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Never closed: vLLM's loggers keep it.
    stream = sys.stderr if log is None else log.open("a", buffering=1, encoding="utf-8")
    kept = os.dup(1), os.dup(2)
    target = os.dup(2 if log is None else stream.fileno())
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        with redirect_stdout(stream), redirect_stderr(stream):
            yield
    finally:
        for descriptor, number in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)


def _plain(value: Any) -> Any:
    """A value for JSON; text for one of vLLM's own types, and no home folder in text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value if value is None or type(value) in (bool, int, float) else without_home(str(value))


def _environment() -> dict[str, str]:
    """vLLM's environment variables, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("VLLM_") and not name.endswith(("_KEY", "_TOKEN"))
    }
