"""Writes its arguments as JSON; with `fail FILE` rank 1 fails once rank 0, which makes the file, is
there.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.stdout.write("ARGUMENTS " + json.dumps(sys.argv[2:]) + "\n")
if "fail" in sys.argv:
    if os.environ["RANK"] == "0":
        Path(sys.argv[-1]).touch()
        time.sleep(600)
    while not Path(sys.argv[-1]).exists():
        time.sleep(0.05)
    sys.exit(5)
