"""How fast items are selected: prioritized and uniform batches against a C loop and against cpprb.

    python benchmarks/select.py --json F                      one thread: batches, memory, growth, top-k
    python benchmarks/select.py --ranks 2 --json F --figure F     also: ranks at once on one store

A batch is sampled, gathered and weighted, and its priorities are updated. The performance pages say what the
columns mean.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os.path import dirname, realpath


def _give_way() -> None:
    """Put the standard library's `select` in the place of this file, which hides it from its neighbours."""
    folder = dirname(realpath(__file__))
    spec = PathFinder.find_spec("select", [path for path in sys.path if realpath(path) != folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["select"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["select"])


if __name__ == "select":
    _give_way()
elif __name__ == "__main__":
    from support.selection import main

    main(__doc__)
