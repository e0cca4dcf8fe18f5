"""Deaths between any two machine instructions of a native call: every state that one leaves in a
store.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from process_support import in_child
from store_support import StoreScene

from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET

_TRACEME = 0
_SINGLESTEP = 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, child: int) -> None:
    if _libc.ptrace(request, child, None, 0) != 0:
        error = os.strerror(ctypes.get_errno())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.skip(f"this machine does not let a process trace its child: {error}")


def states_left(
    scene: StoreScene, prepare: Callable[[Any], Callable[[], Any]], holds_lock: bool = True
) -> Iterator[int]:
    """Put a store into each state that the death of a peer leaves in a native call.

    The peer attaches, and prepares the call with its table: what it returns is the call, of C++
    alone, as a line of Python takes some thousand instructions. The peer `holds_lock` meanwhile, or
    the call takes the lock itself.

    The peer is a child that is stepped by single instructions. Whenever one has changed the store,
    its memory is copied; in the end it is killed, and the store gets one copy after the other. The
    next owner of the lock finds the word of its holder set, as after a death. Yields the number of
    the state.
    """
    memory = np.frombuffer(scene.table.memory.buffer, np.uint8)

    def run() -> None:
        table, _ = scene.attach(1)
        with table.lock if holds_lock else nullcontext():
            call = prepare(table)
            _libc.ptrace(_TRACEME, 0, None, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            call()
            os.kill(os.getpid(), signal.SIGSTOP)

    child = in_child(run)
    _, status = os.waitpid(child, 0)
    assert os.WIFSTOPPED(status)
    states = [memory.copy()]
    while True:
        _ptrace(_SINGLESTEP, child)
        _, status = os.waitpid(child, 0)
        assert os.WIFSTOPPED(status), status
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            break
        if not np.array_equal(memory, states[-1]):
            states.append(memory.copy())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with scene.table.lock:
        pass  # the mutex has a living owner from here on
    mutex = slice(MUTEX_OFFSET, HOLDER_OFFSET)
    assert len(states) > 4, "the trace saw nothing"
    for number, state in enumerate(states):
        state[mutex] = memory[mutex]
        memory[:] = state
        yield number
