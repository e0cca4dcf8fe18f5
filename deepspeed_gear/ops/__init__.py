"""The ops: their definition in PyTorch (`reference`), and the backends that run them."""

from __future__ import annotations

from deepspeed_gear.ops.backends import Ops, load_backend

__all__ = ["Ops", "load_backend"]
