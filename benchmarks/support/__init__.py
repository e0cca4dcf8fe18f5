"""What the benchmarks share. Importing it puts the checkout first, so that it is the one that is
measured.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# One thread: pools of threads of busy ranks starve each other. Must be set before torch is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
