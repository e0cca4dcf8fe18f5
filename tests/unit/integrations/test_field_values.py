"""Values of a batch as bytes and back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear.errors import DataError
from deepspeed_gear.integrations.field_values import OBJECT, TENSOR, batch_of, field_block
from deepspeed_gear.integrations.segment_store import SegmentStore


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


def strided(*rows: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([*rows], layout=torch.strided)


LONG = torch.arange(60)
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn",
]  # fmt: skip
# What is put, and how its values are stored.
BATCHES: dict[str, tuple[Any, str]] = {
    **{name: (LONG.reshape(3, 20).to(getattr(torch, name)), TENSOR) for name in DTYPES},
    "numbers": (torch.arange(3.0), TENSOR),
    "images": (LONG.reshape(3, 2, 5, 2), TENSOR),
    "no steps": (torch.empty(3, 0, 4), TENSOR),
    "every second": (LONG[::2].reshape(3, 10), TENSOR),
    "transposed": (LONG.reshape(20, 3).T, TENSOR),
    "with gradients": (torch.ones(3, 4, requires_grad=True), TENSOR),
    "conjugate": (torch.ones(3, 2, dtype=torch.complex64).mul(1j).conj(), TENSOR),
    "jagged": (jagged(LONG[:7], LONG[:0], LONG[:33]), TENSOR),
    "jagged rows": (jagged(torch.ones(2, 3), torch.ones(5, 3), torch.ones(1, 3)), TENSOR),
    "strided": (strided(torch.ones(2, 3), torch.ones(5, 1), torch.ones(1, 4)), TENSOR),
    "a list of tensors": ([LONG[:4], LONG[:2], LONG[40:]], TENSOR),
    "several dimensions": ([LONG[:4], LONG[:4].reshape(2, 2), LONG[:1]], OBJECT),
    "several dtypes": ([LONG[:4], LONG[:4].float(), LONG[:1]], OBJECT),
    "objects": (["text", {"key": [1, None]}, np.arange(4)], OBJECT),
    "with gaps": ([LONG[:4], None, LONG[:1]], OBJECT),
}


def rows(batch: Any) -> list[Any]:
    is_nested = isinstance(batch, torch.Tensor) and batch.is_nested
    return [*batch.unbind()] if is_nested else [*batch]


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        same = expected.detach().resolve_conj().contiguous()
        assert torch.equal(found.view(-1).view(torch.uint8), same.view(-1).view(torch.uint8))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("name", BATCHES)
def test_values_are_read_as_they_were_put(tmp_path: Path, name: str) -> None:
    batch, kind = BATCHES[name]
    block = field_block("field", batch)
    assert block.form.kind == kind
    with SegmentStore(tmp_path) as store:
        store.put([4, 2, 9], {"field": block})
        found = rows(batch_of(store.get([4, 2, 9], ["field"])["field"]))
        for one, expected in zip(found, rows(batch), strict=True):
            assert_equal(one, expected)
        for chosen in ([2], [9, 4]):
            found = rows(batch_of(store.get(chosen, ["field"])["field"]))
            for number, one in zip(chosen, found, strict=True):
                assert_equal(one, rows(batch)[[4, 2, 9].index(number)])


@pytest.mark.parametrize(
    ("name", "is_tensor", "layout"),
    [
        ("numbers", True, torch.strided),
        ("int64", True, torch.jagged),
        ("images", True, torch.jagged),
        ("jagged", True, torch.jagged),
        ("strided", True, torch.strided),
        ("objects", False, None),
        ("several dtypes", False, None),
    ],
)
def test_the_kind_of_batch_is_that_of_transfer_queue(
    tmp_path: Path, name: str, is_tensor: bool, layout: Any
) -> None:
    with SegmentStore(tmp_path) as store:
        store.put([0, 1, 2], {"field": field_block("field", BATCHES[name][0])})
        batch = batch_of(store.get([0, 1, 2], ["field"])["field"])
    assert isinstance(batch, torch.Tensor) == is_tensor
    if isinstance(batch, torch.Tensor):
        assert batch.layout == layout
        assert batch.is_nested == (name != "numbers")
        if layout == torch.jagged:  # equal to what torch makes of the rows
            own = torch.nested.as_nested_tensor(rows(BATCHES[name][0]), layout=torch.jagged)
            assert torch.equal(batch.offsets(), own.offsets())
            assert torch.equal(batch.values(), own.values())
            lengths = own.offsets().diff()
            assert (batch._get_min_seqlen(), batch._get_max_seqlen()) == (
                int(lengths.min()),
                int(lengths.max()),
            )


def test_values_of_several_puts_are_one_batch(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        store.put([0, 1], {"a": field_block("a", LONG.reshape(2, 30))})
        store.put([2], {"a": field_block("a", [LONG[:3]])})
        batch = batch_of(store.get([2, 0, 1], ["a"])["a"])
        assert [len(row) for row in rows(batch)] == [3, 30, 30]
        store.put([1], {"a": field_block("a", [torch.ones(3)])})
        mixed = batch_of(store.get([0, 1, 2], ["a"])["a"])
        assert isinstance(mixed, list)
        assert [row.dtype for row in mixed] == [torch.int64, torch.float32, torch.int64]
        store.put([0], {"a": field_block("a", ["text"])})
        assert batch_of(store.get([0], ["a"])["a"]) == ["text"]


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    with SegmentStore(tmp_path) as store:
        store.put([0, 1], {"a": field_block("a", torch.zeros(2, 3))})
        batch: Any = batch_of(store.get([0, 1], ["a"])["a"])
        batch[0, 0] = 7
        again: Any = batch_of(store.get([0, 1], ["a"])["a"])
        assert again.values().sum() == 0


def test_a_view_is_stored_without_the_memory_that_it_is_a_view_of() -> None:
    block = field_block("a", [torch.zeros(1_000_000)[:3], "text"])
    assert block.sizes.max() < 2000


def test_what_cannot_be_pickled_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(DataError, match="field a must have values that can be pickled"):
        field_block("a", [lambda: 1, 2])
