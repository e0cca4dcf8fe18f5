"""The runner of kernels on the host shows faults that a sequential loop would hide."""

import subprocess
from collections.abc import Callable

import host_kernels
import pytest

from deepspeed_gear.ops import toolchain

Show = Callable[[str], str]


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Show:
    """Build the program; it prints what a kernel of a name did."""
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    program = tmp_path_factory.mktemp("runner") / "runner"
    source = host_kernels.HOST / "runner.cpp"
    flags = ["-std=c++20", "-O1", "-U_FORTIFY_SOURCE", *host_kernels.SANITIZERS]
    command = [*toolchain.compiler(), *flags, f"-I{host_kernels.HOST}", str(source)]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return lambda name: subprocess.check_output([str(program), name], text=True).strip()


def test_blocks_run_in_another_order_in_each_launch(show: Show) -> None:
    first, second = show("order").split()
    assert sorted(first) == sorted(second) == list("0123")
    assert first != second
    assert show("order").split() == [first, second]


def test_each_block_finds_poison_in_what_it_shares(show: Show) -> None:
    assert show("uncleared") == "1"


def test_an_access_that_is_not_aligned_to_its_type_is_an_error(show: Show) -> None:
    assert "is not aligned to its type" in show("misaligned")
