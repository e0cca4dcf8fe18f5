"""Native stream: a batch stream whose plain selections are made and read by one native call each.

`selector.py` makes the same selections and is the reference. The native call returns nothing, and Python goes
on, where a process has died, a wait is needed, or changes of masses wait that only Python can apply.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.samplers.base import NativeDraw
from deepspeed_gear.sampling.selection import SelectionPart
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.native_handle import address


class NativeStream:
    """The native call of a batch stream. Process safety: `take` takes the table's lock.

    Args:
        state: Of the stream, for which `is_plain` holds.
        native: The native module.
    """

    def __init__(self, state: StreamState, native: ModuleType) -> None:
        table, spec, masses = state.table, state.spec, state.masses
        memory = table.memory
        base = address(np.frombuffer(memory.buffer, np.uint8, 1))
        words = {
            "mutex": base + MUTEX_OFFSET,
            "holder": base + HOLDER_OFFSET,
            "control": address(table.control),
            "slots": address(table.slots),
            "num_slots": len(table.slots),
            "position": address(state.position),
            "heads": address(state.heads),
            "ring": address(state.ring_words),
            "consumed": address(state.consumed),
            "last_drawn": 0 if state.last_drawn is None else address(state.last_drawn),
            "num_peers": len(state.consumed),
            "peer": memory.peer,
            "seed": spec.seed,
            "key": spec.key,
            "batch": spec.batch,
            "depth": spec.depth,
            **masses.native_words(),
        }
        timeout_s = table.lock.timeout_s
        self._stream = native.Stream(words=words, rule=spec.rule.anchors.as_list(), timeout_s=timeout_s)
        self._take, self._address = native.stream_take, self._stream.address
        self._priorities = state.priorities

    @staticmethod
    def of(state: StreamState) -> NativeStream | None:
        """Return the native call of a stream; None where Python makes its selections."""
        native = state.table.ops.native
        return NativeStream(state, native) if native is not None and is_plain(state) else None

    def take(self, key: int, part: int, num_parts: int) -> SelectionPart | None:
        """Return every num_parts-th sample of a global batch; None: Python must make its selection.

        Args:
            key: Number of the global batch.
            part: Index of the first sample.
            num_parts: Micro batches of a global batch, over all ranks.
        """
        masses = self._priorities
        if masses is None:
            found = self._take(self._address, key, 0, 0, part, num_parts)
        else:
            alpha, beta = masses.alpha_at(key), masses.beta_at(key)
            found = self._take(self._address, key, alpha, beta, part, num_parts)
        return None if found is None else SelectionPart(*found)


def is_plain(state: StreamState) -> bool:
    """Return whether a stream draws at random from one store, without limits and counts."""
    spec, masses = state.spec, state.masses
    draws = spec.sampling.native is NativeDraw.RANDOM and not spec.sampler.walks and spec.count is None
    weighs = spec.rule.has_weights or spec.by_group or type(masses) not in (ItemMasses, PriorityMasses)
    limits = state.is_limited or state.staleness is not None or state.counts is not None
    return draws and not weighs and not limits and not spec.together
