"""The planner's constants in one value, each with its unit and its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTuning:
    """Constants of the planner. Older measurements in bench/ were made with other values."""

    # Rows of the largest chunk to aim at on a prefill lane of the whole GPU; a part of the GPU takes its share. A
    # chunk's prompts get their first token when it ends, and no other can begin before.
    lane_chunk_tokens: int = 2048
    # The largest mixed chunk within a time limit is sought in steps of this many prompt rows.
    row_step: int = 16
    # The queue is halved down to this many prompt rows: with fewer, reading the weights takes all the time.
    least_chunk_tokens: int = 256
    # Most rows of a forward without a table: with 64 of them decode rows, an 8B model on an H200 needs 17 ms.
    fixed_chunk_tokens: int = 512
    # A burst, or a forward without a time limit, has a multiple of this many rows, unless it takes all prompt rows. On
    # two H200s, 256, 384, 512, 640 and 768 rows of Llama-3.1-70B in FP8 take 26, 35, 42, 51 and 58 ms.
    tile_rows: int = 256
    floor_tokens: int = 64  # prompt rows of a mixed step that cannot hold its target anyway
    # Forwards paced to last for the longest output have a multiple of ``paced_rows`` rows (prompt and decode). Other
    # numbers waste part of a wave of tiles: in FP8, 1,226 rows take 7 % longer per row than 1,024 (bench/LOG.md).
    paced_rows: int = 1024
    paced_prompt_rows: int = 512  # however many rows decode, so that the batch keeps growing
    split_slice_ms: float = 5.0  # slices beside decode aim at this time, so that the split can soon change
    split_launch_ms: float = 1.6  # host time to launch one slice; the next decode step waits for the host
    solo_slice_ms: float = 8.0  # slices aim at this time when nothing decodes
    # Intervals are planned up to this many times the tightest TPOT target; a larger lead is kept.
    budget_cap: float = 1.15
    # A burst lasts at most this many times the tightest TPOT target; with 2, half of its gain is lost (bench/LOG.md).
    burst_targets: float = 3.0
    urgent_margin: float = 1.3  # a prompt is urgent if this many times the prefill up to it ends after its deadline
    urgent_throughput: float = 0.95  # least share of the highest throughput, for the sake of urgent prompts
    # Prefill may pause this long in favour of TPOT targets, then for every second tick at most.
    pause_patience_s: float = 1.0
    # Worth of a chunk on the prefill lane relative to rows of a mixed step. Its prompts wait for the chunk's end and
    # then for a step or two before they decode. At 1, a third fewer code requests met 8 ms per token (bench/LOG.md).
    lane_share: float = 0.75
    # Without TPOT targets, prefill beside decode must bring this many times the throughput of the phases in turn.
    # A batch that grows first has cheaper steps: simulated, all at once, conv 24.0 → 22.6 s, code 23.7 → 23.1 s.
    beside_gain: float = 1.03
    # Weight of one value in the moving averages of prefill rate and corrections.
    rate_weight: float = 0.1
    correction_weight: float = 0.05
    correction_limit: float = 2.0  # corrections stay within this factor of 1, and so does one measurement
    # A lead or lag is spread over this many tokens: soon enough for short outputs, no jumps.
    budget_horizon_tokens: int = 32
    # A long wait must be made good within this many tokens: an output may end early.
    slack_horizon_tokens: int = 64
    # A sequence is lost if it cannot be back on target within this many tokens, decoding alone.
    lost_horizon_tokens: int = 256
    # Share of the tightest TPOT target that a decode step alone may take once another prompt runs; mixed forwards take
    # longer. Simulated, chats at 30/s on an H100: 0.75 → 0.93 on time; 0.85 and 0.95 give 0.91 and 0.92 (bench/LOG.md).
    room_share: float = 0.92
    # Reserve of each sequence, as a share of the time due for up to ``reserve_tokens`` tokens. A target missed by
    # little is missed, but errors of single steps even out.
    reserve_share: float = 0.03
    reserve_tokens: int = 64
    reserve_ms: float = 3.0  # besides: one late token weighs on the TPOT of a short output
    # A prompt that is late has a second deadline, at this many times what its target allows; it counts as much as a
    # target. Simulated, conversations at 20/s: p99 of TTFT 10.9 → 5.9 s for 1.2 points of requests on time. With 4
    # instead of 12 it costs 1.9 points, with 16 p99 is 7.9 s.
    second_allowances: float = 12.0
    # Then it should end within this time, or this many times what its target allows if that is longer.
    patience_s: float = 20.0
    patience_allowances: float = 20.0
    # Prompts that miss the second deadline too get at most this share of prefill. They go first in this share of all
    # periods, which are short beside a TTFT target.
    late_share: float = 0.5
    late_period_s: float = 0.03125
    # While no prompt waits, decode steps begin at most this share of the TPOT target apart, and at most this many times
    # a step of one row: where keys take most of a step, slower steps save little energy, but sequences stay longer.
    unhurried_share: float = 0.85
    unhurried_ratio: float = 1.7


TUNING = PlannerTuning()
