"""Which replica takes a request, and how many replicas there are: Ray Serve's router and autoscaling policy."""

import math
from collections import Counter
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bullet_graph.routing import PrefixHolders, ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that holds most of its prompt, as long as that one is not too busy.

    A choice counts at once: a replica accepts a request only later, and requests with one prompt may come together.
    A request's third argument is its ``forward.prompt_keys``; ``request_router_kwargs`` has ``slack``.
    """

    queue_len_response_deadline_s = 1.0  # after Ray's 0.1 s, a busy replica would lose its prompts to another

    def initialize_state(self, slack: int = 16) -> None:
        self._slack = slack
        self._prefixes: PrefixHolders[ReplicaID] = PrefixHolders()
        self._running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id: each for each in candidate_replicas}
        keys = pending_request.args[2] if pending_request is not None and len(pending_request.args) > 2 else ()
        order = ranked(list(replicas), self._prefixes, keys, self._running.__getitem__, self._slack)
        self._prefixes.add(keys, order[0])
        return [[replicas[each]] for each in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._running[replica_id] += 1

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
        return max(math.ceil(context.current_num_replicas * min(max(loads), 2.0)), 1), {}
