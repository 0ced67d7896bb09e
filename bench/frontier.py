"""On-time share against p99 of TTFT, simulated (llama-3.1-8b, H200): the planner, hindsight, and a bound for any order.

    python -m bench.frontier --workload "synthetic:conv~21.2@ttft:500 tpot:15" --output-json FILE

Second deadlines are multiples of the target. The bound's server is always as fast as the runs' fastest WINDOW_S; it has
no chunks, and knows decode by its speed alone. Plans by hindsight are for slower ones, and end MARGIN_S sooner.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from scipy import optimize, sparse

from bench.record import write_report
from bullet_graph.cli.bench.sweep_runner import WorkloadSpec, at_rate
from bullet_graph.cli.simulate import Simulator
from bullet_graph.config import EngineConfig, Policy
from bullet_graph.planner.tuning import TUNING
from bullet_graph.workloads.workload import Arrivals, Times

SECONDS, SLOT_S, WINDOW_S = (1, 2, 4, 6, 8, 12, 16, 32), 0.1, 10.0
SPEEDS, MARGIN_S = (0.96, 0.92, 0.91, 0.905), 0.06


def best_shares(start_s: Times, work_s: Times, counted: Times, waits_s: Times) -> Times | None:
    """Shares [waits, prompts] of prompts, by arrival, to end within each wait, most ``counted`` in the first; or None.

    At most 1 % of the counted need the last. A preemptive server knows all arrivals. Slots lengthen waits. Prompts of
    one wait are due in order of arrival, so sums of work tell all."""
    slot, delays = (start_s / SLOT_S).astype(int), np.ceil(waits_s / SLOT_S - 1e-9).astype(int)
    n, kinds, end = len(work_s), len(delays), slot[-1] + delays.max() + 1
    each, join, same = sparse.eye_array(kinds), np.ones((1, kinds)), sparse.eye_array(kinds * end)
    step = sparse.eye_array(end) - sparse.eye_array(end, k=-1)
    came = sparse.kron(each, sparse.csr_array((-work_s, (slot, range(n))), shape=(end, n)))
    due = sparse.block_diag([sparse.eye_array(end, k=-delay) for delay in delays])
    whole, last = sparse.kron(join, sparse.eye_array(n)), np.append(np.zeros((kinds - 1) * n), counted)
    # Columns: shares, and sums of work that came, and that was done, by the end of each slot.
    below = [[None, -same, same], [None, due, -same], [None, None, -sparse.kron(each, step)]]
    below += [[None, None, sparse.kron(join, step)], [sparse.csr_array(last[None]), None, None]]
    equal = [[came, sparse.kron(each, step), None], [whole, None, sparse.csr_array((n, kinds * end))]]
    limits = np.concatenate([np.zeros(3 * kinds * end), np.full(end, SLOT_S), np.ceil([0.01 * (counted.sum() - 1)])])
    gain, sums = np.append(-counted, np.zeros((kinds - 1) * n + 2 * kinds * end)), [0] * (kinds * end) + [1] * n
    found = optimize.linprog(gain, sparse.block_array(below), limits, sparse.block_array(equal), sums)
    return None if found.x is None else found.x[: kinds * n].reshape(kinds, n)


@click.command(help=__doc__)
@click.option("--workload", required=True, help="NAME~RATE@TARGETS")
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
def main(workload: str, output_json: Path) -> None:
    spec = WorkloadSpec.parse(workload)
    config, at_once = EngineConfig(model="llama-3.1-8b", slo=spec.slo, max_num_seqs=1024), Arrivals(request_rate=np.inf)
    simulator = Simulator(gpu="h200", config=config, trace=spec.name, num_prompts=None, arrivals=at_once)
    requests, arrivals = at_rate(simulator.workload, at_once, spec.first_rate, smoke=False)
    start_s, tokens = arrivals.times(requests), np.array([request.prompt_tokens for request in requests.requests])
    counted, rows, most = 1.0 * (start_s >= arrivals.uncounted_s), list[dict[str, Any]](), 0.0

    def serve(**said: Any) -> Times:
        run = simulator.run(Policy.parse("auto"), arrivals, requests).result.fields(detailed=True)
        rows.append(said | {name: run[name] for name in ("slo_attainment", "p99_ttft_ms", "max_ttft_ms", "stable")})
        click.echo(rows[-1])
        return start_s + run["ttfts"]

    for second in SECONDS:
        with patch("bullet_graph.planner.slack.TUNING", replace(TUNING, second_allowances=second)):
            ends_s = serve(order="planner", second=second)
        sums, ends_s = np.append(0, np.cumsum(tokens[np.argsort(ends_s)])), np.sort(ends_s)
        most = max(most, float(np.max(sums[1:] - sums[np.searchsorted(ends_s, ends_s - WINDOW_S)])) / WINDOW_S)
    for second in SECONDS:
        waits_s = np.array([1, second, TUNING.patience_s * 1e3 / config.slo.ttft_ms]) * config.slo.ttft_ms / 1e3
        shares = best_shares(start_s, tokens / most, counted, waits_s)
        rows.append({"order": "bound", "second": second, "tokens_per_s": most})
        rows[-1]["slo_attainment"] = None if shares is None else float(shares[0] @ counted / counted.sum())
        for speed in SPEEDS:
            held = rows[-1].get("p99_ttft_ms", np.inf) <= second * config.slo.ttft_ms
            if held or (shares := best_shares(start_s, tokens / (speed * most), counted, waits_s - MARGIN_S)) is None:
                break
            due_s = {at: at + waits_s[kind:] - MARGIN_S for at, kind in zip(start_s, shares.argmax(0), strict=True)}

            def order(prompts: Any, now_s: float, ms: float, due_s: Any = due_s) -> list[int]:
                left = [[d for d in due_s[p.arrival_s] if now_s + p.tokens_left * ms / 1e3 <= d] for p in prompts]
                return sorted(range(len(left)), key=lambda i: (not prompts[i].resumed, min(left[i], default=np.inf)))

            with patch("bullet_graph.engine.prompt_queue.order_prompts", order):
                serve(order="hindsight", second=second, speed=speed)
    write_report(output_json, {**simulator.describe(), "workload": workload, "rows": rows}, device="cpu")


if __name__ == "__main__":
    main()
