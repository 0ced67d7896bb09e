"""Finds the performance model of a runtime: a measured table, or an estimate if the user asks for one."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock
from platformdirs import user_data_path

from bullet_graph.config import SETTINGS, EngineConfig
from bullet_graph.errors import PerfTableError, io_errors
from bullet_graph.graphs.capture_plan import CapturePlan, named_plan
from bullet_graph.graphs.key import batch_size_buckets, bucket_for
from bullet_graph.models.config import ModelConfig
from bullet_graph.perf import table as tables
from bullet_graph.perf.performance import PaddedModel, PerformanceModel
from bullet_graph.perf.predict import TableModel
from bullet_graph.perf.provenance import library_versions
from bullet_graph.perf.roofline import Roofline
from bullet_graph.perf.start_report import StartClock
from bullet_graph.runtime.processes import environment_of_child

if TYPE_CHECKING:
    # It imports torch, and the simulator does without.
    from bullet_graph.runtime.resolve import Runtime

ROOFLINE = "roofline"
"""The ``perf_table`` that selects an estimate by arithmetic instead of a measured table."""
PROFILED = (
    "model",
    "revision",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "expert_parallel",
)
"""Settings that decide which table fits."""


def find_performance(
    config: EngineConfig, runtime: "Runtime", *, cached_table: Callable[[], tables.PerfTable | None] = lambda: None
) -> PerformanceModel | None:
    """The performance model that the configuration names or that its policy predicts from; None where there is none.

    ``cached_table`` is asked if neither the user nor the package has a table. Raises PerfTableError where the named
    table cannot be read or is of another GPU, model, dtype or kernels, or where ``split`` or ``reject_late`` has none.
    Raises ConfigError as :func:`named_plan`.
    """
    name = config.perf_table
    if name == ROOFLINE:
        return Roofline(runtime.gpu, runtime.model, dtype_bytes=runtime.dtype.itemsize)
    if name is None and not config.predicts:
        return None
    if runtime.device.type == "cpu":
        if name is not None:
            raise PerfTableError(
                f"perf_table={name} names a table, and tables are measured on GPUs, but the device is the CPU: pass "
                "perf_table='roofline' for an estimate, or leave it out"
            )
        if config.reject_late is not None:
            raise PerfTableError(
                "reject_late refuses by predicted times, and tables of times are measured on GPUs, but the device is "
                "the CPU: pass perf_table='roofline' for an estimate, or leave reject_late out"
            )
        return None
    file = table_file(config, runtime)
    table = cached_table() if file is None else tables.read_table(file)
    if table is None:
        if config.policy.name != "split" and config.reject_late is None:
            return None
        key = table_key(runtime)
        needing = f"the policy {config.policy}" if config.reject_late is None else "reject_late"
        raise PerfTableError(
            f"{needing} needs a performance table of {key.model} in {tables.format_name(key.dtype, key.shape)} on "
            f"{key.gpu}, but there is none at {user_table_file(key)} nor among those that come with the package "
            f"({', '.join(path.name for path in tables.list_tables()) or 'none'}): run `bullet-graph "
            f"{shlex.join(_profile_command(config))}` once, let profile_if_missing do it, or pass "
            "perf_table='roofline' for an estimate"
        )
    table = tables.for_lengths(table, runtime.max_model_len)
    tables.require_match(table, table_key(runtime), any_versions=True)
    plan = named_plan(config, dtype=runtime.dtype_name, num_sms=runtime.gpu.num_sms)
    return table_model(table, config.max_num_seqs, runtime.model, plan)


def measure_if_missing(
    config: EngineConfig, runtime: "Runtime", cached_table: Callable[[], tables.PerfTable | None], clock: StartClock
) -> None:
    """Where ``profile_if_missing`` asks for it, measure a table that is missing, in a process of its own.

    The table is as short as can be, and has no partitions unless ``split`` needs them. ``runtime`` is rank 0's. Raises
    PerfTableError where the measurement fails; what it says goes to stderr.
    """
    if not config.profile_if_missing or not config.predicts or runtime.device.type == "cpu":
        return
    if table_file(config, runtime) is not None or cached_table() is not None:
        return
    command = [*_profile_command(config), "--time-budget-s", "0"]
    if config.policy.name != "split":
        command += ["--partition-backend", "none"]
    # The child sees the GPUs from this runtime's on.
    first, last = runtime.device.index, runtime.device.index + config.tensor_parallel_size
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(last)))).split(",")[first:last]
    env = environment_of_child(CUDA_VISIBLE_DEVICES=",".join(gpus))
    file = user_table_file(table_key(runtime))
    process = [sys.executable, "-P", "-m", "bullet_graph", *command]
    with clock.phase("profile"), io_errors(f"profile_if_missing must be able to write {file}", PerfTableError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Engines that start together measure once. stdout is for results.
        with FileLock(f"{file}.lock"):
            if file.is_file():
                return
            code = subprocess.run(process, stdout=2, env=env, check=False).returncode
    if code != 0:
        raise PerfTableError(
            f"profile_if_missing: `bullet-graph {shlex.join(command)}` ended with {code}; what it said is above. "
            "Leave profile_if_missing out to start without a table"
        )


def _profile_command(config: EngineConfig) -> list[str]:
    """``profile`` and its options for a table that fits."""
    words = ["profile"]
    for name in PROFILED:
        value = getattr(config, name)
        if value != SETTINGS[name].default:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return words


def table_model(
    table: tables.PerfTable, max_num_seqs: int, model: ModelConfig, plan: CapturePlan | None = None
) -> PerformanceModel:
    """Predictions from a table, with batches padded as the engine's graphs pad them: all sizes without a plan."""
    sizes = batch_size_buckets(max_num_seqs)
    pad = plan.padded if plan is not None else lambda rows, _sms: bucket_for(rows, sizes)
    return PaddedModel(TableModel(table, model), pad, routes=model.num_experts > 0)


def table_file(config: EngineConfig, runtime: "Runtime") -> Path | None:
    """The named table, or the user's own for this GPU and model, or a shipped one."""
    if config.perf_table is not None:
        return Path(config.perf_table)
    key = table_key(runtime)
    own = user_table_file(key)
    if own.is_file():
        return own
    for path in tables.list_tables():
        table = tables.for_lengths(tables.read_table(path), runtime.max_model_len)
        if (table.key.gpu, table.key.shape, table.key.dtype) == (key.gpu, key.shape, key.dtype):
            return path
    return None


def table_key(runtime: "Runtime") -> tables.TableKey:
    """The key of tables that are valid for this runtime, which must be on a GPU."""
    return tables.TableKey(
        gpu=runtime.gpu.name,
        num_sms=runtime.gpu.num_sms,
        model=runtime.name,
        shape=tables.shape_numbers(runtime.model),
        dtype=runtime.dtype_name,
        kernels={name: found.partition("+")[0] for name, found in library_versions().items() if found is not None},
    )


def user_table_file(key: tables.TableKey) -> Path:
    """File of this user's table for ``key``."""
    return user_data_path("bullet_graph") / "perf_tables" / tables.own_table_file_name(key)
