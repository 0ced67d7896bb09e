"""One way in: from what a user types after ``--trace`` to a workload."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

from bullet_graph.errors import WorkloadError
from bullet_graph.workloads.request import Tokenize, Workload
from bullet_graph.workloads.synthetic import SYNTHETIC_NAMES, synthetic_workload
from bullet_graph.workloads.traces import read_azure_csv, read_mooncake_jsonl, read_sharegpt_json

AZURE_EXCERPTS = ("conv", "code")
"""Names after ``azure:``; each is the first 1,000 requests of a trace, shipped with the package."""

DEFAULT_SYNTHETIC_REQUESTS = 1000
"""Length of a synthetic workload when the caller names none."""


def load_workload(
    spec: str, *, num_requests: int | None, seed: int = 0, tokenize: Tokenize | None = None
) -> Workload:
    """Load a workload by name or from a file.

    Args:
        spec: ``azure:conv`` or ``azure:code`` (the shipped excerpts); ``synthetic:conv``, ``synthetic:code``
            or ``synthetic:longdoc``; or a file: ``.csv`` (Azure), ``.json`` (ShareGPT) or ``.jsonl``
            (Mooncake).
        num_requests: take the first so many; None takes all that a trace holds, and
            ``DEFAULT_SYNTHETIC_REQUESTS`` of a synthetic workload.
        seed: of a synthetic workload, at least 0; a trace does not depend on it.
        tokenize: counts the tokens of a ShareGPT file; the other sources need none.

    Raises:
        WorkloadError: for an unknown name, a file that cannot be read, a malformed row (with its line), or
            more requests asked for than the source holds.
    """
    if num_requests is not None and num_requests < 1:
        raise WorkloadError(f"the number of requests must be at least 1, got {num_requests}")
    family, _, name = spec.partition(":")
    if family == "synthetic":
        return synthetic_workload(name, num_requests or DEFAULT_SYNTHETIC_REQUESTS, seed)
    if family == "azure":
        return _load_excerpt(name, num_requests)
    path = Path(spec)
    match path.suffix.lower():
        case ".csv":
            return read_azure_csv(path, num_requests)
        case ".json":
            return read_sharegpt_json(path, num_requests, tokenize=tokenize)
        case ".jsonl":
            return read_mooncake_jsonl(path, num_requests)
    names = [f"azure:{name}" for name in AZURE_EXCERPTS] + [f"synthetic:{name}" for name in SYNTHETIC_NAMES]
    raise WorkloadError(
        f"{spec!r} is no workload: give a file ending in .csv (Azure), .json (ShareGPT) or .jsonl "
        f"(Mooncake), or one of {', '.join(names)}"
    )


def _load_excerpt(name: str, num_requests: int | None) -> Workload:
    if name not in AZURE_EXCERPTS:
        raise WorkloadError(f"unknown excerpt 'azure:{name}': use azure:{' or azure:'.join(AZURE_EXCERPTS)}")
    data = resources.files("bullet_graph.workloads") / "data" / f"azure_{name}.csv"
    with resources.as_file(data) as path:
        return replace(read_azure_csv(path, num_requests), name=f"azure:{name}")
