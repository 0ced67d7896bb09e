"""Judges whether an engine can run on a machine, and says what to do about each problem; pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal

from bullet_graph.config import EngineConfig
from bullet_graph.partition.backend import AUTO, NoneBackend
from bullet_graph.runtime.machine import BackendCheck, Gpu, GpuPair, Machine, SeveralGpus, SizeCheck
from bullet_graph.runtime.memory import format_bytes
from bullet_graph.runtime.resolve import FLASHINFER_RELEASE

_INSTALL_CUDA = "pip install 'bullet-graph[cuda]'"
_MIN_CAPABILITY = (7, 5)
"""What FlashInfer supports."""
_BFLOAT16_CAPABILITY = (8, 0)
_BUSY_SHARE = 0.5
_MOST_PAIRS = 6
"""Pairs of GPUs that a line names."""


class Level(StrEnum):
    """GREEN works; YELLOW is worth knowing, but the engine runs; RED keeps the engine from running."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the page; ``advice`` only where it is not green."""

    section: str
    name: str
    level: Level
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where an engine would run, and findings in reading order, by section."""

    device: Literal["cuda", "cpu"]
    findings: tuple[Finding, ...]

    @property
    def works(self) -> bool:
        """Whether an engine could run as asked."""
        return all(finding.level is not Level.RED for finding in self.findings)


def diagnose(asked: EngineConfig, machine: Machine) -> Diagnosis:
    """Judge what :func:`bullet_graph.runtime.machine.look_around` found when it was asked the same."""
    findings = [
        *_judge_system(machine),
        *_judge_gpu(asked, machine),
        *_judge_several_gpus(asked, machine),
        *(_judge_libraries(machine) if machine.uses_gpu else ()),
        *_judge_partitions(asked, machine),
        *_judge_caches(machine),
        *_judge_model(asked, machine),
    ]
    return Diagnosis("cuda" if machine.uses_gpu else "cpu", tuple(findings))


def _finding(section: str, name: str, found: str, advice: str | None = None, level: Level = Level.RED) -> Finding:
    """A finding that is green without advice."""
    return Finding(section, name, Level.GREEN if advice is None else level, found, advice)


def _cuda_version(version: int) -> str:
    """13.0 for the driver's 13000."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _judge_system(machine: Machine) -> Iterator[Finding]:
    versions, commit = machine.provenance.versions, machine.provenance.git_commit
    package = f"{versions['bullet_graph']}{'' if commit is None else f' (commit {commit[:12]})'}"
    built_for = "without CUDA" if machine.torch_cuda is None else f"for CUDA {machine.torch_cuda}"
    yield _finding("system", "bullet_graph", package)
    yield _finding("system", "Python", str(versions["python"]))
    yield _finding("system", "operating system", machine.platform)
    yield _finding("system", "torch", f"{versions['torch']}, built {built_for}")


def _judge_gpu(asked: EngineConfig, machine: Machine) -> Iterator[Finding]:
    line, driver = partial(_finding, "GPU"), machine.driver
    if driver is not None:
        yield line("NVIDIA driver", f"{driver.release}, CUDA {_cuda_version(driver.cuda_version)}, {driver.machine}")
    elif machine.uses_gpu:
        yield line("NVIDIA driver", "not identified", machine.driver_problem, Level.YELLOW)
    else:
        yield line("NVIDIA driver", "none")
    if machine.gpu is not None:
        yield from _judge_model_of_gpu(machine.gpu)
    elif machine.uses_gpu:
        advice = f"{machine.gpu_problem}: see `nvidia-smi` for what holds the GPU, or use --device cpu"
        yield line("GPU", "cannot be used", advice)
    elif asked.device == "cpu":
        yield line("GPU", "not looked at: --device cpu")
    else:
        yield _judge_missing_gpu(asked, machine)


def _judge_model_of_gpu(gpu: Gpu) -> Iterator[Finding]:
    capability, least = (".".join(map(str, found)) for found in (gpu.compute_capability, _MIN_CAPABILITY))
    others = "" if gpu.num_gpus == 1 else f", one of {gpu.num_gpus}"
    found = f"{gpu.name}{others}, compute capability {capability}, {gpu.num_sms} SMs ({gpu.num_tpcs} TPCs)"
    advice, level = None, Level.GREEN
    if gpu.compute_capability < _MIN_CAPABILITY:
        level, advice = Level.RED, f"the kernels need compute capability {least}: use a newer GPU, or --device cpu"
    elif gpu.compute_capability < _BFLOAT16_CAPABILITY:
        level, advice = Level.YELLOW, "it has no bfloat16: give commands --dtype float16"
    yield _finding("GPU", "GPU", found, advice, level)
    advice = None
    if gpu.free_bytes < _BUSY_SHARE * gpu.total_bytes:
        advice = "other processes hold most of it: see `nvidia-smi`; models and batches must be smaller"
    found = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
    yield _finding("GPU", "GPU memory", found, advice, Level.YELLOW)


