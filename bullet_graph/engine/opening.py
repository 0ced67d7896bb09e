"""Opens what an engine serves with: the model and its tokenizer, and the device with weights, cache and graphs."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from bullet_graph.config import EngineConfig
from bullet_graph.models.tokenizer import Tokenizer
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.build import BuiltRuntime, build_executor
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.resolve import Runtime, load_tokenizer, resolve


@dataclass(frozen=True, slots=True)
class Opened:
    """What an engine serves with.

    Attributes:
        runtime: the model and the device that the settings stand for.
        tokenizer: None where the model has none.
        built: the executor, ready for steps, and what its start showed.
    """

    runtime: Runtime
    tokenizer: Tokenizer | None
    built: BuiltRuntime


def open_engine(
    config: EngineConfig, *, clock: StartClock, progress: bool, on_ledger: Callable[[MemoryLedger], None]
) -> Opened:
    """Find model and device, load the tokenizer, and build the executor.

    Args:
        clock: told of each phase.
        progress: show progress bars.
        on_ledger: told the memory ledger before anything is allocated.

    Raises:
        ConfigError, ModelError, DeviceError, InsufficientMemoryError: as their docstrings say; nothing is kept of the
            device's memory.
    """
    with clock.phase("device"):
        runtime = resolve(config)
    with clock.phase("tokenizer"):
        tokenizer = load_tokenizer(runtime)
    try:
        built = build_executor(config, runtime, progress=progress, on_ledger=on_ledger, clock=clock)
    except BaseException as error:
        # The error's frames would keep the device's memory for as long as the caller keeps the error.
        traceback.clear_frames(error.__traceback__)
        raise
    return Opened(runtime, tokenizer, built)
