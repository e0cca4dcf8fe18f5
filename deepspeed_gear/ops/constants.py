"""What Python and C++ share: the layout of records, specs and trees. A test compares it with the headers."""

from __future__ import annotations

# common/slot.h: a row of the slot table, and what a draw resolves to.
SLOT_WORDS = 8
SLOT_STATE, SLOT_GENERATION, SLOT_ID, SLOT_FIRST_ROW, SLOT_NUM_STEPS, SLOT_NUM_ROWS, SLOT_OWNER = range(7)
RESOLUTION_WORDS = 8
R_ID, R_SLOT, R_GENERATION, R_FIRST_ROW, R_NUM_STEPS, R_ANCHOR, R_MASS, R_NUMBER = range(8)
NO_SAMPLE = -1  # id and slot of a record that is no sample; but for its number the rest of it is 0
SLOT_COMMITTED = 2  # the state of a slot whose trajectory can be drawn
UNIT_TRAJECTORY, UNIT_STEP, UNIT_LENGTH = 0, 1, 2  # the last one of masses only: a trajectory by its length
COMMITTED = 2  # the state of a slot whose trajectory can be drawn
UPDATE_WORDS = 4
U_SLOT, U_GENERATION, U_ANCHOR, U_PRIORITY = range(4)
REPORT_WORDS = UPDATE_WORDS + 2  # an update, the batch it belongs to, its sample number
REPORT_BATCH, REPORT_NUMBER = UPDATE_WORDS, UPDATE_WORDS + 1

# cpu/ops.h: what travels between nodes.
BY_ID = 1 << 62  # number of a report by id: behind every sample number
SHARD_BITS = 32  # where several nodes hold a table, the slot of a report has its shard above these
ANY_SLOT = (1 << SHARD_BITS) - 1  # in place of the slot in a report by id that only its shard knows
UNKNOWN = -1  # id of a sample that a node knows nothing of

# cpu/ops.h: what updates of priorities did.
APPLIED, STALE, CLAMPED, HIGHEST_PRIORITY, DRAWABLE = range(5)
NUM_UPDATE_COUNTS = 5

# common/power.h: masses are Q24, exponents Q62.
MASS_BITS, MOST_MASS_BITS = 24, 40
ONE_Q62 = 1 << 62
MOST_TOTAL_BITS = 62  # the sum of all masses is below 2 to this


def most_mass_bits(num_items: int) -> int:
    """Return log2 of the largest mass of an item, so that any masses of a table sum to less than 2^62.

    With N below 2^b, 2N items (N is rounded up on each node) of mass 2^(61 - b) sum to less than 2^62.

    Args:
        num_items: Most items that the table ever holds, all nodes together.
    """
    return max(1, min(MOST_MASS_BITS, MOST_TOTAL_BITS - 1 - num_items.bit_length()))


# common/philox.h: what a random word is for.
FOR_COORDINATE, FOR_ANCHOR, FOR_PERMUTATION, FOR_SPLIT, FOR_TRANSFORM, FOR_RELABELLING, FOR_GOAL = range(7)

# common/slot.h, common/window.h and cpu/ops.h: a field of a gather.
MOST_STEPS = 1 << 40  # of trajectories, offsets and lengths
ALIGN_IN_PLACE, ALIGN_LEFT, ALIGN_RIGHT = 0, 1, 2
PAD_VALUE, PAD_EDGE = 0, 1
SOURCE_STEPS, SOURCE_STEPS_PLUS_ONE, SOURCE_TRAJECTORY, SOURCE_TIMESTEP, SOURCE_POSITION = range(5)
# Source, offset, length, align, after_n_step, pad, elements, index of the mask, first and count of the part.
FIELD_INTS = 10

# cpu/ops.h: what rows that travel are planned from.
SAMPLE_WORDS = 7
S_PEER, S_NEED, S_SLOT, S_NUM_STEPS, S_ANCHOR, S_N_STEPS, S_GOAL = range(7)
WINDOW_WORDS = 7
W_GROUP, W_IS_GOAL, W_FIRST, W_END, W_FOLLOWS, W_EDGE, W_FINAL_ROW = range(7)
COLUMN_WORDS = 3
C_GROUP, C_MEMBERS, C_ROW_BYTES = range(3)

# common/tree.h
FAN_OUT = 32


def tree_levels(num_items: int) -> list[tuple[int, int]]:
    """Lay out the tree of `num_items` masses.

    Level 0 holds the masses, a node of level l + 1 is the sum of a group of `FAN_OUT` nodes of level l, the
    last level is one group. Every level is padded with zeros to whole groups.

    Returns:
        Offset and width of every level, in words.
    """
    levels: list[tuple[int, int]] = []
    nodes, offset = max(num_items, 1), 0
    while True:
        width = -(-nodes // FAN_OUT) * FAN_OUT
        levels.append((offset, width))
        if width <= FAN_OUT:
            return levels
        nodes, offset = width // FAN_OUT, offset + width


def tree_size(num_items: int) -> int:
    """Return the words of a tree of `num_items` masses."""
    offset, width = tree_levels(num_items)[-1]
    return offset + width


def minima_levels(num_items: int) -> list[tuple[int, int]]:
    """Lay out the tree of minima: the levels >= 1 of the tree of sums, empty for one group of items.

    Returns:
        Offset and width of every level from 1 on, in words.
    """
    (_, leaves), *levels = tree_levels(num_items)
    return [(offset - leaves, width) for offset, width in levels]


def minima_size(num_items: int) -> int:
    """Return the words of the tree of minima over `num_items` masses."""
    return sum(width for _, width in minima_levels(num_items))


# common/ring.h: a table in the memory of one device.
RING_WORDS = 32
RING_HEAD, RING_NEXT, RING_TAIL, RING_SAMPLES, RING_BATCH, RING_TOTAL, RING_STEPS, RING_REFUSED = range(8)
RING_COUNTS = 8  # the five words of updates begin here
RING_EMPTY = 14  # global batches without samples
PLACED_WORDS = 5
P_SLOT, P_FIRST_ROW, P_NUM_STEPS, P_ID, P_BEGIN = range(5)
NOT_NORMALIZED, BY_BATCH, BY_TABLE = range(3)
HIGHEST_SO_FAR = -1  # in place of the bits of the priority of new items
