"""How batches get from the memory of a node to its GPUs."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt
from pydantic import Field

from deepspeed_gear.config.types import Flag, GearModel, Int


class TransferConfig(GearModel):
    """How batches get from shared memory to a GPU. Every choice gives the same batches.

    A field whose column CUDA cannot read in place (a mapped file, memory that is not registered, a goal of
    hindsight) is staged; a field that the copy engine does not serve (padding by the edge, a window that
    follows `n_step`, a column of one row per trajectory) is read in place.
    """

    way: Literal["auto", "direct", "copies", "staged"] = Field(
        default="auto",
        description=(
            '"direct": kernels read shared memory in place; "copies": the copy engine fetches each window, '
            'kernels convert and pad it; "staged": threads of the CPU gather into pinned memory, one copy '
            'takes it over; "auto": the fastest as measured at the start, on the CPU none of them, with the '
            "copy engine for windows of 16 KiB and more only. Named for the CPU, a way runs there, which is "
            "for tests."
        ),
    )
    register_bytes: Annotated[Int, Ge(0), Lt(2**62)] | None = Field(
        default=None,
        description=(
            "Most bytes of shared memory that a rank registers with CUDA, whole columns in the order of the "
            "fields; about 0.1 s and 6 MB of kernel memory a GB. null: all that is sampled from."
        ),
    )
    calibrate: Flag = Field(
        default=True,
        description='With "auto": measure. Else the first possible of direct, copies and staged is taken.',
    )
