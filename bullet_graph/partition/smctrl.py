"""Stream masks: a field of the driver's own stream object, written only at an offset that is known or proven."""

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from platform import machine

from bullet_graph import _smctrl
from bullet_graph.errors import PartitionError
from bullet_graph.partition import offsets
from bullet_graph.partition.driver import create_lane_streams
from bullet_graph.partition.masks import SMS_PER_TPC, GpcLayout, Lane, SmPartition, TpcMask, check_clusters, lane_masks
from bullet_graph.partition.offsets import DriverId
from bullet_graph.partition.probe import SmidProbe

LIBCUDA = "libcuda.so.1"
MASK_BITS = 128
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
# Three digits or more: a library's own "so.1.1" is no release.
_RELEASE = re.compile(r"\b\d{3,}(?:\.\d+)+\b")


def identify_driver(libcuda: str | Path = LIBCUDA) -> DriverId:
    """The driver of this machine, without initialising it; PartitionError where it or its release is not found."""
    try:
        cuda_version = _smctrl.driver_version(libcuda)
        library = Path(_smctrl.driver_path(libcuda)).resolve()
    except (OSError, RuntimeError) as error:
        raise PartitionError(
            f"stream masks need an NVIDIA driver, but found {error}: install the driver, or use "
            "--partition-backend none"
        ) from error
    # The library's name first: with a compatibility package it is newer than the kernel module.
    module = _KERNEL_MODULE.read_text(encoding="utf-8") if _KERNEL_MODULE.exists() else ""
    release = _RELEASE.search(library.name) or _RELEASE.search(module)
    if release is None:
        raise PartitionError(
            f"stream masks need the driver's release, which {library} and {_KERNEL_MODULE} do not name: use "
            "--partition-backend green"
        )
    return DriverId(cuda_version, release.group(), machine())


@dataclass(frozen=True, slots=True)
class MaskWords:
    """A mask in the driver's stream object: 1 where it is in force, then TPCs 0-63 and 64-127, set bits disabling."""

    enabled: int
    disable_low: int
    disable_high: int


def register(stream: int) -> None:
    """Allow the masks of a CUstream, just created, to be read and written; other handles are never followed."""
    _smctrl.register_stream(stream)


def read_words(stream: int, offset: int) -> MaskWords:
    """Read a CUstream's mask from the driver's memory."""
    return MaskWords(*_smctrl.get_mask(stream, offset))


def write_words(stream: int, offset: int, words: MaskWords) -> None:
    """Write a CUstream's mask into the driver's memory."""
    _smctrl.set_mask(stream, offset, words.disable_low, words.disable_high, enabled=words.enabled)


def bind(stream: int, offset: int, mask: TpcMask) -> None:
    """Confine kernels launched or captured on ``stream`` (a CUstream) from now on to the mask's TPCs.

    Raises PartitionError where the GPU has more TPCs than the mask, or other words are read back than were written.
    """
    if mask.num_tpcs > MASK_BITS:
        raise PartitionError(
            f"the driver's mask has {MASK_BITS} bits, but the GPU has {mask.num_tpcs} TPCs: use "
            "--partition-backend green"
        )
    disable_high, disable_low = divmod(mask.disable_bits, 1 << 64)
    words = MaskWords(int(mask.disable_bits != 0), disable_low, disable_high)
    write_words(stream, offset, words)
    if (found := read_words(stream, offset)) != words:
        raise PartitionError(
            f"stream {stream:#x} must hold {words}, but {found} was read back: bind masks from one thread only"
        )


class SmctrlBackend:
    """Gives each lane one stream for all partitions; :meth:`stream` binds it to the partition's mask.

    A mask acts on launches and captures that follow, so ask right before them. It does not change graphs captured
    earlier, nor the other lane. ``layout`` None takes TPCs by number, which is safe only for kernels without clusters:
    see :func:`~bullet_graph.partition.masks.check_clusters`.

    Raises PartitionError where the driver's offset is neither known nor proven.
    """

    name = "smctrl"
    granularity_sms = SMS_PER_TPC

    def __init__(self, probe: SmidProbe, *, layout: GpcLayout | None = None) -> None:
        with ExitStack() as undo:
            undo.callback(probe.close)
            self.num_sms = probe.num_sms
            driver = identify_driver()
            trusted = offsets.find(driver)
            if trusted is None:
                raise PartitionError(
                    "stream masks need an offset that is known or proven for the driver, but there is none for driver "
                    f"{driver.release} (CUDA {driver.cuda_version}, {driver.machine}): run "
                    "`bullet-graph doctor --calibrate`"
                )
            self.offset = trusted.offset
            self._num_tpcs = probe.num_sms // SMS_PER_TPC
            self._layout = layout
            self._masks: dict[SmPartition, dict[Lane, TpcMask]] = {}
            self._streams = create_lane_streams(probe.driver, undo)
            for stream in self._streams.values():
                register(stream)
                undo.callback(_smctrl.forget_stream, stream)
                # The driver reuses the memory of old streams for new ones, and a mask would stay in it.
                undo.callback(write_words, stream, self.offset, MaskWords(0, 0, 0))
            self.close = undo.pop_all().close

    def stream(self, lane: Lane, partition: SmPartition) -> int:
        stream = self._streams[lane]
        bind(stream, self.offset, self._mask(lane, partition))
        return stream

    def expected_sms(self, lane: Lane, partition: SmPartition) -> frozenset[int]:
        return self._mask(lane, partition).sms

    def _mask(self, lane: Lane, partition: SmPartition) -> TpcMask:
        masks = self._masks.get(partition)
        if masks is None:
            masks = lane_masks(partition, num_tpcs=self._num_tpcs, layout=self._layout)
            if self._layout is not None:
                for name, mask in masks.items():
                    check_clusters(mask, self._layout, name)
            self._masks[partition] = masks
        return masks[lane]
