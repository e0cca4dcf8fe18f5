"""The fault that ends a kernel names the op, the index, the rule and a remedy.

The kernels run on the host. `tests/gpu/test_kernel_faults.py` has the same cases on a GPU.
"""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from fault_cases import FAULTS, fault_case
from op_arguments import arguments
from op_kit import LOST

from deepspeed_gear import KernelError
from deepspeed_gear.ops import Ops, jit, kernel_faults


@pytest.fixture(scope="module")
def module(host_library: Path, kernels_on_host: Ops) -> ModuleType:
    """The module of the kernels' library, as `load_native_cuda` returns it on a GPU."""
    loader = importlib.machinery.ExtensionFileLoader("gear_on_host", str(host_library))
    spec = importlib.util.spec_from_loader("gear_on_host", loader)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_op_index_rule_and_remedy(
    kernels_on_host: Ops, module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    op, given, text = fault_case(name)
    with pytest.raises(RuntimeError) as raised:
        getattr(kernels_on_host, op)(*given)
    first_line = str(raised.value).splitlines()[0]
    assert first_line.startswith(f"gear: {text}")
    assert LOST in first_line
    monkeypatch.setattr(jit, "loaded", lambda name: module)
    fault = kernel_faults.found_fault()
    assert f"gear: {fault}" == first_line
    with pytest.raises(KernelError, match=LOST), kernel_faults.named():
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_an_op_runs_after_a_fault(kernels_on_host: Ops, module: ModuleType) -> None:
    """On the host alone: a fault takes no context there."""
    op, given, _ = fault_case("mass_")
    with pytest.raises(RuntimeError, match=LOST):
        getattr(kernels_on_host, op)(*given)
    kernels_on_host.mass_(*arguments("mass_"))
