"""The check of the order of collectives: a mistake is an error on every rank that sees it, not a wait for ever."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks_in_threads import thread_communicators

from bullet_graph.kernels.communicator import Communicator, OrderedCommunicator, collectives_begun

Act = Callable[[dict[str, Communicator]], object]


def run(*acts: Act) -> tuple[list[BaseException | None], list[int]]:
    """Let each rank act on its communicators, by lane; the errors, and how many collectives each rank began."""
    marks = memoryview(bytearray(8 * len(acts))).cast("q")
    ranks = [
        {lane: OrderedCommunicator(inner, lane, marks) for lane, inner in of_rank.items()}
        for of_rank in thread_communicators(len(acts))
    ]
    with ThreadPoolExecutor(len(acts)) as pool:
        done = [pool.submit(act, rank) for act, rank in zip(acts, ranks, strict=True)]  # type: ignore[arg-type]
    return [each.exception() for each in done], [collectives_begun(mark) for mark in marks]


def work(communicators: dict[str, Communicator], lanes: str = "dpdd", columns: int = 2) -> None:
    for lane in lanes:
        communicator = communicators[{"d": "decode", "p": "prefill"}[lane]]
        found = communicator.all_reduce(torch.full((3, columns), float(communicator.rank + 1)))
        assert found.eq(sum(range(1, communicator.num_ranks + 1))).all()
        gathered = communicator.all_gather(torch.tensor([communicator.rank]))
        assert gathered.flatten().tolist() == list(range(communicator.num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_same_order_on_all_ranks(num_ranks: int) -> None:
    assert run(*[work] * num_ranks) == ([None] * num_ranks, [8] * num_ranks)


@pytest.mark.parametrize("other", [lambda c: work(c, "ddpd"), lambda c: work(c, columns=4)])
def test_another_order_or_size_on_one_rank(other: Act) -> None:
    errors, _ = run(work, other)
    assert all("ranks must begin the same collectives in the same order, but number" in str(error) for error in errors)


def test_an_abort_ends_the_wait_for_another_rank() -> None:
    def aborted(communicators: dict[str, Communicator]) -> None:
        communicators["decode"].abort()
        work(communicators)

    errors, begun = run(aborted, lambda _: None)
    assert "all_reduce of [3, 2] torch.float32 on the decode lane was aborted" in str(errors[0])
    assert begun == [1, 0]
