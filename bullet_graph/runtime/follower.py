"""The process of a rank above 0: ``python -m bullet_graph.runtime.follower FD RANK FOLDER`` reads what to do."""

import os
import queue
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bullet_graph.captures.store import CaptureStore
from bullet_graph.config import EngineConfig
from bullet_graph.kernels.communicator import Communicator
from bullet_graph.partition.masks import Lane
from bullet_graph.runtime.build import Start, build_executor, plan_ledger
from bullet_graph.runtime.capture_build import build_for_rank
from bullet_graph.runtime.executor import Executor
from bullet_graph.runtime.memory import MemoryLedger, with_kv_blocks
from bullet_graph.runtime.profile import Prepared
from bullet_graph.runtime.ranks import Message, make_communicators
from bullet_graph.runtime.resolve import Runtime

_LAST_S = 2.0
"""A rank that has failed ends by itself after this time."""


class Follower:
    """Builds this rank's executor and replays rank 0's calls on it, until it is told to stop."""

    def __init__(self, connection: Connection, rank: int, folder: Path) -> None:
        self._connection = connection
        self._rank = rank
        self._folder = folder
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._communicators: dict[Lane, Communicator] = {}
        # Reads ahead, so that rank 0 waits for no launch here. Rank 0 is at most a few launches ahead.
        threading.Thread(target=self._read, name="bullet-graph-messages", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._messages.put(self._connection.recv())
            except (EOFError, OSError):
                # Rank 0 is gone, and this rank may wait for it in a collective. Killed, it leaves its folder behind.
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)

    def run(self) -> None:
        kind, *values = self._messages.get()
        if kind == "profile":
            self._profile(*values)
        elif kind == "build":
            self._build_entry(*values)
        elif kind == "start":
            config, runtime, num_threads = values
            start = self._connect(runtime, num_threads)
            self._follow(build_executor(replace(config, cpu_threads=None), runtime, start).executor)
        for communicator in self._communicators.values():
            communicator.close()

    def _follow(self, executor: Executor) -> None:
        self._connection.send(("built",))
        tickets: list[int] = []
        while True:
            name, *values = self._messages.get()
            if name == "stop":
                break
            if name == "launch":
                tickets.append(executor.launch(*values))
            else:
                executor.prepare_next()
            while tickets and (ticket := executor.wait_any(tickets, executor.now())) is not None:
                executor.wait(ticket)
                tickets.remove(ticket)
        executor.shutdown()

    def _next(self, name: str) -> list[Any]:
        found, *values = self._messages.get()
        if found == "stop":
            raise SystemExit
        assert found == name, found
        return values

    @torch.inference_mode()
    def _profile(self, prepared: Prepared, num_threads: int) -> None:
        self._connect(prepared.runtime, num_threads)
        prepared = replace(prepared, ledger=self._agree(plan_ledger(prepared.config, prepared.runtime)))
        # Imports the kernel libraries.
        from bullet_graph.runtime.bursts import open_workbench  # noqa: PLC0415

        with open_workbench(prepared, progress=False, communicators=self._communicators) as (bench, _):
            bench.follow(self._messages.get, self._connection.send)

    def _build_entry(self, config: EngineConfig, runtime: Runtime, root: Path, num_threads: int) -> None:
        start = self._connect(runtime, num_threads)
        build_for_rank(config, runtime, CaptureStore(root), lambda: start, tell=lambda _: None)
        self._connection.send(("built",))

    def _connect(self, runtime: Runtime, num_threads: int) -> Start:
        if runtime.device.type == "cpu":
            # As rank 0's: what all ranks compute alike must have the same bits.
            torch.set_num_threads(num_threads)
        else:
            torch.cuda.set_device(runtime.device)
        self._connection.send(("ready",))
        self._next("connect")
        make_communicators(self._folder, self._rank, runtime.model.num_ranks, runtime.device, self._communicators)
        return Start(agree=self._agree, communicators=self._communicators)

    def _agree(self, ledger: MemoryLedger) -> MemoryLedger:
        self._connection.send(("blocks", ledger.num_kv_blocks))
        return with_kv_blocks(ledger, *self._next("blocks"))


def main() -> None:
    # An interrupt is rank 0's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, rank, folder = Connection(int(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    try:
        Follower(connection, rank, folder).run()
    except Exception as error:
        with suppress(OSError):
            connection.send(("failed", time.monotonic(), type(error), str(error)))
        # Rank 0 ends this process, or the thread that reads does if rank 0 is gone.
        time.sleep(_LAST_S)
        # Threads of libraries may wait for other ranks.
        os._exit(1)


if __name__ == "__main__":
    main()
