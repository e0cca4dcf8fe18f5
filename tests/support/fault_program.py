"""A process whose kernel finds a wrong index. Arguments: a case of `fault_cases`, "captured" or
"at once". Prints the error of torch, then those of the package.
"""

import sys

import torch
from fault_cases import fault_case
from op_kit import moved

from deepspeed_gear import KernelError
from deepspeed_gear.ops import kernel_faults, load_backend


def main() -> None:
    """Run from the command line."""
    name, way = sys.argv[1:]
    ops = load_backend("cuda")
    op, given, text = fault_case(name)
    given = moved(given, "cuda")
    run = getattr(ops, op)
    torch.cuda.synchronize()
    assert kernel_faults.found_fault() is None
    if way == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(*given)
        assert kernel_faults.found_fault() is None
        graph.replay()
    else:
        run(*given)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("torch:", str(error).splitlines()[0])
    else:
        raise SystemExit("no error ended the kernel")
    fault = kernel_faults.found_fault()
    assert str(fault).startswith(text), fault
    try:
        run(*given)
    except RuntimeError as error:
        print("next op:", str(error).splitlines()[0])
    try:
        with kernel_faults.named():
            torch.cuda.synchronize()
    except KernelError as error:
        print("named:", error)


if __name__ == "__main__":
    main()
