"""What a partition of the GPU is."""

from dataclasses import dataclass

from bullet_graph.errors import PartitionError

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


def partition_of(decode_sms: int | None, *, num_sms: int) -> SmPartition:
    """The partition that gives the decode lane so many SMs and the prefill lane the rest; None: the whole GPU.

    Raises:
        PartitionError: the number of SMs is odd, or leaves a lane without a TPC. Whether masks can be laid out so is
            the back end's to say.
    """
    if decode_sms is None:
        return WHOLE_GPU
    decode_tpcs, odd = divmod(decode_sms, SMS_PER_TPC)
    if odd:
        raise PartitionError(
            f"a decode lane must be a multiple of {SMS_PER_TPC} SMs (a TPC), got {decode_sms}: choose "
            f"{decode_sms - odd} or {decode_sms + odd}"
        )
    if not 0 < decode_sms < num_sms:
        raise PartitionError(
            f"a decode lane must have from {SMS_PER_TPC} to {num_sms - SMS_PER_TPC} of the GPU's {num_sms} SMs, got "
            f"{decode_sms}: the prefill lane needs the others; for the whole GPU leave the size out"
        )
    return SmPartition(decode_tpcs, num_sms // SMS_PER_TPC - decode_tpcs)
