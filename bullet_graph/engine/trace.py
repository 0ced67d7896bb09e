"""Writes decision traces: what the planner decided, what was launched, and how long it took."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from bullet_graph._version import __version__
from bullet_graph.config import EngineConfig
from bullet_graph.engine.in_flight import Launch
from bullet_graph.engine.output import RequestOutput
from bullet_graph.errors import ConfigError, TraceError
from bullet_graph.partition.masks import lane_sms
from bullet_graph.perf.trace import TRACE_FORMAT, TRACE_FORMAT_VERSION, TraceHeader
from bullet_graph.planner.plan import Load, Option, Plan

# A write gives up the interpreter lock, which another thread may then keep for milliseconds: write seldom. The
# buffer is larger than any run of lines between two flushes, so only whole lines reach the file.
_FLUSH_CHARS = 1 << 16
_BUFFER_BYTES = 1 << 22

_OPTION_FIELDS = tuple(field.name for field in fields(Option))

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def trace_header(config: EngineConfig, device: str, *, num_sms: int | None, num_layers: int) -> TraceHeader:
    """The header of a trace of an engine with these settings."""
    return TraceHeader(config.model, device, num_sms, num_layers, str(config.policy), str(config.slo), __version__)


class DecisionTrace:
    """A trace file under way; every method that writes raises TraceError when the file system refuses.

    Raises ConfigError where the file exists and ``overwrite`` is unset, or where it cannot be made.
    """

    def __init__(self, path: Path, *, header: TraceHeader, overwrite: bool) -> None:
        try:
            self._file = path.open("w" if overwrite else "x", buffering=_BUFFER_BYTES, encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"the trace file {path} exists: allow overwriting it, or give another name") from None
        except OSError as error:
            raise ConfigError(f"trace file {path} cannot be made ({error.strerror}): give another name") from None
        self._path = path
        self._num_sms = header.num_sms
        self._num_layers = header.num_layers
        self._unflushed_chars = 0
        self._decision = -1
        self._last_choice: dict[str, object] = {}
        self._last_s = 0.0
        self._repeats = 0
        # Flushed at once: a disk that takes nothing is better known before the run.
        self._write({"type": "header", "format": TRACE_FORMAT, "format_version": TRACE_FORMAT_VERSION} | asdict(header))
        self._flush()

    def decided(self, load: Load, plan: Plan) -> None:
        """Note a plan. Plans in a row that differ in predictions alone are one decision."""
        decode = load.decode
        choice: dict[str, object] = {
            "running": 0 if decode is None else decode.batch_size,
            "waiting": len(load.prompts),
            "policy": plan.policy,
            "decode": plan.decode,
            "chunk_tokens": plan.chunk_tokens,
            "slice_layers": plan.slice_layers,
            "decode_sms": lane_sms(plan.partition, "decode"),
            "prefill_sms": lane_sms(plan.partition, "prefill"),
            "bound": plan.bound,
        }
        self._last_s = load.now_s
        if choice == self._last_choice:
            self._repeats += 1
            return
        self._write_repeats()
        self._last_choice = choice
        self._decision += 1
        self._write(
            {
                "type": "decision",
                "decision": self._decision,
                "time_s": load.now_s,
                "kv_tokens": 0 if decode is None else decode.kv_tokens,
                "queued_tokens": load.queued_tokens,
                "budget_ms": None if decode is None else _finite(decode.budget_ms),
                "slack_ms": None if decode is None else _finite(decode.slack_ms),
                **choice,
                "options": [{name: _finite(getattr(o, name)) for name in _OPTION_FIELDS} for o in plan.options],
            }
        )

    def launched(self, launch: Launch, now_s: float) -> None:
        """Note a launch that follows the last decision."""
        step, placement, partition = launch.scheduled.step, launch.placement, launch.placement.partition
        last_layer = self._num_layers if placement.last_layer is None else placement.last_layer
        self._write(
            {
                "type": "launch",
                "ticket": launch.ticket,
                "lane": placement.lane,
                "decision": self._decision,
                "time_s": now_s,
                "policy": launch.policy,
                "decode_rows": step.decode_rows,
                "prefill_rows": step.prefill_rows,
                "layers": last_layer - placement.first_layer,
                "decode_sms": lane_sms(partition, "decode") or self._num_sms,
                "prefill_sms": lane_sms(partition, "prefill") or self._num_sms,
                "predicted_ms": _finite(launch.predicted_ms),
            }
        )

    def retired(self, ticket: int, now_s: float, device_ms: float) -> None:
        self._write({"type": "retire", "ticket": ticket, "time_s": now_s, "device_ms": device_ms})

    def finished(self, output: RequestOutput) -> None:
        """Note a request's last output, with the targets that held for it."""
        metrics, slo, prompt_tokens = output.metrics, output.slo, len(output.prompt_token_ids)
        arrival_s, token_times_s = metrics.arrival_s, metrics.token_times_s
        self._write(
            {
                "type": "request",
                "request_id": output.request_id,
                "reason": output.outputs[0].finish_reason or "abort",
                "prompt_tokens": prompt_tokens,
                "output_tokens": len(token_times_s),
                "arrival_s": arrival_s,
                "first_scheduled_s": metrics.first_scheduled_s,
                # Whole numbers are short, and quick to write for long outputs.
                "token_us": [round((time_s - arrival_s) * 1e6) for time_s in token_times_s],
                "ttft_limit_ms": _finite(slo.ttft_limit_ms(prompt_tokens)),
                "tpot_limit_ms": slo.tpot_ms,
                "cached_tokens": output.num_cached_tokens,
            }
        )

    def close(self) -> None:
        """Write what is left; further calls do nothing, and nothing may be noted afterwards."""
        if self._file.closed:
            return
        self._write_repeats()
        self._do(self._file.close)

    def _write_repeats(self) -> None:
        if self._repeats:
            repeats = {"count": self._repeats, "time_s": self._last_s}
            self._write({"type": "repeat", "decision": self._decision} | repeats)
            self._repeats = 0

    def _write(self, record: dict[str, object]) -> None:
        line = _encode(record)
        self._file.write(line + "\n")
        self._unflushed_chars += len(line)
        if self._unflushed_chars > _FLUSH_CHARS:
            self._flush()

    def _flush(self) -> None:
        self._unflushed_chars = 0
        self._do(self._file.flush)

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            raise TraceError(
                f"{self._path}: the decision trace cannot be written ({error.strerror}); make room, or write it "
                "elsewhere"
            ) from error


def _finite(value: object) -> object:
    """JSON has no infinity: no limit is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
