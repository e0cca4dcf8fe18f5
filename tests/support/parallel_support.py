"""What the tests of parallelism share: fields, the ends of a pipeline, and the kinds of parallelism."""

from __future__ import annotations

from typing import Any

WINDOW = 4
FIELDS: dict[str, dict[str, Any]] = {
    "observation": {"offset": -3, "length": WINDOW},
    "action": {},
    "code": {},
    "late": {"column": "code", "offset": -1, "length": WINDOW, "align": "right", "pad": "edge"},
    "position": {"length": WINDOW},
}
ENDS = {
    "inputs": ["observation", "code"],
    "labels": ["action", "code", "trajectory_id", "mask.action", "is_weight"],
}
MODES = {  # what the program makes: ranks, replicas
    "zero:1x2": (2, 2),
    "zero:3x4": (4, 4),
    "hpz:2": (2, 2),
    "megatron:2x2": (4, 2),
    "tensor:2": (2, 1),
    "tensor:2x2": (4, 2),
    "tp_model_init:2": (2, 1),
    "pipe:2": (2, 1),
    "pipe:3": (3, 1),
    "pipe:2x2": (4, 2),
    "pipe:2x1x2": (4, 1),
    "ulysses:2x2": (4, 2),
    "mesh:2x2": (4, 2),
    "expert:2": (2, 2),
}
# Those that can follow each other in one process: DeepSpeed keeps groups of the last engine in globals.
TOGETHER = [
    ["zero:1x2", "expert:2", "hpz:2", "pipe:2", "tensor:2", "tp_model_init:2"],
    ["zero:3x4", "pipe:2x2", "pipe:2x1x2", "megatron:2x2", "ulysses:2x2", "tensor:2x2"],
    ["mesh:2x2"],
    ["pipe:3"],
]
