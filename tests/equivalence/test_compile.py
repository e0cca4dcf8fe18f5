"""Every op passes through torch.compile without a graph break, and its schema is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import op_cases
import pytest
import torch
from op_cases import tensors_of
from torch import Tensor
from torch.torch_version import TorchVersion

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.backends import OP_NAMES
from deepspeed_gear.ops.constants import minima_size, tree_size

NUM_SLOTS, COUNT = 40, 7
#: Ops of a table on a device: tests/unit/device.
COMPILED = [name for name in OP_NAMES if not name.startswith("ring_") and name != "scatter_"]


def arguments(name: str) -> tuple[Any, ...]:
    """Fresh arguments of an op, outputs first."""
    if name in op_cases.ON_DEVICE:
        return op_cases.arguments(name)
    torch.manual_seed(0)
    out = torch.zeros(COUNT, dtype=torch.int64)
    slots = torch.arange(NUM_SLOTS)[:, None] * torch.tensor([0, 0, 1, 5, 0, 0, 0, 0])
    slots[:, 4] = 5
    sums = torch.zeros(tree_size(NUM_SLOTS), dtype=torch.int64)
    sums[:NUM_SLOTS], sums[64:66] = 3, torch.tensor([96, 24])
    rows = torch.randn(NUM_SLOTS * 5, 3)
    slot, zero = torch.randint(0, NUM_SLOTS, (COUNT,)), torch.zeros(COUNT, dtype=torch.int64)
    resolutions = torch.stack((slot, slot, zero, slot * 5, zero + 5, zero + 2, zero, zero), dim=1)
    none = torch.empty(0)
    two, pads = [none, none], [0.0, 1.0]
    masses = torch.full((COUNT,), 9)
    weighed = torch.cat((resolutions[:, :6], masses[:, None], masses[:, None]), dim=1)
    row_slots = torch.arange(NUM_SLOTS // 5, dtype=torch.int32).repeat_interleave(5)
    table = slots.clone()
    table[:, 0] = 2
    minima, priorities = torch.zeros(minima_size(NUM_SLOTS), dtype=torch.int64), torch.rand(NUM_SLOTS)
    updates = torch.tensor([[1, 0, 2, 0x3F000000], [1, 0, 2, 0x40000000], [9, 1, 2, 0x3F000000]])
    rows_bytes, messages = torch.zeros(64).byte(), [torch.arange(n) << 40 | 7 for n in (2, 3)]
    nodes, room = torch.arange(2), [1, 9, 0, 9, 50, 5]
    sampled, words, readers = torch.zeros(2, 7).long(), torch.zeros(2, 4).long(), torch.tensor([[1]])
    rows_wanted = (
        torch.tensor([[0, 0, 3, 9, 4, 0, -1], [1, 0, 2, 9, 8, 0, -1]]),
        torch.tensor([[0, 0, -1, 2, 0, 0, 0]]),
        torch.ones(1, 1, dtype=torch.bool),
        torch.tensor([[0, 0, 4]]),
        nodes + 0,
    )
    needs, reported = torch.zeros(2, 1, dtype=torch.int16), torch.arange(18).view(3, 6)
    taken = torch.zeros(3, 8).long(), torch.zeros(3).long(), sampled + 0, nodes + 0, torch.zeros(1).long()
    asked = torch.tensor([1]), torch.tensor([2]), needs
    return {
        "draw_": (out, 5, 1, 100, 1 << 40),
        "permute_": (out, 5, 1, 2, 3, 100),
        "tree_update_": (sums, NUM_SLOTS, torch.tensor([1, 1, 39]), torch.tensor([7, 9, 0])),
        "slot_masses_": (sums, slots, nodes, 0, 2, [0, 0, 1, 9, 0], 1),
        "resolve_": (resolutions * 0, sums, slots, out + 11, [0, 0, 1, 9, 0], 0, 5, 1, 100),
        "resolve_rows_": (resolutions * 0, sums.clone(), slots, row_slots, out + 11, 100),
        "importance_": (torch.zeros(COUNT), weighed, 3, 1, 1 << 61),
        "minima_update_": (minima, sums, NUM_SLOTS, torch.tensor([1, 1, 39])),
        "top_k_": (out, priorities, sums),
        "append_reports_": (torch.zeros(COUNT + 2, 6, dtype=torch.int64), weighed, torch.rand(COUNT), 5, 1),
        "prioritize_": (
            *(sums, minima, priorities, out[:5].clone(), table, updates),
            *([0, 0, 1, 9, 0], 1 << 61, 0, 40),
        ),
        "slot_priorities_": (
            sums * 0,
            minima,
            priorities,
            out[:5].clone(),
            *torch.zeros(2, NUM_SLOTS, dtype=torch.int64),
            none.long(),
            none.int(),
            table,
            nodes,
            0,
            2,
            [0, 0, 1, 9, 0],
            0,
            0x3F000000,
            1 << 61,
            40,
        ),
        "draw_goals_": (out + 0, resolutions, 5, 1, 0, 1 << 61, 1),
        "pack_": (
            [torch.zeros(9, 3), torch.zeros(9).long()],
            [rows, none.long()],
            two,
            two,
            resolutions[:2],
            torch.tensor([1, 6]),
            [0, 1, 1, 0, 0, 0, 3, 0, 0, 1, 3, 0, 1, 0, 0, 0, 1, 0, 0, 1],
            pads,
            2,
            9,
        ),
        "plan_packs_": (out + 0, out + 0, out[:1] + 0, torch.arange(1, COUNT + 1), 9, 1, 1, 2, 9),
        "encode_rows_": (out + 0, nodes + 0, [rows.view(-1).view(torch.uint8)], *rows_wanted, table),
        "decode_rows_": (
            [rows_bytes],
            weighed,
            nodes + 0,
            nodes + 5,
            messages,
            nodes + 0,
            *rows_wanted,
            room,
        ),
        "assign_draws_": (*torch.zeros(3, 3).long(), slot[:1] * 0, slot[:3], torch.tensor([9, 99]), 1),
        "encode_draws_": (sampled, words, nodes + 0, weighed[:2], nodes, None, None, readers, needs, 0, 0, 0),
        "decode_draws_": (*taken, [words.view(-1) + 1] * 2, weighed[:1], nodes[:1], None, *asked, 0, 0, 0, 1),
        "encode_reports_": (torch.zeros(3, 3).long(), nodes[:1] + 0, reported, 9),
        "copy_pieces_": (rows_bytes + 0, [slot, rows], torch.tensor([[0, 3, 5, 9], [1, 8, 20, 40]])),
        "decode_reports_": (reported * 0, torch.arange(9).view(3, 3), 9),
    }[name]


def skip_lists_of_old_torch(name: str) -> None:
    """Skip what torch 2.4 does not compile: ops that write to a list of tensors."""
    if name in ("gather_", "pack_", "decode_rows_") and TorchVersion(torch.__version__) < "2.5":
        pytest.skip("torch 2.4 compiles no op that writes to a list")


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(cpu: Ops, name: str, dynamic: bool) -> None:
    skip_lists_of_old_torch(name)
    op: Callable[..., None] = getattr(cpu, name)

    def around(*args: Any) -> list[Tensor]:
        op(*args)
        return [t + 1 for t in tensors_of(args)]

    expected, got = arguments(name), arguments(name)
    want = around(*expected)
    torch._dynamo.reset()
    have = torch.compile(around, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*got)
    for a, b in zip(want + tensors_of(expected), have + tensors_of(got), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", COMPILED)
def test_schema_and_fake_are_right(cpu: Ops, name: str) -> None:
    """The op changes what its schema says and nothing else; the fake one agrees."""
    skip_lists_of_old_torch(name)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(cpu, name), arguments(name), test_utils=tests)


@pytest.mark.parametrize("name", COMPILED)
def test_every_op_is_on_both_backends(cpu: Ops, reference: Ops, name: str) -> None:
    expected, got = arguments(name), arguments(name)
    before = [t.clone() for t in tensors_of(expected)]
    getattr(reference, name)(*expected)
    getattr(cpu, name)(*got)
    changed = [not torch.equal(a, b) for a, b in zip(before, tensors_of(expected), strict=True)]
    assert any(changed)
    for a, b in zip(tensors_of(expected), tensors_of(got), strict=True):
        assert torch.equal(a, b)
