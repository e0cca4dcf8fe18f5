"""Constants that Python and C++ share: layouts of records, specs, trees. A test compares them."""

from __future__ import annotations

# draws/draws.h: messages between nodes.
SHARD_BITS = 32  # where several nodes hold a table, the slot of a report has its shard above these
ANY_SLOT = (
    1 << SHARD_BITS
) - 1  # in place of the slot in a report by id: only its shard can look it up
UNKNOWN = -1  # id of a sample whose resolution a node has not received

# common/power.h: masses are Q24, exponents Q62.
MASS_BITS = 24
MOST_MASS_BITS = 40
EXACT_MASS_BITS = 6  # masses below 2^6 are rounded by more than 1 / 128
ONE_Q62 = 1 << 62
MOST_TOTAL_BITS = 62  # the sum of all masses is below 2 to this


def most_mass_bits(num_items: int) -> int:
    """Return log2 of the largest mass of an item, so that a table's masses sum to less than 2^62: N
    items at most, all nodes together, below 2^b, are 2N as N is rounded up on each node, of mass
    2^(61 - b).
    """
    return max(1, min(MOST_MASS_BITS, MOST_TOTAL_BITS - 1 - num_items.bit_length()))


# common/slot.h
MOST_STEPS = 1 << 40  # of trajectories, offsets and lengths

# pack/plan.h
MOST_PACK_TOKENS = (1 << 31) - 1  # cu_seqlens are int32
MOST_PACK_WIDTH = 1 << 20

# common/tree.h
FAN_OUT = 32


def tree_levels(num_items: int) -> list[tuple[int, int]]:
    """Return offset and width, in words, of every level of the tree of `num_items` masses: level 0
    the masses, then sums of groups of `FAN_OUT` nodes, to one group. Levels are padded with zeros
    to whole groups.
    """
    levels: list[tuple[int, int]] = []
    nodes = max(num_items, 1)
    offset = 0
    while True:
        width = -(-nodes // FAN_OUT) * FAN_OUT
        levels.append((offset, width))
        if width <= FAN_OUT:
            return levels
        nodes, offset = width // FAN_OUT, offset + width


def tree_size(num_items: int) -> int:
    offset, width = tree_levels(num_items)[-1]
    return offset + width


def minima_levels(num_items: int) -> list[tuple[int, int]]:
    """Return offset and width of the levels of the tree of minima, in words: those >= 1 of the
    sums.
    """
    (_, leaves), *levels = tree_levels(num_items)
    return [(offset - leaves, width) for offset, width in levels]


def minima_size(num_items: int) -> int:
    return sum(width for _, width in minima_levels(num_items))


# common/ring.h: a table in the memory of one device.
HIGHEST_SO_FAR = -1  # in place of the bits of the priority of new items
