"""Each rank says where it is, and what an all-reduce over all ranks gives."""

import json
import os
import socket
import sys
import time

import deepspeed
import torch
from deepspeed import comm

deepspeed.init_distributed("gloo", verbose=False)
total = torch.tensor([comm.get_rank() + 1])
comm.all_reduce(total)
place = {"rank": comm.get_rank(), "host": socket.gethostname(), "shm": os.stat("/dev/shm").st_dev}
# One write: the lines of a node's ranks go through one pipe.
sys.stdout.write("PLACE " + json.dumps({**place, "total": int(total)}) + "\n")
if "--stay" in sys.argv:
    time.sleep(600)
# A process that ends with a group of gloo's may be aborted by its threads.
comm.destroy_process_group()
