"""What NCCL is told, by a library that only notes it; the collectives themselves run in tests/gpu."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bullet_graph.errors import DeviceError
from bullet_graph.kernels import nccl as module
from bullet_graph.kernels.nccl import NcclCommunicator, load_nccl

ID = bytes(range(128))


class Library:
    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == "ncclGetUniqueId":
                ctypes.memmove(arguments[0], ID, 128)
            return b"unhandled cuda error" if name == "ncclGetLastError" else self.codes.get(name, 0)

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU's memory stands for a GPU's."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.device("meta"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return torch.device("cpu")


class Store(dict[str, bytes]):
    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def test_collectives(device: torch.device) -> None:
    library, store = Library(), Store()
    communicator = NcclCommunicator(store, 0, 2, device, library)
    assert store == {"nccl": ID}
    assert library.names() == ["ncclGetUniqueId", "ncclCommInitRank", "ncclAllReduce", "ncclAllGather"]
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert communicator.all_reduce(x) is x
    assert library.calls[-1][1:5] == (x.data_ptr(), x.data_ptr(), 12, 9)
    assert library.calls[-1][-1] == 7
    part = torch.zeros(3, 2)
    whole = communicator.all_gather(part)
    assert whole.shape == (2, 3, 2)
    assert library.calls[-1][1:5] == (part.data_ptr(), whole.data_ptr(), 6, 7)
    communicator.abort()
    with pytest.raises(DeviceError, match="ncclAllReduce was aborted"):
        communicator.all_reduce(x)
    communicator.close()
    assert library.names()[4:] == ["ncclAllReduce", "ncclAllGather", "ncclCommAbort"]


def test_another_rank_takes_the_first_one_s_id(device: torch.device) -> None:
    library = Library()
    NcclCommunicator(Store(nccl=ID), 1, 2, device, library)
    name, _, num_ranks, unique, rank = library.calls[0]
    assert (name, num_ranks, bytes(unique), rank) == ("ncclCommInitRank", 2, ID, 1)


def test_an_error_of_nccl_s(device: torch.device) -> None:
    with pytest.raises(DeviceError, match="ncclCommInitRank failed with code 1: unhandled cuda error"):
        NcclCommunicator(Store(), 0, 2, device, Library(ncclCommInitRank=1))


def test_a_device_that_never_ends_or_has_failed_is_not_waited_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    communicator = NcclCommunicator(Store(), 0, 2, device, Library())
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)
    ended = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: ended.wait(20))
    with pytest.raises(TimeoutError):
        communicator.close()
    ended.set()
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=RuntimeError("illegal address")))
    with pytest.raises(RuntimeError, match="illegal address"):
        communicator.close()


def test_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: cannot open")))
    with pytest.raises(DeviceError, match=r"ranks need NCCL.*libnccl.so.2: cannot open.*install torch"):
        load_nccl()
