"""What a partition of the GPU is."""

from dataclasses import dataclass

SMS_PER_TPC = 2
"""SMs that a TPC, the unit of a mask, holds: two since Pascal."""


@dataclass(frozen=True, slots=True, order=True)
class SmPartition:
    """How many TPCs (pairs of SMs) each lane may use; None for all of them.

    Attributes:
        decode_tpcs: of the decode lane.
        prefill_tpcs: of the prefill lane.
    """

    decode_tpcs: int | None = None
    prefill_tpcs: int | None = None


WHOLE_GPU = SmPartition()
"""Each lane may use every SM."""
