"""Small engines on the CPU, and ways to steer them, for the end-to-end tests; some predict, some are asynchronous."""

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bullet_graph import AsyncEngine, Engine, RequestOutput, SamplingParams, Slo
from bullet_graph.kernels.sampler import SamplingState
from bullet_graph.runtime.cpu import CpuExecutor
from bullet_graph.runtime.step import Placement, Step

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the network of ``transformers`` that it holds."""

    folder: Path
    network: PreTrainedModel

    def logits(self, ids: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """[len(ids), vocab_size] in float32, or only some rows of it."""
        kept = {} if rows is None else {"logits_to_keep": torch.tensor(rows)}
        with torch.inference_mode():
            return self.network(torch.tensor([list(ids)]), **kept).logits[0].float()

    def greedy(
        self, prompt: Sequence[int], count: int, masked_until: Mapping[int, int] | None = None
    ) -> tuple[int, ...]:
        """Greedy tokens; ``masked_until`` gives, for a token, the first output index at which it may occur."""
        return _greedy(Model(self.folder, self.network), tuple(prompt), count, tuple((masked_until or {}).items()))


def prompt_scores(engine: Engine, prompt: Sequence[int]) -> Tensor:
    """The engine's log-probabilities of a prompt's tokens, but for the first."""
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs if entry is not None])


@functools.lru_cache(1000)
def _greedy(
    model: Model, prompt: tuple[int, ...], count: int, masked_until: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    ids = list(prompt)
    for index in range(count):
        scores = model.logits(ids)[-1].clone()
        for token, first in masked_until:
            if index < first:
                scores[token] = -math.inf
        ids.append(int(scores.argmax()))
    return tuple(ids[len(prompt) :])


def make_engine(model: str | Path = "tiny", **settings: object) -> Engine:
    """An engine that is quick to build and takes little memory."""
    defaults = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 8}
    return Engine(str(model), **(defaults | settings))  # type: ignore[arg-type]


def block_bytes(model: Model) -> int:
    """Bytes that a block of the model's KV cache takes."""
    with make_engine(model.folder) as engine:
        return engine.memory.kv_cache_bytes // engine.memory.num_kv_blocks


def run_to_end(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; each request's outputs in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(output: RequestOutput) -> list[tuple[int, ...]]:
    """Token ids of each sample."""
    return [completion.token_ids for completion in output.outputs]


def force_tokens(monkeypatch: pytest.MonkeyPatch, token_ids: Sequence[int], prompt_tokens: int) -> None:
    """Make every sequence sample these tokens, then the last again; all prompts have ``prompt_tokens``."""
    last = len(token_ids) - 1

    def scripted(logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
        del logits
        chosen = torch.tensor(
            [token_ids[min(position - prompt_tokens, last)] for position in positions.tolist()], dtype=torch.int32
        )
        state.last_token[slots.long()] = chosen
        return chosen

    monkeypatch.setattr("bullet_graph.runtime.cpu.sample", scripted)


def before_launch(monkeypatch: pytest.MonkeyPatch, act: Callable[[Step, Placement], object]) -> None:
    """Call ``act`` before each launch on the CPU."""
    launch = CpuExecutor.launch

    def acting(executor: CpuExecutor, step: Step, placement: Placement) -> int:
        act(step, placement)
        return launch(executor, step, placement)

    monkeypatch.setattr(CpuExecutor, "launch", acting)


# ---- engines whose planner predicts, and ways into the middle of their prefills ----

POLICIES = ("serial", "mixed", "mixed:16", "auto")
LENGTHS = (4, 1, 40, 90, 17, 33)
PROMPTS = [[(7 * i + 3 * j) % 300 for j in range(length)] for i, length in enumerate(LENGTHS)]
PROMPT = PROMPTS[2]
EASY = Slo(ttft_ms=1e6, tpot_ms=1e6)
IMPOSSIBLE = Slo(ttft_ms=1e-6, tpot_ms=1e-6)

Launches = list[tuple[Step, Placement]]

short_slices = pytest.mark.usefixtures("one_layer_at_a_time")


def make(model: Model | str | Path = "tiny", policy: str = "auto", **settings: object) -> Engine:
    folder = model.folder if isinstance(model, Model) else model
    return make_engine(folder, policy=policy, perf_table="roofline", **settings)


def step_into_a_prefill(engine: Engine, launches: Launches) -> None:
    """Step until a chunk has some of its layers behind it, and others before it."""
    while not (launches and launches[-1][1].last_layer is not None):
        engine.step()


def fail_launches(
    monkeypatch: pytest.MonkeyPatch, num_good: int, error: BaseException, lane: str | None = None
) -> None:
    """Let the executor refuse the launch, on a lane or on any, that follows so many good ones."""
    calls = iter(range(num_good))

    def fail(_: Step, placement: Placement) -> None:
        if lane in (None, placement.lane) and next(calls, None) is None:
            raise error

    before_launch(monkeypatch, fail)


# ---- asynchronous engines ----


class Gate:
    """Lets an executor launch so many steps, and the others once it is opened."""

    def __init__(self, num_steps: int) -> None:
        self._permits = threading.Semaphore(num_steps)

    def wait(self) -> None:
        assert self._permits.acquire(timeout=30)

    def open(self) -> None:
        self._permits.release(100_000)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "bullet-graph-engine"]


async def collect(
    engine: AsyncEngine, prompt: object, params: SamplingParams = GREEDY, **options: object
) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]  # type: ignore[arg-type]


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing to do; all blocks must be free then."""
    deadline = time.monotonic() + 20
    while engine.engine.has_unfinished_requests() or engine.engine.stats().kv_blocks_used:
        assert time.monotonic() < deadline, engine.engine.stats()
        await asyncio.sleep(0.002)
    assert engine.engine.stats().num_running == engine.engine.stats().num_waiting == 0
