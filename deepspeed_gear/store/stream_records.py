"""Records of a batch stream in its table's store; eviction and pins read them too."""

from __future__ import annotations

from typing import Final

NOTHING: Final = -1  # the key of an empty ring entry
NEVER_LATE: Final = 1 << 62  # the word of a process that reads no selections


class Head:
    """Words of a selection: the position after it, and the inputs of its PER weights."""

    KEY: Final = 0  # number of the global batch; in an evaluation pass, pass << 32 | batch
    SAMPLES: Final = 1  # samples before the next one
    EPOCH: Final = 2
    EPOCH_FIRST: Final = 3  # sample number at which the epoch began
    EPOCH_SIZE: Final = 4
    TOTAL: Final = 5  # sum of all masses
    COUNT: Final = 6  # records: samples, or the trajectories of sampled groups
    FILLERS: Final = 7  # samples beyond the end of a pass
    SKIPPED: Final = 8  # in epochs: items ever that were evicted before their turn
    NUMERATOR: Final = 8  # of the weights of a selection with priorities
    DIVISOR: Final = 9
    EXPONENT: Final = 10
    NUM_SET: Final = 11  # words that a selection sets
    NUM_WORDS: Final = 16


class Position(Head):
    """Words of a batch stream's position: those of its latest head, with the next KEY, and these."""

    DONE: Final = 11  # 0, or 1 + samples of the next selection that were resolved before its epoch ended
    AHEAD: Final = 12  # global batch whose draws are in its ring entry before it is selected
    RECOVERED: Final = 13  # RECOVERIES of the store when this stream was last repaired
    WRITES: Final = 14  # over nodes: a process of this node writes too, and must not wait for itself
    LIMITED: Final = 15  # over nodes: the rate limiter refuses the next selection
