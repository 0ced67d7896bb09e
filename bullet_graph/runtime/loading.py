"""A decoder whose weights are loaded while its executor is built."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from bullet_graph.config import KV_BLOCK_TOKENS, EngineConfig
from bullet_graph.kernels.memory import KVCache
from bullet_graph.models.checkpoint import WeightLoading, open_checkpoint, weights_bar
from bullet_graph.models.decoder import Decoder, cos_sin_table
from bullet_graph.models.weights import fill_dummy, zero_weights
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.memory import MemoryLedger
from bullet_graph.runtime.resolve import Runtime


def build_decoder(config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, progress: bool) -> Decoder:
    """Weights, and a cache of as many blocks as the ledger grants, on the runtime's device.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    with decoder_while_loading(config, runtime, ledger, StartClock(), progress=progress) as (decoder, join):
        join()
    return decoder


@contextmanager
def decoder_while_loading(
    config: EngineConfig, runtime: Runtime, ledger: MemoryLedger, clock: StartClock, *, progress: bool
) -> Iterator[tuple[Decoder, Callable[[], None]]]:
    """As :func:`build_decoder`, but its weights, zero at first, are filled during the block, by a thread.

    Yields:
        The decoder, and what waits for its weights and raises what loading them raised.

    Raises:
        CheckpointError: the files' headers tell that the weights cannot be read; nothing was allocated.
    """
    with ExitStack() as stack:
        checkpoint = None
        if runtime.folder is not None and config.load_format != "dummy":
            checkpoint = stack.enter_context(open_checkpoint(runtime.folder, runtime.model))
        with clock.phase("allocation"):
            cache = KVCache(
                runtime.model,
                num_blocks=ledger.num_kv_blocks,
                block_tokens=KV_BLOCK_TOKENS,
                dtype=runtime.dtype,
                device=runtime.device,
            )
            weights = zero_weights(runtime.model, dtype=runtime.dtype, device=runtime.device)
            cos_sin = cos_sin_table(runtime.model, runtime.max_model_len, runtime.device)
            decoder = Decoder(runtime.model, weights, cache, cos_sin)
        if checkpoint is None:
            loading = WeightLoading(weights, fill_dummy(runtime.model, weights, seed=config.seed))
        else:
            advance = stack.enter_context(weights_bar(progress, checkpoint.num_bytes))
            loading = WeightLoading(weights, checkpoint.fill(weights), advance)
        stack.enter_context(loading)

        def join_weights() -> None:
            loading.join()
            if loading.ended_s is not None:
                clock.add("weights", loading.started_s, loading.ended_s)

        yield decoder, join_weights