def _judge_missing_gpu(asked: EngineConfig, machine: Machine) -> Finding:
    if machine.driver is None:
        advice = "install the NVIDIA driver, and a torch that is built for CUDA"
    elif machine.torch_cuda is None:
        advice = "there is a driver, but this torch is built without CUDA: install one that is built for it"
    else:
        advice = (
            f"there is a driver for CUDA {_cuda_version(machine.driver.cuda_version)}, but torch, built for "
            f"{machine.torch_cuda}, sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, and that torch's "
            "CUDA is not newer than the driver's"
        )
    if asked.device == "cuda":
        return _finding("GPU", "GPU", "no NVIDIA GPU", f"{advice}; or use --device cpu")
    found = "no NVIDIA GPU: the engine runs on the CPU"
    return _finding("GPU", "GPU", found, None if machine.driver is None else advice, Level.YELLOW)


def _judge_several_gpus(asked: EngineConfig, machine: Machine) -> Iterator[Finding]:
    line, several, wanted = partial(_finding, "several GPUs"), machine.several_gpus, asked.tensor_parallel_size
    found = 1 if several is None else len(several.names)
    # As needed as the ranks that were asked for.
    level = Level.RED if wanted > 1 else Level.YELLOW
    if several is not None:
        links = {True: "NVLink", False: "PCIe", None: "unknown"}
        by_link = {
            name: [pair for pair in several.pairs if pair.has_nvlink is is_nvlink] for is_nvlink, name in links.items()
        }
        advice = None
        if by_link["PCIe"]:
            advice = "sums over ranks are slow without NVLink: take GPUs that it joins (CUDA_VISIBLE_DEVICES)"
        elif by_link["unknown"]:
            advice = f"NVML does not tell: see `nvidia-smi topo -m`, or {_INSTALL_CUDA}"
        texts = [f"{name} {_pairs(pairs, several)}" for name, pairs in by_link.items() if pairs]
        yield line("links", "; ".join(texts), advice, Level.YELLOW)
        without = [pair for pair in several.pairs if not pair.has_peer_access]
        advice = "NCCL goes through the host's memory, slowly: see whether IOMMU or ACS is on, or a virtual machine"
        text = f"not {_pairs(without, several)}" if without else _pairs(several.pairs, several)
        yield line("peer access", text, advice if without else None, Level.YELLOW)
        advice = None if several.nccl else "this torch is built without NCCL: install NVIDIA's build for Linux"
        yield line("NCCL", several.nccl or "none", advice, level)
        if len(names := sorted(set(several.names))) > 1:
            advice = "ranks wait for the slowest: choose equal GPUs (CUDA_VISIBLE_DEVICES)"
            yield line("kinds", " and ".join(names), advice, Level.YELLOW)
    if wanted > found and machine.uses_gpu:
        advice = f"each rank needs a GPU: lower it, or check CUDA_VISIBLE_DEVICES; torch sees {found}"
        yield line(f"--tensor-parallel-size {wanted}", "the engine would refuse to start", advice)
    elif several is not None and several.nccl:
        yield line("tensor parallelism", f"can work, with up to {found} ranks")
    elif several is not None:
        yield line("tensor parallelism", "cannot work", "see NCCL above", level)


def _pairs(pairs: Sequence[GpuPair], several: SeveralGpus) -> str:
    if len(pairs) == len(several.pairs):
        return f"between all {len(several.names)} GPUs"
    names = [f"{one}-{other}" for one, other in (pair.gpus for pair in pairs)]
    more = f" and {len(names) - _MOST_PAIRS} more" if len(names) > _MOST_PAIRS else ""
    return f"between {', '.join(names[:_MOST_PAIRS])}{more}"


