"""Judges whether an engine can run on a machine, and says what to do about each problem; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from bullet_graph.partition.backend import AUTO, NoneBackend
from bullet_graph.runtime.machine import Asked, CacheFolder, Gpu, Machine, MaskOffset
from bullet_graph.runtime.memory import format_bytes
from bullet_graph.runtime.partition_checks import BackendCheck, PartitionChecks
from bullet_graph.runtime.resolve import FLASHINFER_RELEASE

_INSTALL_CUDA = "pip install 'bullet-graph[cuda]'"
_MIN_CAPABILITY = (7, 5)
"""What FlashInfer supports."""
_BFLOAT16_CAPABILITY = (8, 0)
_BUSY_SHARE = 0.5


class Level(StrEnum):
    """GREEN works; YELLOW is worth knowing, but the engine runs; RED keeps the engine from running."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page: what was looked at, what was found, and advice where it is not green."""

    section: str
    name: str
    level: Level
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The page: where an engine would run, and findings in reading order, by section."""

    device: Literal["cuda", "cpu"]
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether an engine could run as asked."""
        return all(finding.level is not Level.RED for finding in self.findings)


def diagnose(asked: Asked, machine: Machine) -> Diagnosis:
    """Judge what :func:`bullet_graph.runtime.machine.look_around` found when it was asked the same."""
    findings = [
        *_judge_system(machine),
        *_judge_gpu(asked, machine),
        *(_judge_libraries(machine) if machine.uses_gpu else ()),
        *_judge_partitions(asked, machine),
        *(_judge_cache(cache) for cache in machine.caches),
        *(() if asked.model is None else (_judge_model(asked.model, machine),)),
    ]
    return Diagnosis("cuda" if machine.uses_gpu else "cpu", tuple(findings))


