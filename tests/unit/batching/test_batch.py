"""Forms of a batch: fields, what is known of each sample, clone, to, map, tree,
TensorDict, pytree.
"""

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory, write_dataset
from torch._dynamo.testing import CompileCounter
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from deepspeed_gear import Batch, Replay
from deepspeed_gear.batching.batch_samples import BatchSamples
from deepspeed_gear.config.field_names import SAMPLE_NAMES
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    FieldError,
    GearError,
    ShapeError,
    StaleBatchError,
)


def make(num_samples: int = 3) -> Batch:
    """A batch of two fields that share a mask, and one of its own."""
    tensors = {
        "observation.image": torch.arange(num_samples * 4.0).view(num_samples, 2, 2),
        "observation.state": torch.ones(num_samples, 2),
        "reward": torch.zeros(num_samples),
    }
    shared = torch.ones(num_samples, 2, dtype=torch.bool)
    mask = {"observation.image": shared, "observation.state": shared, "reward": shared[:, 0]}
    records = torch.arange(num_samples * 8).view(num_samples, 8)
    valid = torch.tensor([True] * (num_samples - 1) + [False])
    epoch = torch.full((num_samples,), 5)
    return Batch(
        tensors, mask, BatchSamples(records, valid, False, 100, epoch, first_index=1, index_step=2)
    )


def test_is_a_mapping() -> None:
    batch = make()
    assert list(batch) == ["observation.image", "observation.state", "reward"]
    assert len(batch) == batch.num_samples == 3
    assert {**batch}["reward"] is batch["reward"]
    with pytest.raises(
        KeyError, match=r"field 'rewards' must be in the batch; it has observation.image"
    ):
        batch["rewards"]
    assert repr(batch) == (
        "Batch(3 samples on cpu; observation.image: float32[3, 2, 2], observation.state: "
        "float32[3, 2], reward: float32[3])"
    )


def test_samples() -> None:
    batch = make()
    assert batch.trajectory_id.tolist() == [0, 8, 16]
    assert batch.handle.tolist() == [[0, 1, 2], [0, 9, 10], [0, 17, 18]]
    assert batch.num_steps.tolist() == [4, 12, 20]
    assert batch.anchor.tolist() == [5, 13, 21]
    assert batch.sample_number.tolist() == [7, 15, 23]
    assert batch.sample_index.tolist() == [1, 3, 5]
    assert batch.clone().sample_index.tolist() == [1, 3, 5]
    assert batch.probability.tolist() == [0.06, 0.14, 0.22]
    assert batch.probability.dtype == torch.float64
    assert batch.is_weight.tolist() == [1, 1, 0]
    assert batch.is_weight.dtype == torch.float32
    assert batch.epoch.tolist() == [5, 5, 5]


def test_parts_by_the_names_of_a_pipeline() -> None:
    batch = make()
    assert batch.part("reward") is batch["reward"]
    assert batch.part("mask.observation.state") is batch.mask["observation.state"]
    for name in (
        "is_weight",
        "trajectory_id",
        "anchor",
        "sample_number",
        "probability",
        "epoch",
        "valid",
    ):
        assert batch.part(name).equal(getattr(batch, name)), name
    for name in ("handle", "host_resolutions", "mask", "mask.other", "observation"):
        with pytest.raises(KeyError, match=name.removeprefix("mask.")):
            batch.part(name)


def test_equality_is_of_samples_values_and_masks() -> None:
    batch = make()
    assert batch == batch.clone()
    assert batch != make(4)
    assert batch != {**batch}
    for change in (
        lambda other: other["reward"].fill_(2),
        lambda other: other.mask["reward"].fill_(False),
        lambda other: other.trajectory_id.fill_(3),
        lambda other: other.sample_number.fill_(3),
        lambda other: other.__setitem__("more", torch.zeros(3)),
    ):
        other = batch.clone()
        change(other)
        assert batch != other


def test_a_clone_shares_nothing_and_moves_as_a_whole() -> None:
    batch = make()
    copy = batch.clone()
    moved = batch.to("meta")
    assert batch.to("cpu") is batch
    assert {t.device.type for t in pytree.tree_leaves(moved)} == {"meta"} == {moved.device.type}
    for tensor in pytree.tree_leaves(batch):
        tensor.fill_(1)
    assert copy == make()
    assert copy.valid.tolist() == [True, True, False]
    assert copy.epoch.tolist() == [5, 5, 5]
    assert copy.mask["observation.image"] is copy.mask["observation.state"]


