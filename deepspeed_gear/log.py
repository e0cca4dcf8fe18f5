"""The package's logger."""

from __future__ import annotations

import logging

LOG = logging.getLogger("deepspeed_gear")
