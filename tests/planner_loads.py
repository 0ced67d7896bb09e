"""Loads for planner tests, and a planner over a table like an H200's."""

import math
from functools import cache

from fakes.perf_tables import LLAMA_8B, h200_table

from bullet_graph.config import Policy
from bullet_graph.perf.performance import attention_pairs
from bullet_graph.perf.predict import TableModel
from bullet_graph.planner.plan import ChunkLoad, DecodeLoad, Load, Option, Plan, PolicyName, PromptLoad
from bullet_graph.planner.planner import Planner

LAYERS = 32
MAX_CHUNK = 8192
POLICIES = ("serial", "serial:512", "mixed", "mixed:512", "split", "split:48", "auto")


@cache
def model() -> TableModel:
    return TableModel(h200_table(), LLAMA_8B)


def planner(policy: str = "auto", *, max_chunk_tokens: int = MAX_CHUNK, lone_rows: int = 1) -> Planner:
    sizes, of = model().decode_sms, Policy.parse(policy)
    return Planner(of, max_chunk_tokens=max_chunk_tokens, decode_sms=sizes, model=model(), lone_rows=lone_rows)


def modelless(policy: str) -> Planner:
    return Planner(Policy.parse(policy), max_chunk_tokens=2048, decode_sms=(), model=None)


def decoding(
    batch_size: int,
    *,
    context: int = 1000,
    tpot: float = math.inf,
    budget: float | None = None,
    slack: float | None = None,
) -> DecodeLoad:
    budget = tpot if budget is None else budget
    return DecodeLoad(batch_size, batch_size * context, budget, budget if slack is None else slack, tpot)


def load_of(
    decode: DecodeLoad | None = None,
    *prompts: int,
    ttft_ms: float = math.inf,
    chunk: ChunkLoad | None = None,
    now_s: float = 50.0,
) -> Load:
    waiting = tuple(PromptLoad(tokens, 0, now_s + ttft_ms / 1e3) for tokens in prompts)
    return Load(now_s, decode, waiting, sum(prompts), chunk)


def chunk_of(tokens: int, layers_left: int, deadline_s: float = math.inf) -> ChunkLoad:
    return ChunkLoad(tokens, attention_pairs(tokens), layers_left, deadline_s)


def chosen(plan: Plan) -> Option:
    """The option that the plan follows."""
    tpcs = plan.partition.decode_tpcs
    sms = None if tpcs is None else 2 * tpcs
    matching = [
        o
        for o in plan.options
        if (o.policy, o.decode_sms, o.slice_layers) == (plan.policy, sms, plan.slice_layers)
        and plan.chunk_tokens in (0, o.chunk_tokens)
    ]
    assert matching
    return matching[-1]


def correct(of: Planner, policy: PolicyName, *, steps: float = 1.0, slices: float = 1.0) -> None:
    """Forwards of every size take so many times what the model says: those with decode rows, and those without."""
    for rows in (1 << bits for bits in range(6, 15)):
        of.corrections.update({(policy, "step", rows): steps, (policy, "slice", rows): slices})