def test_trees_and_tensordicts() -> None:
    batch = make()
    assert list(batch.tree()["observation"]) == ["image", "state"]
    assert batch.tree()["observation"]["image"] is batch["observation.image"]
    found = batch.to_tensordict()
    assert found.batch_size == torch.Size([3])
    assert found["observation", "image"].shape == (3, 2, 2)
    assert found["mask", "reward"].tolist() == [True] * 3
    assert found["gear", "trajectory_id"].tolist() == [0, 8, 16]
    assert found["gear", "is_weight"].tolist() == [1, 1, 0]
    assert found[1]["gear", "anchor"] == 13


# ---- parts ---------------------------------------------------------------------------------------

PARTS: dict[str, tuple[Any, list[int]]] = {
    "a slice": (slice(1, 3), [1, 2]),
    "every second": (slice(None, None, 2), [0, 2, 4]),
    "the last": (slice(-2, None), [3, 4]),
    "none": (slice(3, 3), []),
    "beyond the end": (slice(4, 99), [4]),
    "a mask": (torch.tensor([True, False, False, True, True]), [0, 3, 4]),
    "an empty mask": (torch.zeros(5, dtype=torch.bool), []),
    "a mask as an array": (np.array([False, True, False, False, True]), [1, 4]),
    "indices": (torch.tensor([4, 0, 0, -1]), [4, 0, 0, 4]),
    "indices as a list": ([2, -5], [2, 0]),
    "indices of bytes": (torch.tensor([3, 3], dtype=torch.uint8), [3, 3]),
    "an empty list": ([], []),
}


