"""Run every case against one system, in this process, and print a JSON line per case."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import traceback

from peers.interface import NotOfferedError, System

from conformance import language, priorities, ranks, steps, windows  # noqa: F401  (they register cases)
from conformance.check import CASES

CASE_S = 120
LATE = f"took over {CASE_S} s"


class LateError(BaseException):
    """No answer in time; not an Exception, which a case may take for a refusal."""


def verdict(system: System, name: str) -> tuple[str, str]:
    """Return the kind and the text of a case's result."""

    def late(*_: object) -> None:
        raise LateError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(CASE_S)
    try:
        CASES[name].run(system)
    except NotOfferedError:
        return "not offered", ""
    except NotImplementedError as error:  # of the system itself: it has no such thing
        return "not offered", str(error)
    except LateError:
        return "late", LATE
    except AssertionError as error:
        return "wrong", str(error)
    except Exception as error:
        if "-v" in sys.argv:
            traceback.print_exc()
        return "refused", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        signal.alarm(0)
    return "right", ""


def main() -> None:
    """Run the cases that the arguments name, or all."""
    system: System = importlib.import_module(f"peers.{sys.argv[1]}").SYSTEM
    for name in [given for given in sys.argv[2:] if given != "-v"] or list(CASES):
        print(json.dumps({"case": name, "running": True}), flush=True)
        kind, text = verdict(system, name)
        print(json.dumps({"case": name, "kind": kind, "text": text, "version": system.version()}), flush=True)


if __name__ == "__main__":
    main()
