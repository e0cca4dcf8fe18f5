"""Run cases against one system, in this process, by their names."""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Any

from peers.interface import NotOfferedError
from peers.orders import carry_out

from conformance import language, priorities, ranks, steps, windows  # noqa: F401  (they register cases)
from conformance.check import CASES, System

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
        traceback.print_exc()
        return "refused", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        signal.alarm(0)
    return "right", ""


def main() -> None:
    """Answer orders with the version of the system, or with the result of a case."""
    system = System(sys.argv[1])

    def answer(order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "version":
            return {"version": system.version()}
        kind, text = verdict(system, order["case"])
        return {"case": order["case"], "kind": kind, "text": text}

    carry_out(answer)


if __name__ == "__main__":
    main()
