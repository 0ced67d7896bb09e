"""The sum over ranks in one launch, in Triton's interpreter: this process plays the other ranks."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bullet_graph.errors import PartitionError
from bullet_graph.kernels import peer_reduce


class Ranks:
    """Memories of all ranks; rank ``own`` runs the kernel, and the others have shared their rows before it does."""

    def __init__(self, num_ranks: int, own: int) -> None:
        self.num_ranks, self.own = num_ranks, own
        self.memories = [torch.zeros(peer_reduce.memory_bytes(num_ranks), dtype=torch.uint8) for _ in range(num_ranks)]
        self.word = torch.zeros(1, dtype=torch.int64)
        self.bases = torch.tensor([part.data_ptr() for part in (*self.memories, self.word)])

    def told(self, rank: int) -> Tensor:
        """[programs, ranks]: the last turn that each rank told each program of this one."""
        return (self.memories[rank][peer_reduce.SHARED_BYTES :].view(torch.int64))[peer_reduce.MAX_PROGRAMS :].view(
            peer_reduce.MAX_PROGRAMS, self.num_ranks
        )

    def share(self, rank: int, x: Tensor, block: int) -> None:
        for program, part in enumerate(x.split(block)):
            turn = int(self.told(self.own)[program, rank]) + 1
            place = self.memories[rank][turn % 2 * peer_reduce.SHARED_BYTES // 2 :].view(x.dtype)
            place[program * peer_reduce.BLOCK_BYTES // x.element_size() :][: len(part)] = part
            self.told(self.own)[program, rank] = turn

    def reduce(self, xs: list[Tensor], block: int) -> Tensor:
        for rank, x in enumerate(xs):
            if rank != self.own:
                self.share(rank, x, block)
        out = xs[self.own].clone()
        self.run(out, block)
        return out

    def run(self, x: Tensor, block: int) -> None:
        grid = (-(-len(x) // block),)
        peer_reduce.all_reduce_kernel[grid](
            x, self.bases, len(x), RANK=self.own, RANKS=self.num_ranks, BLOCK=block, LOOKS=256
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_ranks", "own"), [(2, 0), (2, 1), (4, 2)])
def test_sums_of_changing_sizes(num_ranks: int, own: int, dtype: torch.dtype) -> None:
    ranks = Ranks(num_ranks, own)
    generator = torch.Generator().manual_seed(own)
    # Programs of a larger launch have had fewer turns than the first ones.
    for size, block in ((1, 1024), (1024, 1024), (2500, 1024), (2500, 2048), (40, 1024), (5000, 2048)):
        xs = [torch.randn(size, generator=generator).to(dtype) for _ in range(num_ranks)]
        # In the order of ranks, so that all ranks get the same bits.
        expected = torch.zeros(size)
        for x in xs:
            expected += x.float()
        assert ranks.reduce(xs, block).equal(expected.to(dtype))
        turns = ranks.told(own)[:, (own + 1) % num_ranks]
        for other in set(range(num_ranks)) - {own}:
            assert ranks.told(other)[:, own].equal(turns)
    assert turns[:5].tolist() == [6, 3, 2, 0, 0]


def test_programs_that_wait_end_once_the_host_says_so_and_then_touch_no_other_rank() -> None:
    ranks = Ranks(2, 0)
    x = torch.full((1500,), 3.0)
    ranks.word.fill_(peer_reduce.ENDED)
    for _ in range(2):
        before = ranks.memories[1].clone()
        ranks.run(x, 1024)
        assert x.eq(3.0).all()
        assert ranks.told(0)[:3, 0].tolist() == [peer_reduce.ENDED, peer_reduce.ENDED, 0]
    assert ranks.memories[1].equal(before)


def test_an_end_does_not_spoil_a_sum_that_all_ranks_have_reached() -> None:
    ranks = Ranks(2, 0)
    ranks.word.fill_(peer_reduce.ENDED)
    assert ranks.reduce([torch.ones(10), torch.ones(10)], 1024).eq(2.0).all()


def test_few_programs_that_hold_all() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        most = peer_reduce.BLOCK_BYTES // dtype.itemsize
        for size in (1, 1024, 65_536, 65_537, 200_000, most * peer_reduce.MAX_PROGRAMS):
            block = peer_reduce.block_size(torch.empty(size, dtype=dtype), 2)
            assert block is not None
            assert size / peer_reduce.MAX_PROGRAMS <= block <= most
            assert block == 1024 or block // 2 * 64 < size
        assert peer_reduce.block_size(torch.empty(most * peer_reduce.MAX_PROGRAMS + 1, dtype=dtype), 2) is None
        assert peer_reduce.block_size(torch.empty(most * peer_reduce.MAX_PROGRAMS // 3 + 1, dtype=dtype), 4) is None
    assert peer_reduce.block_size(torch.empty(3, dtype=torch.int64), 2) is None


def test_memory_is_freed_though_another_rank_s_cannot_be_let_go() -> None:
    names = []

    def call(name: str, *_: object) -> None:
        names.append(name)
        if name == "cuIpcCloseMemHandle":
            raise PartitionError("gone")

    peer_reduce._free(Mock(call=call), None, 1, {1: 2, 2: 3})
    assert names == ["cuCtxPushCurrent", "cuIpcCloseMemHandle", "cuIpcCloseMemHandle", "cuMemFree", "cuCtxPopCurrent"]


def test_an_abort_asks_no_driver() -> None:
    made, communicator = Mock(), peer_reduce.PeerCommunicator.__new__(peer_reduce.PeerCommunicator)
    communicator.__dict__.update(_ended=torch.zeros(1, dtype=torch.int64), _driver=made.driver, _inner=made.inner)
    communicator.abort()
    assert communicator._ended.item() == peer_reduce.ENDED
    assert [each[0] for each in made.mock_calls] == ["inner.abort"]


@pytest.mark.parametrize("missing", [None, (0, 1), (2, 1)])
def test_every_gpu_must_reach_every_other(missing: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Mock(call=lambda _name, _attribute, one, other: (one, other) != missing)
    monkeypatch.setattr(peer_reduce, "CudaDriver", lambda: driver)
    assert peer_reduce.can_reach(range(3)) == (missing is None)
