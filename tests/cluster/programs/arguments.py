"""Writes its arguments as JSON; with `fail` as the first one, the rank 1 fails and the others wait for it."""

from __future__ import annotations

import json
import os
import sys
import time

sys.stdout.write("ARGUMENTS " + json.dumps(sys.argv[2:]) + "\n")
if "fail" in sys.argv:
    if os.environ["RANK"] == "1":
        sys.exit(5)
    time.sleep(600)