def format_cuda_version(version: int) -> str:
    """13.0 for the driver's 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _judge_system(machine: Machine) -> Iterator[Finding]:
    versions, commit = machine.provenance.versions, machine.provenance.git_commit
    package = f"{versions['bullet_graph']}{'' if commit is None else f' (commit {commit[:12]})'}"
    built_for = "without CUDA" if machine.torch_cuda is None else f"for CUDA {machine.torch_cuda}"
    for name, found in (
        ("bullet_graph", package),
        ("Python", versions["python"] or ""),
        ("operating system", machine.platform),
        ("torch", f"{versions['torch']}, built {built_for}"),
    ):
        yield Finding("system", name, Level.GREEN, found)


def _judge_gpu(asked: Asked, machine: Machine) -> Iterator[Finding]:
    driver = machine.driver
    if driver is not None:
        found = f"{driver.release}, CUDA {format_cuda_version(driver.cuda_version)}, {driver.machine}"
        yield Finding("GPU", "NVIDIA driver", Level.GREEN, found)
    elif machine.uses_gpu:
        yield Finding("GPU", "NVIDIA driver", Level.YELLOW, "not identified", machine.driver_problem)
    else:
        yield Finding("GPU", "NVIDIA driver", Level.GREEN, "none")
    if machine.gpu is not None:
        yield from _judge_model_of_gpu(machine.gpu)
    elif machine.uses_gpu:
        advice = f"{machine.gpu_problem}: see `nvidia-smi` for what holds the GPU, or use --device cpu"
        yield Finding("GPU", "GPU", Level.RED, "cannot be used", advice)
    elif asked.device == "cpu":
        yield Finding("GPU", "GPU", Level.GREEN, "not looked at: --device cpu")
    else:
        yield _judge_missing_gpu(asked, machine)


def _judge_model_of_gpu(gpu: Gpu) -> Iterator[Finding]:
    capability = ".".join(map(str, gpu.compute_capability))
    others = "" if gpu.num_gpus == 1 else f", one of {gpu.num_gpus}"
    found = f"{gpu.name}{others}, compute capability {capability}, {gpu.num_sms} SMs ({gpu.num_tpcs} TPCs)"
    if gpu.compute_capability < _MIN_CAPABILITY:
        least = ".".join(map(str, _MIN_CAPABILITY))
        advice = f"the kernels need compute capability {least}: use a newer GPU, or --device cpu"
        yield Finding("GPU", "GPU", Level.RED, found, advice)
    elif gpu.compute_capability < _BFLOAT16_CAPABILITY:
        yield Finding("GPU", "GPU", Level.YELLOW, found, "it has no bfloat16: give commands --dtype float16")
    else:
        yield Finding("GPU", "GPU", Level.GREEN, found)
    found = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
    if gpu.free_bytes < _BUSY_SHARE * gpu.total_bytes:
        advice = "other processes hold most of it: see `nvidia-smi`; models and batches must be smaller"
        yield Finding("GPU", "GPU memory", Level.YELLOW, found, advice)
    else:
        yield Finding("GPU", "GPU memory", Level.GREEN, found)


def _judge_missing_gpu(asked: Asked, machine: Machine) -> Finding:
    if machine.driver is None:
        advice = "install the NVIDIA driver, and a torch that is built for CUDA"
    elif machine.torch_cuda is None:
        advice = "there is a driver, but this torch is built without CUDA: install one that is built for it"
    else:
        advice = (
            f"there is a driver for CUDA {format_cuda_version(machine.driver.cuda_version)}, but torch, built for "
            f"{machine.torch_cuda}, sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, and that torch's "
            "CUDA is not newer than the driver's"
        )
    if asked.device == "cuda":
        return Finding("GPU", "GPU", Level.RED, "no NVIDIA GPU", f"{advice}; or use --device cpu")
    found = "no NVIDIA GPU: the engine runs on the CPU"
    if machine.driver is None:
        return Finding("GPU", "GPU", Level.GREEN, found)
    return Finding("GPU", "GPU", Level.YELLOW, found, advice)


def _judge_libraries(machine: Machine) -> Iterator[Finding]:
    triton, flashinfer = (machine.provenance.versions[name] for name in ("triton", "flashinfer"))
    yield _judge_version("Triton", triton)
    if flashinfer == FLASHINFER_RELEASE:
        yield Finding("libraries", "FlashInfer", Level.GREEN, flashinfer)
    else:
        advice = (
            f"release {FLASHINFER_RELEASE} is needed: pip install flashinfer-python=={FLASHINFER_RELEASE}"
        )
        yield Finding("libraries", "FlashInfer", Level.RED, flashinfer or "not installed", advice)
    yield _judge_version("cuda-python", machine.cuda_python)
    if machine.gpu_path_problem is None:
        yield Finding("libraries", "GPU path", Level.GREEN, "imports")
    else:
        advice = (
            f"{machine.gpu_path_problem}: mend the libraries above ({_INSTALL_CUDA}), or use --device cpu"
        )
        yield Finding("libraries", "GPU path", Level.RED, "cannot be imported", advice)
    if machine.missing_compilers:
        missing = f"no {', no '.join(machine.missing_compilers)}"
        advice = (
            "kernels that are not in the caches yet are compiled at first use: install the CUDA toolkit, ninja and "
            "a C compiler"
        )
        yield Finding("libraries", "compilers", Level.YELLOW, missing, advice)
    else:
        yield Finding("libraries", "compilers", Level.GREEN, "nvcc, ninja, a C compiler")


def _judge_version(name: str, version: str | None) -> Finding:
    if version is None:
        return Finding("libraries", name, Level.RED, "not installed", _INSTALL_CUDA)
    return Finding("libraries", name, Level.GREEN, version)


def _judge_partitions(asked: Asked, machine: Machine) -> Iterator[Finding]:
    if not machine.uses_gpu:
        if asked.decode_sms or asked.partition_backend not in (AUTO, NoneBackend.name):
            advice = "SM partitions need a GPU: leave out --decode-sms and --partition-backend"
            yield Finding("partitions", "SM partitions", Level.RED, "none on the CPU", advice)
        else:
            yield Finding("partitions", "SM partitions", Level.GREEN, "none on the CPU")
    if machine.mask_offset is not None and machine.uses_gpu:
        yield _judge_offset(machine.mask_offset)
    if machine.partitions is not None:
        for backend in machine.partitions.backends:
            # What auto can do without is no obstacle; the back end "none" is what every engine can have.
            is_needed = asked.partition_backend != AUTO or backend.name == NoneBackend.name
            yield _judge_backend(backend, Level.RED if is_needed else Level.YELLOW)
        yield _judge_choice(asked, machine.partitions)


def _judge_offset(offset: MaskOffset) -> Finding:
    name = "stream masks"
    if offset.problem is not None:
        return Finding("partitions", name, Level.YELLOW, "calibrations cannot be read", offset.problem)
    if offset.offset is None:
        advice = "this driver is not in the table: run `bullet-graph doctor --calibrate`, about a minute"
        return Finding("partitions", name, Level.YELLOW, "offset unknown", advice)
    how = "known for this driver" if offset.source == "table" else "proven on this machine by calibration"
    found = f"offset 0x{offset.offset:x} {how}"
    return Finding("partitions", name, Level.GREEN, found)


def _judge_backend(backend: BackendCheck, level_of_failure: Level) -> Finding:
    held = [size for size in backend.sizes if size.problem is None]
    failed = [size for size in backend.sizes if size.problem is not None]
    found = [f"steps of {backend.granularity_sms} SMs"] if backend.granularity_sms else ["cannot be opened"]
    if held:
        seconds = sum(size.seconds or 0 for size in held)
        found.append(f"{_sizes(size.decode_sms for size in held)} verified in {seconds:.2f} s")
    if failed:
        found.append(f"{_sizes(size.decode_sms for size in failed)} refused")
    name, text = f"back end {backend.name}", "; ".join(found)
    if not backend.problems:
        return Finding("partitions", name, Level.GREEN, text)
    more = len(backend.problems) - 1
    advice = backend.problems[0] + (f" (and {more} more, all in --json)" if more else "")
    return Finding("partitions", name, level_of_failure, text, advice)


def _sizes(decode_sms: Iterator[int | None]) -> str:
    sizes = list(decode_sms)
    parts = ["the whole GPU"] if None in sizes else []
    numbers = ", ".join(str(size) for size in sizes if size is not None)
    return " and ".join(parts + ([f"{numbers} SMs for decode"] if numbers else []))


def _judge_choice(asked: Asked, partitions: PartitionChecks) -> Finding:
    name = f"--partition-backend {asked.partition_backend}"
    if partitions.choice is not None:
        return Finding("partitions", name, Level.GREEN, partitions.why)
    if asked.partition_backend == AUTO and not asked.decode_sms:
        advice = (
            f"{partitions.why}; without --decode-sms the engine uses the whole GPU and needs no partitions"
        )
        return Finding("partitions", name, Level.YELLOW, "no back end can split this GPU", advice)
    return Finding("partitions", name, Level.RED, "the engine would refuse to start", partitions.why)


def _judge_cache(cache: CacheFolder) -> Finding:
    name, found = f"cache of {cache.name}", f"{cache.path}, {format_bytes(cache.num_bytes)}"
    if cache.is_writable:
        return Finding("caches", name, Level.GREEN, found)
    advice = (
        "it cannot be written, so its work is done anew in each run or fails: give this user write permission"
    )
    return Finding("caches", name, Level.YELLOW, found, advice)


def _judge_model(model: str, machine: Machine) -> Finding:
    if machine.ledger is not None:
        found = "; ".join(f"{label} {format_bytes(size)}" for label, size in machine.ledger.rows())
        return Finding("model", model, Level.GREEN, found)
    advice = machine.model_problem or "its memory is known once the GPU works: mend the red lines above"
    return Finding("model", model, Level.RED, "cannot be run", advice)
