"""The engine's loop without an engine, for the scheduler's tests."""

from collections import Counter, deque
from typing import Any

import numpy as np
from paged_device import PagedDevice, check_blocks, generate_alone

from bullet_graph.config import PromptOrder
from bullet_graph.engine.block_pool import BlocksRemoved, BlocksStored, chained_keys, root_key
from bullet_graph.engine.scheduler import Scheduler
from bullet_graph.engine.sequence import ScheduledStep, Sequence, Status
from bullet_graph.partition.masks import Lane
from bullet_graph.sampling_params import SamplingParams

BLOCK_TOKENS = 4
MAX_MODEL_LEN = 40

LANES_AT_ONCE = "lanes"
"""The policy of a loop that keeps decode rows on one lane and prompts on the other."""


class Loop:
    """Schedule, launch, retire, append, finish; checks everything on the way.

    Its policies are as simple as can be: ``serial``, ``mixed``, or both lanes at once.
    """

    def __init__(
        self,
        policy: str = "mixed",
        *,
        chunk_tokens: int = 16,
        max_num_seqs: int = 4,
        spare_blocks: int = 30,
        depth: int = 1,
        max_model_len: int = MAX_MODEL_LEN,
        prompt_order: PromptOrder = "arrival",
        window: int | None = None,
    ) -> None:
        self.policy, self.chunk_tokens, self.depth = policy, chunk_tokens, depth
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.window = window
        held_tokens = max_model_len
        if window is not None:
            # Room for one chunk, so that a second one in flight may have to wait.
            held_tokens = min(max_model_len, window + chunk_tokens + BLOCK_TOKENS)
        self.scheduler = Scheduler(
            num_blocks=1 + -(-held_tokens // BLOCK_TOKENS) + spare_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prompt_order=prompt_order,
            block_tokens=BLOCK_TOKENS,
            window=window,
            held_tokens=held_tokens,
            prefix_caching=window is None,
        )
        self.pool = self.scheduler.pool
        self.told: set[bytes] = set()
        """Keys that the prefix cache's listener has heard of, and that are not removed."""
        self.pool.listener = self.listen
        self.device = PagedDevice(BLOCK_TOKENS, window)
        self.in_flight: deque[tuple[int, ScheduledStep]] = deque()
        self.sequences: list[Sequence] = []
        self.aborted: set[Sequence] = set()
        self.first_admissions: list[Sequence] = []
        self.num_scored: Counter[Sequence] = Counter()
        self.num_found = 0
        """Tokens that sequences found in the prefix cache, after preemptions too."""
        self.ends: dict[Sequence, int] = {}
        """After how many tokens each sequence must have ended."""

    def add(
        self, prompt: int | list[int], max_tokens: int = 8, end: int | None = None, *, n: int = 1, **params: Any
    ) -> Sequence:
        """Queue the samples of a prompt, or of one of this length that shares nothing; return the first.

        ``end`` is after how many tokens an end-of-sequence token strikes.
        """
        index = len(self.sequences)
        if isinstance(prompt, int):
            prompt = list(range(10 * index, 10 * index + prompt))
        token_ids, params = np.array(prompt, dtype=np.int32), {"max_tokens": max_tokens} | params
        samples = [
            Sequence(f"request-{index}", i, token_ids, SamplingParams(**params), 100 + index + i, frozenset())
            for i in range(n)
        ]
        self.sequences += samples
        limit = min(max_tokens, self.max_model_len - len(prompt))
        self.ends |= dict.fromkeys(samples, limit if end is None else min(limit, end))
        self.scheduler.add(*samples)
        return samples[0]

    def abort(self, sequence: Sequence) -> None:
        self.aborted.add(sequence)
        self.scheduler.finish(sequence)

    def launch(self) -> ScheduledStep | None:
        scheduled = self.schedule()
        if scheduled is None:
            assert self.in_flight or not self.unfinished, "nothing runs, yet sequences wait"
            return None
        self.check_budget(scheduled)
        self.first_admissions += [s for s in scheduled.admitted if s not in self.first_admissions]
        for sequence, init in zip(scheduled.admitted, scheduled.step.admitted, strict=True):
            assert (sequence.slot, sequence.seed) == (init.slot, init.seed)
            assert sequence in scheduled.touched, "admitted without a chunk"
            self.check_found(sequence)
        for sequence, first, end in scheduled.scored:
            assert first == self.num_scored[sequence], "rows are scored once each, in order"
            self.num_scored[sequence] = end
        self.in_flight.append((self.device.launch(scheduled.step, self.lane_of(scheduled)), scheduled))
        return scheduled

    def listen(self, change: BlocksStored | BlocksRemoved) -> None:
        keys = set(change.keys)
        assert len(keys) == len(change.keys) > 0
        if isinstance(change, BlocksRemoved):
            assert keys <= self.told
            self.told -= keys
        else:
            parent = root_key(change.cache_salt) if change.parent is None else change.parent
            assert chained_keys(parent, change.token_ids, BLOCK_TOKENS) == [*change.keys]
            assert not keys & self.told
            self.told |= keys

    def check_found(self, sequence: Sequence) -> None:
        """What a sequence shares when it starts are full blocks of its own tokens, the last token excepted."""
        num_blocks = sequence.num_keyed
        assert num_blocks * BLOCK_TOKENS < sequence.num_known
        held = self.device.memory[self.pool.owned(sequence.slot)[:num_blocks]].ravel()
        assert held.tolist() == sequence.known_token_ids(0, num_blocks * BLOCK_TOKENS).tolist()
        self.num_found += num_blocks * BLOCK_TOKENS

    def lane_of(self, scheduled: ScheduledStep) -> Lane:
        return "prefill" if self.policy == LANES_AT_ONCE and scheduled.step.prefill else "decode"

    def schedule(self) -> ScheduledStep | None:
        prompts = self.scheduler.prompts(now_s=0.0, ms_per_token=0.0)
        schedule, decoding = self.scheduler.schedule, self.scheduler.decoding()
        if self.policy == LANES_AT_ONCE:
            # The lane with less in flight; the other where that has nothing to do.
            steps = [lambda: schedule(decode=decoding), lambda: self.schedule_prefill(prompts)]
            if sum(self.lane_of(s) == "decode" for _, s in self.in_flight) > len(self.in_flight) / 2:
                steps.reverse()
            return steps[0]() or steps[1]()
        if self.policy == "serial" and prompts:
            return schedule(prompts=prompts, chunk_tokens=self.chunk_tokens)
        floor = min(self.chunk_tokens, BLOCK_TOKENS)
        return schedule(decode=decoding, prompts=prompts, chunk_tokens=max(self.chunk_tokens - len(decoding), floor))

    def schedule_prefill(self, prompts: list[Sequence]) -> ScheduledStep | None:
        # A decode step that was tried in between may have given a prompt's blocks away.
        return self.scheduler.schedule(prompts=prompts, chunk_tokens=self.chunk_tokens, lane="prefill")

    def retire(self, lane: str | None = None) -> None:
        """Retire the oldest step, of all or of a lane."""
        index = next((i for i, (_, s) in enumerate(self.in_flight) if lane in (None, self.lane_of(s))), 0)
        ticket, scheduled = self.in_flight[index]
        del self.in_flight[index]
        tokens = self.device.wait(ticket).token_ids.tolist()
        self.scheduler.retire(scheduled)
        for sequence, token in zip(scheduled.sampled, tokens, strict=True):
            if sequence.status is Status.FINISHED:
                continue
            sequence.output_token_ids.append(token)
            if len(sequence.output_token_ids) == self.ends[sequence]:
                self.scheduler.finish(sequence)

    def check_budget(self, scheduled: ScheduledStep) -> None:
        prefill, decode = scheduled.step.prefill, scheduled.step.decode
        prefill_rows = 0 if prefill is None else len(prefill.token_ids)
        decode_rows = 0 if decode is None else len(decode.slots)
        assert prefill_rows or decode_rows
        assert decode_rows <= self.max_num_seqs
        if self.policy != "mixed":
            assert not (prefill_rows and decode_rows)
        if prefill_rows:
            floor = min(self.chunk_tokens, BLOCK_TOKENS)
            assert prefill_rows + decode_rows <= max(self.chunk_tokens, decode_rows + floor)

    def check_blocks(self) -> None:
        check_blocks(self.pool, self.max_num_seqs, self.sequences)
        assert self.told == self.pool.found_by_key.keys()
        touched = {s for _, step in self.in_flight for s in step.touched}
        assert all(s in touched for s in self.sequences if s.slot >= 0 and s.status is Status.FINISHED), "a leak"
        running = [s for s in self.sequences if s.status is Status.RUNNING]
        assert self.scheduler.num_running == len(running)
        assert all(s.slot >= 0 for s in running)
        waiting = [s for s in self.sequences if s.status is Status.WAITING]
        assert len(self.scheduler.queue) == len(waiting)
        assert all(s.slot < 0 for s in waiting)
        assert self.scheduler.queue.num_tokens == sum(s.num_tokens - s.num_cached for s in waiting)
        # Whoever is passed over waits for a sequence that leaves again.
        under_way = [key for s in self.sequences if s.slot >= 0 for key in s.block_keys[s.num_keyed :]]
        assert self.scheduler.queue.writers.keys() <= set(under_way)

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not Status.FINISHED]

    def drain(self, max_steps: int = 20_000) -> None:
        """Run to the end as the engine does, and check what came out."""
        for _ in range(max_steps):
            while len(self.in_flight) < self.depth and self.launch() is not None:
                self.check_blocks()
            if not self.in_flight:
                break
            self.retire()
            self.check_blocks()
        assert not self.unfinished
        assert self.pool.num_used == 0
        assert self.scheduler.num_running == len(self.scheduler.queue) == self.scheduler.queue.num_tokens == 0
        assert not self.scheduler.queue.writers
        assert not self.scheduler.queue._by_awaited
        for sequence in self.sequences:
            prompt, count = sequence.prompt_token_ids.tolist(), self.ends[sequence]
            expected = generate_alone(sequence.seed, prompt, count, self.window)
            if sequence in self.aborted:
                expected = expected[: len(sequence.output_token_ids)]
            assert sequence.output_token_ids == expected
            if sequence.is_scored and sequence not in self.aborted:
                assert self.num_scored[sequence] == len(prompt) - 1
        if not (self.scheduler.queue.longest_first or self.num_found):
            served = [s for s in self.sequences if s in self.first_admissions]
            assert self.first_admissions == served, "first admissions must follow arrivals"
