"""The ops: their meaning (`reference`), their native versions, and one interface to both (`functional`)."""

from __future__ import annotations

from .functional import Ops, load_backend

__all__ = ["Ops", "load_backend"]
