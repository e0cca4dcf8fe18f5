"""Call a function of a test on this rank of a gloo group, and write what it returns: `rank_call.py
CALL`.

CALL is a file of `process_support.write_call`; a launcher puts an option before it.
"""

import importlib
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

call = Path(sys.argv[-1])
module, function, arguments = pickle.loads(call.read_bytes())
sys.path.insert(0, str(Path(module).parent))
called = getattr(importlib.import_module(Path(module).stem), function)
if hasattr(called, "before_group"):  # what must be done before there are threads
    called.before_group(*arguments)
dist.init_process_group("gloo")
found = called(*arguments)
part = call.with_name(f"part-{dist.get_rank()}")
part.write_bytes(pickle.dumps(found))
part.rename(call.with_suffix(f".{dist.get_rank()}"))  # a file that is there is whole
dist.barrier()
dist.destroy_process_group()
