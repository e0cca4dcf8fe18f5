"""The reference ops as a backend: the oracle of equivalence tests."""

from collections import ChainMap
from dataclasses import dataclass

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.backends import OP_NAMES
from deepspeed_gear.ops.reference import gather, priorities, returns, ring_table, select

MEANING = ChainMap(*map(vars, (gather, priorities, returns, ring_table, select)))
#: Message codecs and the packing heuristic exist once, in C++: their tests are round trips and
#: invariants.
WITHOUT_REFERENCE = frozenset(OP_NAMES) - MEANING.keys()


@dataclass(frozen=True)
class ReferenceOps(Ops):
    """The ops in plain PyTorch, for host memory as they are; those without a reference
    are native.
    """

    def on_host(self) -> Ops:
        return self


def ops_named(name: str) -> Ops:
    """Return the reference ops, or those of a backend of jobs."""
    native = load_backend("cpu" if name == "reference" else name)
    if name != "reference":
        return native
    ops = {op: MEANING.get(op, getattr(native, op)) for op in OP_NAMES}
    return ReferenceOps(name, **ops, native=native.native)


def reference_ops() -> Ops:
    """Return the reference ops; what is no op, such as locks, is native."""
    return ops_named("reference")
