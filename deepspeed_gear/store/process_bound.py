"""Objects of one process: they cannot be pickled or copied, and a forked child cannot use them.

The child has its parent's locks, sample numbers and memory but no threads: two would return the
same batches, and an end would detach the parent.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, TypeVar

from deepspeed_gear.errors import StoreError

Bound = TypeVar("Bound", bound="ProcessBound")
_living: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


class ProcessBound:
    """Base of classes whose objects only their own process may use; a `with` block closes them."""

    def __new__(cls: type[Bound], *arguments: Any, **options: Any) -> Bound:
        """Register an object, weakly, for `_leave_to_parent`."""
        del arguments, options
        made = super().__new__(cls)
        _living.add(made)
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        rule = "must stay in the process that made it: it cannot be pickled or copied"
        raise StoreError(f"a {name}", rule, None, f"make a {name} in the process that uses it")

    def __enter__(self: Bound) -> Bound:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()

    def close(self) -> object:
        """Release what the object holds; classes with another end have a block of their own."""
        raise NotImplementedError


class InForkedChild:
    """Class of a ProcessBound in a forked child: `close` does nothing, everything else raises."""

    def __getattribute__(self, name: str) -> Any:
        if name == "close":
            return lambda: None  # the stores are the parent's
        if name.startswith("__"):  # of the language: `__class__`, `__dict__`
            return object.__getattribute__(self, name)
        return InForkedChild.__refuse(self)

    def __refuse(self, *_: object) -> NoReturn:
        rule = "must be used in the process that made it"
        given = f"process {os.getpid()}, which was forked"
        remedy = (
            "make one in the child, or start it by spawn; a DataLoader over a Replay needs "
            "num_workers=0"
        )
        raise StoreError("a replay or writer", rule, given, remedy)

    __reduce_ex__ = __len__ = __iter__ = __next__ = __getitem__ = __enter__ = __setattr__ = __refuse

    def __exit__(self, *_: object) -> None:
        """Leave a block that the parent has entered."""


def _leave_to_parent() -> None:
    """In a forked child: make the parent's objects unusable; their end then detaches nothing."""
    for made in list(_living):
        finalizer = vars(made).get("_finalizer")
        if finalizer is not None:
            finalizer.detach()
        object.__setattr__(made, "__class__", InForkedChild)
    _living.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
