"""Evaluation passes over splits: every item once, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from deepspeed_gear.batching.batch import Batch, LentTensors
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_info import TRAIN
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import PASS_SHIFT
from deepspeed_gear.store.records import Head


class Evaluation:
    """The evaluation passes of a Replay. Main thread only."""

    def __init__(self, parts: ReplayParts) -> None:
        self._parts = parts
        self.begun: dict[str, int] = {}  # by split

    def batches(self, split: str, check: Callable[[], None]) -> Iterator[Batch]:
        """Begin a pass; return its batches.

        Args:
            check: Called before each batch.
        Raises:
            ConfigError: There is no such split.
        """
        found, number = self._streams(split), self.begun.get(split, 0)
        self.begun[split] = number + 1
        return chain.from_iterable(self._pass(stream, number, check) for stream in found)

    def continue_from(self, begun: dict[str, int]) -> None:
        """Set how many passes of each split have begun, from a checkpoint."""
        self.begun = begun

    def num_batches(self, split: str) -> int:
        """Return the batches of a rank in a pass.

        Raises:
            ConfigError: There is no such split.
        """
        return sum(-(-stream.num_items // stream.spec.batch) for stream in self._streams(split))

    def _streams(self, split: str) -> list[BatchStream]:
        by_table = self._parts.streams.values()
        found = [streams[split] for streams in by_table if split in streams]
        if not found or split == TRAIN:
            known = dict.fromkeys(name for streams in by_table for name in streams)
            raise ConfigError("stream", f"must be one of {', '.join(known)}", split, "give gear.data.split")
        return found

    def _pass(self, stream: BatchStream, number: int, check: Callable[[], None]) -> Iterator[Batch]:
        plan, assembler = self._parts.plan, self._parts.assembler
        place, index, num_batches = plan.topology.place, 0, 1
        lent = LentTensors(max(2, plan.info.accumulation))
        while index < num_batches:
            check()
            lent.make_room()
            key = number << PASS_SHIFT | index
            selection = stream.get(key)
            size = int(selection.head[Head.EPOCH_SIZE])
            num_batches = -(-size // stream.spec.batch)
            taken = stream.part_of(selection, place.data_rank, place.data_world)
            batch = assembler.assemble(stream, taken, place.data_rank, place.data_world, size)
            assembler.release(stream, key)
            batch = assembler.hand_over(batch)
            lent.add(batch)
            yield batch
            index += 1
