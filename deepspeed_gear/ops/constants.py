"""Constants that Python and C++ share: bounds of masses, layouts of records, specs and trees."""

from __future__ import annotations

# draws/draws.h: messages between nodes.
SHARD_BITS = 32  # where several nodes hold a table, the slot of a report has its shard above these
ANY_SLOT = (1 << SHARD_BITS) - 1  # slot of a report by id: only its shard can look that up
UNKNOWN = -1  # id of a sample whose resolution a node has not received

# common/power.h: masses are Q24, exponents Q62.
MASS_BITS = 24
MOST_MASS_BITS = 40
EXACT_MASS_BITS = 6  # masses below 2^6 are rounded by more than 1 / 128
ONE_Q62 = 1 << 62
MOST_TOTAL_BITS = 62  # the sum of all masses is below 2 to this


def most_mass_bits(num_items: int) -> int:
    """Return log2 of the largest mass of an item, so that a table's masses sum to less than 2^62.

    N < 2^b items on all nodes together may be 2 N, since each node rounds its part up: of masses up
    to 2^(61 - b) they sum to less than 2^62.
    """
    return max(1, min(MOST_MASS_BITS, MOST_TOTAL_BITS - 1 - num_items.bit_length()))


# common/slot.h
MOST_INDICES = (1 << 31) - 2  # rows and slots of a table on a device, which 32 bits number
MOST_STEPS = 1 << 40  # bound of lengths and offsets

# pack/plan.h
MOST_PACK_TOKENS = (1 << 31) - 1  # cu_seqlens are int32
MOST_PACK_WIDTH = 1 << 20

# common/tree.h
FAN_OUT = 32


def tree_levels(num_items: int) -> list[tuple[int, int]]:
    """Return offset and width, in words, of every level of the tree of `num_items` masses.

    Level 0 has the masses; the next ones sums of groups of `FAN_OUT` nodes, up to a level of one
    group. Levels are padded with zeros to whole groups: 33 masses have the levels (0, 64) and (64,
    32).
    """
    levels: list[tuple[int, int]] = []
    nodes = max(num_items, 1)
    offset = 0
    while True:
        width = -(-nodes // FAN_OUT) * FAN_OUT
        levels.append((offset, width))
        if width <= FAN_OUT:
            return levels
        nodes = width // FAN_OUT
        offset += width


def tree_size(num_items: int) -> int:
    """Return the words of the tree of `num_items` masses."""
    offset, width = tree_levels(num_items)[-1]
    return offset + width


def minima_levels(num_items: int) -> list[tuple[int, int]]:
    """Return offset and width, in words, of the levels of minima: those of the sums from 1 on."""
    (_, leaves), *levels = tree_levels(num_items)
    return [(offset - leaves, width) for offset, width in levels]


def minima_size(num_items: int) -> int:
    """Return the words of the tree of minima of `num_items` masses."""
    return sum(width for _, width in minima_levels(num_items))


# common/ring_layout.h: a table in the memory of one device.
HIGHEST_SO_FAR = -1  # in place of the bits of the priority of new items
