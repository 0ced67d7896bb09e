"""What a performance table must have been measured with to hold for a runtime, and where a user's tables are."""

from pathlib import Path

import torch
from platformdirs import user_data_path

from bullet_graph.perf.provenance import installed_version
from bullet_graph.perf.shipped import table_file_name
from bullet_graph.perf.table import TableKey, shape_numbers
from bullet_graph.runtime.resolve import Runtime

_KERNEL_LIBRARIES = {"flashinfer": "flashinfer-python", "torch": "torch", "triton": "triton"}


def table_key(runtime: Runtime, model: str) -> TableKey:
    """The key of tables that hold for this runtime, which must be on a GPU.

    Args:
        model: the preset's name, or the model folder.
    """
    gpu = torch.cuda.get_device_properties(runtime.device)
    versions = {name: installed_version(package) for name, package in _KERNEL_LIBRARIES.items()}
    return TableKey(
        gpu=gpu.name,
        num_sms=gpu.multi_processor_count,
        model=model if runtime.folder is None else runtime.folder.resolve().name,
        shape=shape_numbers(runtime.model),
        dtype=str(runtime.dtype).removeprefix("torch."),
        kernels={name: version for name, version in versions.items() if version is not None},
    )


def user_tables_folder() -> Path:
    """Where ``bullet-graph profile`` puts this user's tables unless told otherwise."""
    return user_data_path("bullet_graph") / "perf_tables"


def user_table_file(key: TableKey) -> Path:
    """Where this user's table for ``key`` is; named as those that come with the package are."""
    return user_tables_folder() / table_file_name(key.gpu, key.model, key.dtype)