def known_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Return every part of a batch by name."""
    masks = {f"mask.{name}": mask for name, mask in batch.mask.items()}
    learns = {f"learns.{name}": batch.learns(name) for name in batch.mask}
    more = {name: batch.part(name) for name in SAMPLE_NAMES}
    own = {"handle": batch.handle, "source": batch.source, "num_steps": batch.num_steps}
    host = {"host_resolutions": batch.host_resolutions, "reported": batch.reported}
    return {**batch, **masks, **learns, **more, **own, **host}


def full(count: int) -> Batch:
    """A batch with all that may be known of its samples."""
    plain = make(count)
    samples = BatchSamples(
        plain.host_resolutions,
        plain.valid,
        step_items=False,
        total=100,
        epoch=torch.arange(count),
        is_weight=torch.rand(count),
        source=torch.arange(count) % 2,
        probability=torch.rand(count, dtype=torch.float64),
        goal_step=torch.arange(count) - 1,
        origin=torch.arange(count) << 32 | 7,
        first_index=3,
        index_step=4,
    )
    return Batch({**plain}, plain.mask, samples)


@pytest.mark.parametrize("made", [make, full])
@pytest.mark.parametrize("name", PARTS)
def test_parts_take_everything_along(made: Callable[..., Batch], name: str) -> None:
    key, chosen = PARTS[name]
    batch = made(5)
    part = batch[key]
    assert part.num_samples == len(chosen)
    wanted = known_of(batch)
    for of, tensor in known_of(part).items():
        assert torch.equal(tensor, wanted[of][chosen]), of
    again = pickle.loads(pickle.dumps(part.clone()))
    leaves, structure = pytree.tree_flatten(part)
    rebuilt = pytree.tree_unflatten(leaves, structure)
    assert isinstance(rebuilt, Batch)
    assert all(rebuilt[name] is part[name] for name in part)
    assert all(rebuilt.mask[name] is part.mask[name] for name in part.mask)
    for same in (again, rebuilt, copy.copy(part), part[:], part.to("meta")):
        assert same.sample_index.shape == (len(chosen),)
        if same.device.type != "meta":
            assert same == part
            for of in ("sample_index", "probability"):
                assert torch.equal(same.part(of), wanted[of][chosen])
    assert part.mask["observation.image"] is part.mask["observation.state"]
    if isinstance(key, slice):
        assert (
            part["reward"].untyped_storage().data_ptr()
            == batch["reward"].untyped_storage().data_ptr()
        )
    assert part.host_resolutions.is_contiguous()  # as the priority log takes them


@pytest.mark.parametrize(
    ("key", "kind", "text"),
    [
        (np.ones(4, bool), ShapeError, r"the mask of samples must have shape \[5\], got \[4\]"),
        (
            torch.ones(2, 2, dtype=torch.int64),
            ShapeError,
            r"indices of samples must have shape \[n\]",
        ),
        (torch.tensor(1), ShapeError, r"must have shape \[n\], got \[\]; write batch\[i:i \+ 1\]"),
        (torch.tensor([0, 5]), ShapeError, r"an index of samples must be in \[-5, 5\), got 5"),
        ([-6], ShapeError, r"must be in \[-5, 5\), got -6"),
        (torch.ones(5), DataError, "must be a slice, a mask of bools, or integers"),
        (
            np.ones(5, np.uint8),
            DataError,
            "5 of uint8, for a mask or indices'; convert them to bool or",
        ),
        ([[]], DataError, "must be a slice, a mask of bools, or integers"),
        (slice(None, None, -1), ShapeError, "slice of integers with a step of at least 1"),
        (slice("a", None), ShapeError, "slice of integers"),
        (
            3,
            FieldError,
            r"field 3 must be in the batch; write batch\[3:4\] for a sample; it has observation",
        ),
    ],
)
def test_parts_that_are_refused(key: Any, kind: type[GearError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make(5)[key]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_torch_cannot_use_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="device must be a device that torch can use here, got 'cuda'; "
    ):
        make(3).to("cuda")
    assert make(3).to("cpu").device.type == "cpu"


def test_minibatches_visit_each_sample_once_an_epoch() -> None:
    batch = make(11)
    parts = list(batch.minibatches(4, epochs=3))
    assert [part.num_samples for part in parts] == [4, 4, 3] * 3
    orders = [torch.cat([p.sample_number for p in parts[i : i + 3]]).tolist() for i in (0, 3, 6)]
    assert all(sorted(order) == batch.sample_number.tolist() for order in orders)
    assert len({tuple(order) for order in [*orders, batch.sample_number.tolist()]}) == 4
    assert all(
        bool((p["observation.image"][:, 0, 0] == (p.sample_number - 7) / 2).all()) for p in parts
    )

    def order(of: Batch, **options: Any) -> list[int]:
        return [n for part in of.minibatches(4, **options) for n in part.sample_number.tolist()]

    assert order(batch) == orders[0] == order(batch.clone())
    assert order(batch, seed=1) != orders[0]
    later = make(11)
    later.host_resolutions[:, 7] += 88  # of the next global batch
    assert [n - 88 for n in order(later)] != orders[0]
    assert list(make(1)[:0].minibatches(4)) == []
    for bad in ({"size": 0}, {"size": 4, "epochs": 0}, {"size": 4, "seed": -1}):
        with pytest.raises(ConfigError, match="must be an integer of at least"):
            batch.minibatches(**bad)


def test_orders_of_minibatches_are_uniform() -> None:
    """All 4! orders of four samples are equally likely: 720 draws, chi-square."""
    batch = make(4)
    orders = [tuple(part.sample_index.tolist()) for part in batch.minibatches(4, epochs=720)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 30) ** 2 / 30).sum() < 49.7  # 0.999 of 23 degrees of freedom


@pytest.mark.parametrize("made", [make, full])
def test_cat(made: Callable[..., Batch]) -> None:
    whole = made(5)
    joined = Batch.cat([whole[3:], whole[:1], whole[[2]]])
    wanted = known_of(whole)
    for of, tensor in known_of(joined).items():
        assert torch.equal(tensor, wanted[of][[3, 4, 0, 2]]), of
    assert joined.mask["observation.image"] is joined.mask["observation.state"]
    mixed = Batch.cat([make(2), full(5)[:2]])
    assert mixed.source.tolist() == [0, 0, 0, 1]
    assert mixed.goal_step.tolist() == [-1, -1, -1, 0]
    assert mixed.handle[:, 0].tolist() == [0, 0, 0, 1]
    assert mixed.reported[:, 1].tolist() == [1, 9, 7, 1 << 32 | 7]


def test_what_cannot_be_joined() -> None:
    batch = make(3)
    other = batch.clone()
    other["reward"] = other["reward"].double()
    with pytest.raises(
        ShapeError, match=r"field 'reward' of batch 1 must be as in batch 0: \('float32'"
    ):
        Batch.cat([batch, other])
    more = batch.clone()
    more["more"] = torch.zeros(3)
    with pytest.raises(
        ShapeError, match=r"field 'more' of batch 2 must be as in batch 0: missing, got"
    ):
        Batch.cat([batch, batch, more])
    for bad in ([], batch, None, [batch, 3]):
        with pytest.raises(
            DataError, match=r"batches must be a list of at least one batch.*Batch.cat"
        ):
            Batch.cat(bad)  # type: ignore[arg-type]


def test_parts_live_as_long_as_their_memory(replay: Replay) -> None:
    """Of one part: `TRANSFORMS`."""
    with replay:
        batch = replay.sample()
        view = batch[1:][:2]
        joined = Batch.cat([batch[:2], batch[2:]])
        code = joined["code"].clone()
        visits = batch.minibatches(2)
        next(visits)
        for _ in range(2):
            replay.sample()
        assert repr(view) == "Batch(overwritten)"
        assert torch.equal(joined["code"], code)
        assert joined.sample_number.tolist() == [0, 1, 2, 3]
        with pytest.raises(StaleBatchError):
            next(visits)
        assert "written again" in batch._repr_html_()
        for probe in ("_repr_markdown_", "_ipython_display_", "__rich_repr__", "awehflow"):
            assert not hasattr(batch, probe)


# ---- the ring ------------------------------------------------------------------------------------


@pytest.fixture
def replay() -> Replay:
    made = Replay(
        config_of(batch_size=4, fields={"observation": {}, "code": {"length": 3}}),
        schemas={"main": SCHEMA},
    )
    for number in range(6):
        made.add(trajectory(number, 5 + number))
    return made


def loss_of(batch: Batch) -> torch.Tensor:
    weight = torch.ones(3, 1, requires_grad=True)
    return ((batch["observation"] @ weight) ** 2).sum()


def test_a_late_backward_raises_but_that_of_a_clone(replay: Replay) -> None:
    with replay:
        batch = replay.sample()
        kept = batch.clone()
        of_clone = loss_of(batch.clone())
        wanted = pickle.loads(pickle.dumps(batch))
        in_time = loss_of(batch)
        replay.sample()
        in_time.backward()
        late = loss_of(replay.sample())
        for _ in range(2):
            replay.sample()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        of_clone.backward()
        assert kept == wanted


ACCESSES: dict[str, Callable[[Replay, Batch], Any]] = {
    "a field": lambda _, batch: batch["observation"],
    "setting a field": lambda _, batch: batch.__setitem__("more", torch.zeros(4)),
    "an attribute": lambda _, batch: batch.mask,
    "a property": lambda _, batch: batch.is_weight,
    "a method": lambda _, batch: batch.clone(),
    "iteration": lambda _, batch: list(batch),
    "unpacking": lambda _, batch: {**batch},
    "in": lambda _, batch: "code" in batch,
    "length": lambda _, batch: len(batch),
    "comparison": lambda _, batch: batch == batch,
    "a slice": lambda _, batch: batch[:2],
    "cat": lambda _, batch: Batch.cat([batch, batch]),
    "a pytree": lambda _, batch: pytree.tree_leaves(batch),
    "pickle": lambda _, batch: pickle.dumps(batch),
    "a shallow copy": lambda _, batch: copy.copy(batch),
    "a deep copy": lambda _, batch: copy.deepcopy(batch),
    "priorities": lambda replay, batch: replay.update_priorities(batch, torch.ones(4)),
}


def test_every_access_of_an_overwritten_batch_raises() -> None:
    sampler = {"kind": "prioritized", "unit": "step"}
    fields = {"observation": {}, "code": {"length": 3}}
    with Replay(
        config_of(batch_size=4, sampler=sampler, fields=fields), schemas={"main": SCHEMA}
    ) as replay:
        replay.add(trajectory(0, 9))
        batch = replay.sample()
        for _ in range(2):
            for access in ACCESSES.values():
                access(replay, batch)  # while it lives nothing raises
            replay.sample()
        possible = []
        for name, access in ACCESSES.items():
            with contextlib.suppress(StaleBatchError):
                access(replay, batch)
                possible.append(name)
        assert possible == []
        with pytest.raises(StaleBatchError, match=r"batch\.clone\(\).*max\(2, accumulation\)"):
            batch.clone()
        assert isinstance(batch, Batch)
        assert repr(batch) == "Batch(overwritten)"


@pytest.mark.parametrize(
    ("accumulation", "prefetch", "depth"), [(1, 0, 2), (3, 0, 3), (1, 2, 5), (3, 2, 10)]
)
def test_how_long_a_batch_lives(accumulation: int, prefetch: int, depth: int) -> None:
    """The ring holds all batches of an optimizer step, and what is prepared ahead."""
    options = {
        "micro_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "prefetch": prefetch,
    }
    with Replay(config_of(**options), schemas={"main": SCHEMA}) as replay:
        replay.add(trajectory(0, 200))
        batches = []
        pointers = []
        taken = []
        for _ in range(12):
            batches.append(batch := replay.sample())
            pointers.append(batch["code"].data_ptr())
            taken.append((batch.sample_number, batch.anchor))
        is_over = [repr(batch) == "Batch(overwritten)" for batch in batches]
        assert is_over == [at < 12 - max(2, accumulation) for at in range(12)]
        assert len(set(pointers)) == depth
        assert pointers[depth] == pointers[0]
        # What was taken out of a batch is not overwritten.
        assert sorted(n for numbers, _ in taken for n in numbers.tolist()) == list(range(24))
        assert len({tuple(anchors.tolist()) for _, anchors in taken}) == 12


@pytest.mark.parametrize("way", ["auto", "staged", "direct"])
def test_how_long_a_batch_of_a_split_lives(tmp_path: Path, way: str) -> None:
    data = write_dataset(tmp_path / "data", [5] * 40, {"eval": 0.5})
    with Replay(config_of(data, batch_size=2, transfer={"way": way})) as replay:
        first, second, third = (next(it) for it in [replay.iterator("eval")] for _ in range(3))
        assert third["code"].equal(third.clone()["code"])
        assert second["code"].equal(second.clone()["code"])
        with pytest.raises(StaleBatchError):
            first["code"]


TRANSFORMS: dict[str, tuple[Callable[[Batch], Batch], bool]] = {
    "itself": (lambda batch: batch, True),
    "a clone": (lambda batch: batch.clone(), False),
    "another dtype": (lambda batch: batch.map(lambda tensor: tensor.double()), False),
    "a part": (lambda batch: batch.map(lambda tensor: tensor[:2]), True),
    "a slice": (lambda batch: batch[:2], True),
    "a mask": (lambda batch: batch[batch.valid], False),
    "the same tensors": (lambda batch: batch.map(lambda tensor: tensor), True),
    "a copy of the object": (copy.copy, True),
    "a copy": (lambda batch: pickle.loads(pickle.dumps(batch)), False),
    "on another device": (lambda batch: batch.to("meta"), False),
    "made anew": (
        lambda batch: Batch(
            {**batch},
            batch.mask,
            BatchSamples(batch.host_resolutions, batch.valid, False, 0, batch.epoch),
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_transform_returns_lives_as_long_as_its_memory(replay: Replay, name: str) -> None:
    change, ends = TRANSFORMS[name]
    with replay:
        derived = (
            None if name == "made anew" else change(replay.sample())
        )  # then nothing can be known of it
        replay.transform = lambda batch, words: change(batch)
        returned = replay.sample()
        for _ in range(2):
            replay.sample()
        for batch in (returned, *([] if derived is None else [derived])):
            assert (repr(batch) == "Batch(overwritten)") == ends


def test_a_transform_that_fails_overwrites_no_batch_unseen(replay: Replay) -> None:
    """It has used a ring entry whose batch nothing was returned for."""
    with replay:
        batches = [replay.sample() for _ in range(2)]
        codes = [batch["code"].clone() for batch in batches]

        def fail(batch: Batch, words: torch.Tensor) -> Batch:
            raise ValueError("a transform")

        replay.transform = fail
        for _ in range(2):
            with pytest.raises(ValueError, match="a transform"):
                replay.sample()
        for batch, code in zip(batches, codes, strict=True):
            with pytest.raises(StaleBatchError):
                assert batch["code"].equal(code)
        replay.transform = lambda batch, words: None  # type: ignore[assignment,return-value]
        with pytest.raises(ConfigError, match="transform must return a Batch, got 'NoneType'"):
            replay.sample()


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.5", reason="torch 2.4 does not trace all of it"
)
def test_batches_and_their_parts_pass_through_the_compiler(replay: Replay) -> None:
    """Without a graph break, and without compiling again for the next batch."""
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def loss(batch: Batch) -> torch.Tensor:
        part = batch[1:3]
        whole = (batch["observation"] * batch.is_weight[:, None]).sum() + batch.trajectory_id.sum()
        return whole + part["observation"].sum() + part.mask["code"].sum() + part.sample_index.sum()

    with replay:
        for _ in range(6):
            batch = replay.sample()
            part = batch[1:3]
            wanted = batch["observation"].sum() + batch.trajectory_id.sum()
            wanted = wanted + part["observation"].sum() + part.mask["code"].sum() + 3
            assert torch.allclose(loss(batch), wanted)
    assert counter.frame_count == 1
