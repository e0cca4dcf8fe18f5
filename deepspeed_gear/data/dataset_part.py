"""The part of a whole data set that a folder holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_gear.errors import DataError

_REMAKE = "the file is not the one that was written; make the parts again with gear split"
_KINDS = {
    "index": int,
    "count": int,
    "first": int,
    "trajectories": int,
    "rows": int,
    "steps": int,
    "longest": int,
    "whole": str,
}


@dataclass(frozen=True)
class DatasetPart:
    """A contiguous part of a data set, in id order.

    Args:
        index, count: Which of how many parts.
        first, end: Ids of its trajectories in the whole: [first, end).
        longest: Steps of the longest trajectory of the whole.
        whole: Fingerprint of the whole.
    """

    index: int
    count: int
    first: int
    end: int
    trajectories: int
    rows: int
    steps: int
    longest: int
    whole: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry of schema.json; `end` follows from the number of trajectories there."""
        return {name: value for name, value in asdict(self).items() if name != "end"}

    @classmethod
    def from_json(cls, name: str, entry: Any, num_trajectories: int) -> DatasetPart:
        """Read an entry of schema.json.

        Args:
            name: Name of the entry in errors.
            entry: Value of the entry.
            num_trajectories: Trajectories that the part itself holds.
        Raises:
            DataError: The entry is malformed or contradicts itself.
        """
        if not isinstance(entry, dict) or set(entry) != set(_KINDS):
            raise DataError(name, f"must record {', '.join(_KINDS)}", entry, _REMAKE)
        for key, kind in _KINDS.items():
            if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
                raise DataError(f"{name}.{key}", f"must be {kind.__name__}", entry[key], _REMAKE)
        part = cls(end=entry["first"] + num_trajectories, **entry)
        if not part._is_consistent:
            rule = f"must describe {num_trajectories} of the whole's trajectories"
            raise DataError(name, rule, str(entry), _REMAKE)
        return part

    @property
    def _is_consistent(self) -> bool:
        return (
            0 <= self.index < self.count
            and 0 <= self.first < self.end <= self.trajectories
            and (self.index == 0) == (self.first == 0)
            and (self.index == self.count - 1) == (self.end == self.trajectories)
        )

    def __str__(self) -> str:
        return (
            f"part {self.index} of {self.count}, trajectories {self.first} to {self.end - 1} of "
            f"{self.trajectories} of {self.whole[:12]}"
        )
