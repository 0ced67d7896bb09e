"""Which blocks decode rows have in common, and what that saves. Numpy alone, for the simulator has them, too."""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = TypeVar("Array")
Int32Array = NDArray[np.int32]

MOST_MEMBERS = 4  # rows that read common blocks at once; with 8, the kernel is slower
_LEAST_SHARED_BLOCKS = 8
_LEAST_COMMON_BYTES = 2**23  # of a layer; fewer stay in the L2 cache, from where each row reads them as fast
_LAUNCH_BYTES = 88 * 2**20  # of a layer, read in the time that the launch for groups takes
_CACHED_SHARE, _GROUPED_SHARE = 0.44, 0.61
"""Of a block's repeated reads, the L2 cache saves the first share of their time, and groups save the second as well."""


class SharedBlocks(NamedTuple, Generic[Array]):
    """Which first blocks of neighbouring rows are common to them, and read once; int32 arrays, on host or device.

    ``group_indptr`` [groups + 1] is where each group's common blocks would start, were there no others; ``members``
    [2 * groups] its first row and the number of its rows. ``own_indptr`` [rows + 1] is a ``kv_indptr`` of the blocks
    after those. A group without blocks is padding.
    """

    group_indptr: Array
    members: Array
    own_indptr: Array


HostBlocks = SharedBlocks[Int32Array]


def shared_blocks(kv_indptr: Int32Array, kv_indices: Int32Array) -> HostBlocks | None:
    """Find groups of at most :data:`MOST_MEMBERS` neighbouring rows that begin with the same blocks.

    ``kv_indptr`` [rows + 1] is where each row's blocks start in ``kv_indices``: from 0 on, at least one each. The
    result has as many groups as the rows can form. None: there are no such rows.
    """
    # A row's last block is its own, for it writes there.
    rows, starts, lengths = len(kv_indptr) - 1, kv_indptr[:-1], np.diff(kv_indptr) - 1
    shorter = np.minimum(lengths[1:], lengths[:-1])
    pairs = np.flatnonzero((kv_indices[starts[1:]] == kv_indices[starts[:-1]]) & (shorter >= _LEAST_SHARED_BLOCKS))
    if not len(pairs):
        return None
    # Two rows with one block at one place hold the same tokens up to its end: a binary search finds the last such.
    same, upto = np.ones_like(pairs), shorter[pairs]
    while (same < upto).any():
        middle = (same + upto + 1) // 2
        is_same = kv_indices[starts[pairs] + middle - 1] == kv_indices[starts[pairs + 1] + middle - 1]
        same, upto = np.where(is_same, middle, same), np.where(is_same, upto, middle - 1)
    common = dict(zip(pairs.tolist(), same.tolist(), strict=True))
    group_blocks, members, counts, first = [], [], np.zeros(rows, dtype=np.int32), 0
    while first < rows - 1:
        last, blocks = first, int(lengths[first])
        end = min(rows, first + MOST_MEMBERS)
        while last + 1 < end and min(blocks, common.get(last, 0)) >= _LEAST_SHARED_BLOCKS:
            blocks, last = min(blocks, common[last]), last + 1
        if last > first:
            group_blocks.append(blocks)
            members += [first, last - first + 1]
            counts[first : last + 1] = blocks
        first = last + 1
    if not group_blocks:
        return None
    padding = rows // 2 - len(group_blocks)
    indptr = np.concatenate(([0], np.cumsum(group_blocks + [0] * padding))).astype(np.int32)
    own_indptr = kv_indptr - np.concatenate(([0], counts.cumsum())).astype(np.int32)
    return SharedBlocks(indptr, np.array(members + [0, 0] * padding, dtype=np.int32), own_indptr)


def saved_blocks(
    shared: HostBlocks, kv_indptr: Int32Array, kv_indices: Int32Array, block_bytes: int
) -> tuple[float, float]:
    """What the L2 cache saves, and what groups save as well: the time of reading so many blocks from memory.

    ``block_bytes`` are those of a block's keys and values in a layer. Groups save 0 where they are slower. The shares
    are a fit to 14 batches on an H200.
    """
    sizes = np.diff(shared.group_indptr)
    (firsts, rows), sizes = shared.members.reshape(-1, 2)[sizes > 0].T, sizes[sizes > 0]
    reads, read_once = int((sizes * rows).sum()), int(sizes.sum())
    # Of groups with one first block, the first counts.
    different = int(sizes[np.unique(kv_indices[kv_indptr[firsts]], return_index=True)[1]].sum())
    by_groups = _GROUPED_SHARE * (reads - read_once) - _LAUNCH_BYTES / block_bytes
    pays = by_groups > 0 and different * block_bytes >= _LEAST_COMMON_BYTES
    return _CACHED_SHARE * (reads - different), by_groups if pays else 0.0
