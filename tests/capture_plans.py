"""A capture plan for an H200; tests change what they are about."""

from bullet_graph.graphs.capture_plan import CapturePlan, DecodeSizes
from bullet_graph.partition.masks import SmPartition

NARROW = SmPartition(16, 50)
PLAN = CapturePlan(
    model="llama-3.1-8b",
    dtype="bfloat16",
    num_sms=132,
    max_num_seqs=64,
    decode=(DecodeSizes(None, (1, 8, 64)), DecodeSizes(32, (4, 16))),
    piecewise_rows=(16, 128),
)
"""Its only decode lane is ``NARROW``'s."""