def _judge_libraries(machine: Machine) -> Iterator[Finding]:
    line, cuda_python = partial(_finding, "libraries"), machine.cuda_python
    triton, flashinfer = (machine.provenance.versions[name] for name in ("triton", "flashinfer"))
    yield line("Triton", triton or "not installed", None if triton else _INSTALL_CUDA)
    advice = f"release {FLASHINFER_RELEASE} is needed: pip install flashinfer-python=={FLASHINFER_RELEASE}"
    yield line("FlashInfer", flashinfer or "not installed", None if flashinfer == FLASHINFER_RELEASE else advice)
    yield line("cuda-python", cuda_python or "not installed", None if cuda_python else _INSTALL_CUDA)
    problem = machine.gpu_path_problem
    if problem is None:
        yield line("GPU path", "imports")
    else:
        advice = f"{problem}: mend the libraries above ({_INSTALL_CUDA}), or use --device cpu"
        yield line("GPU path", "cannot be imported", advice)
    if machine.missing_compilers:
        advice = (
            "kernels that are not in the caches yet are compiled at first use: install the CUDA toolkit, ninja and "
            "a C compiler"
        )
        yield line("compilers", f"no {', no '.join(machine.missing_compilers)}", advice, Level.YELLOW)
    else:
        yield line("compilers", "nvcc, ninja, a C compiler")


def _judge_partitions(asked: EngineConfig, machine: Machine) -> Iterator[Finding]:
    line, checks = partial(_finding, "partitions"), machine.partitions
    if not machine.uses_gpu:
        is_asked = asked.decode_sms or asked.partition_backend not in (AUTO, NoneBackend.name)
        advice = "SM partitions need a GPU: leave out --decode-sms and --partition-backend"
        yield line("SM partitions", "none on the CPU", advice if is_asked else None)
    elif machine.driver is not None:
        yield _judge_offset(machine)
    if checks is None:
        return
    for backend in checks.backends:
        # What auto can do without is no obstacle; the back end "none" is what every engine can have.
        is_needed = asked.partition_backend != AUTO or backend.name == NoneBackend.name
        yield _judge_backend(backend, Level.RED if is_needed else Level.YELLOW)
    name = f"--partition-backend {asked.partition_backend}"
    if checks.choice is not None:
        yield line(name, checks.why)
    elif asked.partition_backend == AUTO and not asked.decode_sms:
        advice = f"{checks.why}; without --decode-sms the engine uses the whole GPU and needs no partitions"
        yield line(name, "no back end can split this GPU", advice, Level.YELLOW)
    else:
        yield line(name, "the engine would refuse to start", checks.why)


def _judge_offset(machine: Machine) -> Finding:
    line, offset = partial(_finding, "partitions", "stream masks"), machine.mask_offset
    if machine.mask_offset_problem is not None:
        return line("calibrations cannot be read", machine.mask_offset_problem, Level.YELLOW)
    if offset is None:
        advice = "this driver is not in the table: run `bullet-graph doctor --calibrate`, about a minute"
        return line("offset unknown", advice, Level.YELLOW)
    how = "known for this driver" if offset.source == "table" else "proven on this machine by calibration"
    return line(f"offset 0x{offset.offset:x} {how}")


def _judge_backend(backend: BackendCheck, level_of_failure: Level) -> Finding:
    held = [size for size in backend.sizes if size.problem is None]
    failed = [size for size in backend.sizes if size.problem is not None]
    found = [f"steps of {backend.granularity_sms} SMs" if backend.granularity_sms else "cannot be opened"]
    if held:
        found.append(f"{_sizes(held)} verified in {sum(size.seconds or 0 for size in held):.2f} s")
    if failed:
        found.append(f"{_sizes(failed)} refused")
    problems, advice = backend.problems, None
    if problems:
        advice = problems[0] + (f" (and {len(problems) - 1} more, all in --json)" if problems[1:] else "")
    return _finding("partitions", f"back end {backend.name}", "; ".join(found), advice, level_of_failure)


def _sizes(checks: Iterable[SizeCheck]) -> str:
    sizes = [check.decode_sms for check in checks]
    numbers = ", ".join(str(size) for size in sizes if size is not None)
    whole_gpu = "the whole GPU" if None in sizes else ""
    return " and ".join(filter(None, (whole_gpu, numbers and f"{numbers} SMs for decode")))


def _judge_caches(machine: Machine) -> Iterator[Finding]:
    advice = "it cannot be written, so its work is done anew in each run or fails: give this user write permission"
    for cache in machine.caches:
        name, found = f"cache of {cache.name}", f"{cache.path}, {format_bytes(cache.num_bytes)}"
        yield _finding("caches", name, found, None if cache.is_writable else advice, Level.YELLOW)


def _judge_model(asked: EngineConfig, machine: Machine) -> Iterator[Finding]:
    if not asked.model:
        return
    if machine.ledger is not None:
        found = "; ".join(f"{label} {format_bytes(size)}" for label, size in machine.ledger.rows())
        yield _finding("model", asked.model, found)
    else:
        advice = machine.model_problem or "its memory is known once the GPU works: mend the red lines above"
        yield _finding("model", asked.model, "cannot be run", advice)
