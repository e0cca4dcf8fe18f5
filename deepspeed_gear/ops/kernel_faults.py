"""Faults that have ended a kernel on a GPU: the op, the position of the wrong index, and a remedy.

A kernel that finds a wrong index ends the CUDA context of its process, and torch reports only a
launch failure, at some later call. Before that, the kernel writes the fault to host memory
(ops/csrc/common/faults_cuda.h).
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_gear.errors import KernelError
from deepspeed_gear.log import LOG
from deepspeed_gear.ops import jit, native_op


def found_fault() -> KernelError | None:
    """Return the fault that has ended a kernel of this process. Does not wait for the device."""
    module = jit.loaded(native_op.CudaOp.NAME)
    parts = None if module is None else module.fault()
    if parts is None:
        return None
    name, rule, remedy = parts
    return KernelError(name, rule, remedy=remedy)


@contextmanager
def named() -> Iterator[None]:
    """Raise errors of CUDA in the block as the KernelError of the fault, if there is one."""
    try:
        yield
    except RuntimeError as error:
        fault = found_fault()
        if fault is None:
            raise
        raise fault from error


@functools.cache
def report_at_exit() -> None:
    """Log the fault when this process ends, for errors that surface in calls of torch."""
    atexit.register(_report, os.getpid())


def _report(process: int) -> None:
    if os.getpid() != process:  # a fork has no access to the word in pinned memory
        return
    fault = found_fault()
    if fault is not None:
        LOG.error("a kernel has ended the CUDA context of this process: %s", fault)
