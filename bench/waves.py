"""What chunks that fill whole waves of thread blocks gain for prefill, on the whole GPU and on partitions.

    python bench/waves.py --output-json bench/results/h200/waves.json

A kernel runs in waves of as many thread blocks as the SMs hold, so a chunk slightly too long pays for a wave that is
almost empty. For the prefill lane of each size two things are measured. The scan: one forward, of chunks 64 tokens
apart around 16 tokens for each SM, where the matrix products of 128×256 tiles fill their waves by arithmetic. The
prompts: whole prompts of `--prompt` tokens in chunks of a fixed size, and in chunks of one and two such waves. All
are measured in short bursts in shuffled order, several times over, so that they have met the same clocks.
"""

import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from bullet_graph.cli.options import parse_sizes
from bullet_graph.config import EngineConfig
from bullet_graph.partition.spec import SmPartition, partition_of
from bullet_graph.perf.energy import DeviceMonitor
from bullet_graph.perf.profile_plan import WAVE_TOKENS_PER_SM
from bullet_graph.perf.profile_point import ProfilePoint
from bullet_graph.perf.provenance import collect_provenance
from bullet_graph.perf.traffic import DecoderShape
from bullet_graph.perf.waves import wave_chunk_tokens
from bullet_graph.runtime.bursts import Workbench, open_workbench, run_burst
from bullet_graph.runtime.profile_setup import prepare_profile

FIXED_CHUNKS = (512, 1024, 2048)
SCAN_STEP, SCAN_REACH = 64, 4


@dataclass(frozen=True)
class Case:
    """Prefill of ``prompt`` tokens in chunks of ``chunk`` on ``sms`` SMs, beside a decode lane of the others."""

    sms: int
    chunk: int
    prompt: int

    def chunks(self) -> list[ProfilePoint]:
        starts = range(0, self.prompt, self.chunk)
        return [
            ProfilePoint("prefill", tokens=min(self.chunk, self.prompt - start), cached_tokens=start)
            for start in starts
        ]


@dataclass(frozen=True)
class Rate:
    """Measured prefill rate of a case.

    Attributes:
        tokens_per_s: median of the repeats.
    """

    sms: int
    chunk: int
    prompt: int
    tokens_per_s: float
    repeats: tuple[float, ...]


def cases_for(sms: int, prompt: int, shape: DecoderShape) -> list[Case]:
    """Single forwards of the scan, and prompts in chunks: fixed, waves, and what the arithmetic of waves chooses."""
    wave = WAVE_TOKENS_PER_SM * sms
    scan = [wave + SCAN_STEP * step for step in range(-SCAN_REACH, SCAN_REACH + 1)]
    singles = [Case(sms, tokens, tokens) for tokens in sorted({*FIXED_CHUNKS, *scan})]
    chunks = sorted({*FIXED_CHUNKS, wave, 2 * wave, wave_chunk_tokens(max(FIXED_CHUNKS), sms, shape), prompt})
    return singles + [Case(sms, chunk, prompt) for chunk in chunks if chunk <= prompt]


def measure(bench: Workbench, case: Case, burst_s: float) -> float:
    """Tokens a second."""
    partition = (
        SmPartition()
        if case.sms == bench.num_sms
        else partition_of(bench.num_sms - case.sms, num_sms=bench.num_sms)
    )
    (prompt_ms,) = run_burst([bench.prefill_lane(case.chunks(), partition)], burst_s)
    return case.prompt / prompt_ms * 1e3


def print_gains(rates: Sequence[Rate], prompt: int) -> None:
    """Whole prompts by chunk size, against one wave."""
    table = Table("SMs", "chunk", "tokens/s", "spread", "one wave against it", title=f"Prompts of {prompt}")
    for sms in sorted({rate.sms for rate in rates}, reverse=True):
        wave = WAVE_TOKENS_PER_SM * sms
        of_sms = {rate.chunk: rate for rate in rates if rate.sms == sms and rate.prompt == prompt}
        for chunk, rate in of_sms.items():
            gain = "" if wave not in of_sms else f"{of_sms[wave].tokens_per_s / rate.tokens_per_s - 1:+.1%}"
            spread = (max(rate.repeats) - min(rate.repeats)) / rate.tokens_per_s
            mark = f"{chunk} ({chunk // wave} wave)" if chunk % wave == 0 else str(chunk)
            table.add_row(str(sms), mark, f"{rate.tokens_per_s:,.0f}", f"{spread:.1%}", gain)
        table.add_section()
    Console().print(table)


def print_scan(rates: Sequence[Rate]) -> None:
    """Single forwards around a wave."""
    table = Table("SMs", "tokens", "from a wave", "tokens/s", title="One forward")
    for rate in rates:
        if rate.chunk == rate.prompt:
            offset = rate.chunk - WAVE_TOKENS_PER_SM * rate.sms
            if abs(offset) <= SCAN_STEP * SCAN_REACH:
                table.add_row(str(rate.sms), str(rate.chunk), f"{offset:+d}", f"{rate.tokens_per_s:,.0f}")
    Console().print(table)


@click.command()
@click.option("--model", default="llama-3.1-8b", show_default=True)
@click.option("--partition-backend", default="auto", show_default=True)
@click.option("--decode-sms", default="16,32,48,64,80", show_default=True, callback=parse_sizes)
@click.option("--prompt", default=8192, show_default=True, help="Tokens of a prompt.")
@click.option("--repeats", default=3, show_default=True, help="Bursts of each case.")
@click.option("--burst-s", default=0.3, show_default=True, help="Length of a burst; at least three prompts.")
@click.option("--seed", default=0, show_default=True)
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False, writable=True), required=True)
@torch.inference_mode()
def main(
    model: str,
    partition_backend: str,
    decode_sms: tuple[int, ...],
    prompt: int,
    repeats: int,
    burst_s: float,
    seed: int,
    output_json: Path,
) -> None:
    """Measure every chunk size on every lane."""
    config = EngineConfig(
        model=model,
        device="cuda",
        max_num_seqs=1,
        max_num_batched_tokens=prompt,
        partition_backend=partition_backend,  # type: ignore[arg-type]
        decode_sms=decode_sms,
        seed=seed,
    )
    prepared = prepare_profile(config)
    with open_workbench(prepared, progress=True) as opened:
        bench = opened.bench
        lanes = (bench.num_sms, *(bench.num_sms - size for size in decode_sms))
        cases = [case for sms in lanes for case in cases_for(sms, prompt, prepared.runtime.model)]
        measured: dict[Case, list[float]] = {case: [] for case in cases}
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        measure(bench, Case(bench.num_sms, prompt, prompt), 3.0)  # to sustained clocks
        with (
            DeviceMonitor.for_gpu(uuid) as monitor,
            tqdm(total=repeats * len(cases), unit="burst", desc="Measuring") as bar,
        ):
            for number in range(repeats):
                random.Random(f"{seed}/{number}").shuffle(cases)
                for case in cases:
                    measured[case].append(measure(bench, case, burst_s))
                    bar.update()
        backend = opened.partition_backend
    rates = [
        Rate(case.sms, case.chunk, case.prompt, statistics.median(repeats_), tuple(repeats_))
        for case, repeats_ in measured.items()
    ]
    print_scan(rates)
    print_gains(rates, prompt)
    report = {
        "model": model,
        "backend": backend,
        "burst_s": burst_s,
        "rates": [dataclasses.asdict(rate) for rate in rates],
        "device": dataclasses.asdict(monitor.report),
        "provenance": dataclasses.asdict(collect_provenance("cuda")),
    }
    output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
