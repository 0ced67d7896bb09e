"""Which replica takes a request, and how many replicas there are: Ray Serve's router and autoscaling policy."""

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json
from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_CHARACTERS, _TOKENS = 64, 16
"""Of one block of a prefix: about a KV block of 16 tokens."""
_MOST_BLOCKS = 2048
"""Of a request: later ones decide nothing."""


def prefix_keys(body: bytes) -> list[bytes]:
    """A key for each block of a request's prompt, which stands for the prompt up to its end; none for other bodies.

    The first follows ``cache_salt``, tools and template variables, as requests that differ there share no KV blocks.
    """
    try:
        request = from_json(body)
    except ValueError:
        return []
    if not isinstance(request, dict):
        return []
    prompt, messages = request.get("prompt"), request.get("messages")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    parts: list[bytes] = []
    if isinstance(prompt, list):
        parts = [to_json(prompt[i : i + _TOKENS]) for i in range(0, len(prompt) - _TOKENS + 1, _TOKENS)]
    else:
        text = prompt if isinstance(prompt, str) else ""
        if isinstance(messages, list):
            said = (each if isinstance(each, dict) else {} for each in messages)
            text = "".join(f"[{each.get('role')}]{_text(each.get('content'))}" for each in said)
        ends = range(0, min(len(text), _MOST_BLOCKS * _CHARACTERS) - _CHARACTERS + 1, _CHARACTERS)
        parts = [text[i : i + _CHARACTERS].encode("utf-8", "surrogatepass") for i in ends]
    shared = [request.get(name) for name in ("cache_salt", "tools", "chat_template_kwargs")]
    key, keys = to_json([*shared, prompt is None]), list[bytes]()
    for part in parts[:_MOST_BLOCKS]:
        key = hashlib.blake2b(key + part, digest_size=16).digest()
        keys.append(key)
    return keys


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


class PrefixHolders:
    """Which replicas have computed which prefixes, as far as requests tell.

    Blocks that were used least recently are forgotten, and the end of a prompt before its beginning.
    """

    def __init__(self, most_blocks: int = 1 << 18) -> None:
        self._holders: OrderedDict[bytes, set[Any]] = OrderedDict()
        self._most_blocks = most_blocks

    def depths(self, keys: Sequence[bytes]) -> Counter[Any]:
        """The number of first blocks that each replica holds; those without one are left out."""
        depths: Counter[Any] = Counter()
        alive: set[Any] | None = None
        used = 0
        for key in keys:
            found = self._holders.get(key, set())
            alive = set(found) if alive is None else alive & found
            if not alive:
                break
            used += 1
            depths.update(alive)
        for key in reversed(keys[:used]):
            self._holders.move_to_end(key)
        return depths

    def add(self, keys: Sequence[bytes], replica: Any) -> None:
        """Note that a replica computes a prompt."""
        for key in reversed(keys):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._most_blocks:
            self._holders.popitem(last=False)

    def keep(self, replicas: set[Any]) -> None:
        """Forget all other replicas."""
        for key, found in list(self._holders.items()):
            found &= replicas
            if not found:
                del self._holders[key]


def ranked(replicas: Sequence[Any], depths: Mapping[Any, int], load: Mapping[Any, int], slack: int) -> list[Any]:
    """Replicas in the order in which a request should try them.

    First the one that holds most of its prompt, unless it has ``slack`` requests more than the one with the fewest;
    then those with fewer requests.
    """
    by_load = sorted(replicas, key=lambda each: (load.get(each, 0), -depths.get(each, 0)))
    if not by_load:
        return []
    least = load.get(by_load[0], 0)
    holders = [each for each in by_load if depths.get(each, 0) and load.get(each, 0) - least <= slack]
    best = max(holders, key=lambda each: depths[each], default=by_load[0])
    return [best, *(each for each in by_load if each is not best)]


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that holds most of its prompt, as long as that one is not too busy.

    The third argument of a request are its :func:`prefix_keys`. ``slack`` is set by ``request_router_kwargs``.
    """

    def initialize_state(self, slack: int = 16) -> None:
        self._slack = slack
        self._prefixes = PrefixHolders()
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id: each for each in candidate_replicas}
        depths = self._prefixes.depths(_keys_of(pending_request))
        return [[replicas[each]] for each in ranked(list(replicas), depths, self._running, self._slack)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        del result
        self._running[replica_id] += 1
        self._prefixes.add(_keys_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        del internal_request_id
        self._running[replica_id] = max(self._running[replica_id] - 1, 0)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = set(self._replica_id_set)
        super().update_replicas(replicas)
        now = set(self._replica_id_set)
        if before - now:
            self._prefixes.keep(now)
            for gone in before - now:
                del self._running[gone]


def _keys_of(request: PendingRequest | None) -> Sequence[bytes]:
    return request.args[2] if request is not None and len(request.args) > 2 else ()


class Scaler:
    """The number of replicas by the engines' own figures, which each reports as ``record_autoscaling_stats``.

    Replicas × the largest of: waiting sequences per replica ÷ ``target_queue_len``; predicted TTFT ÷
    ``target_ttft_ms`` (without a performance table it is 0); running sequences ÷ 80 % of ``max_num_seqs``. Serve
    applies the delays and the bounds. While it has no figures, the number stays.
    """

    def __init__(self, target_queue_len: float, target_ttft_ms: float, max_num_seqs: int) -> None:
        self._targets = {
            "waiting": target_queue_len,
            "predicted_ttft_ms": target_ttft_ms,
            "running": 0.8 * max_num_seqs,
        }

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        found = context.aggregated_metrics or {}
        loads = [
            sum(values.values()) / len(values) / target
            for name, target in self._targets.items()
            if (values := found.get(name))
        ]
        if not loads:
            return context.target_num_replicas, {}
        # One step at most doubles: a queue of one replica says nothing about ten.
        wanted = context.current_num_replicas * min(max(loads), 2.0)
        return max(math.ceil(wanted), 1), {}
