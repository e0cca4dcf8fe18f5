"""Media of a table: equal ones once, kept while a trajectory names them, whole after any death."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from media_tables import MEDIA, SIZE, group, image, media_section, pages_of
from rollout_support import micros
from store_support import killed_at

from deepspeed_gear import (
    ConfigError,
    DataError,
    DatasetWriter,
    FieldError,
    Media,
    Replay,
    Schema,
    SchemaError,
    StoreError,
    StoreFullError,
    TrajectoryWriter,
)
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Column
from deepspeed_gear.store.media_pages import MediaPages, chain, inside
from deepspeed_gear.store.records import MediaPage, PageState


def held(replay: Replay) -> set[int]:
    words = pages_of(replay).words
    return set(words[words[:, MediaPage.STATE] == PageState.WHOLE, MediaPage.NUMBER].tolist())


def number_of(media: Media, replay: Replay) -> int:
    return media.item("", pages_of(replay).spec.columns).number


def test_equal_images_are_stored_once_and_read_back_as_they_were() -> None:
    with Replay(media_section()) as replay:
        first = image(3)
        second = image(4)
        ids = [replay.add(one) for one in group(0, {1: first, 4: second})]
        ids += [
            replay.add(one) for one in group(1, {2: image(3)})
        ]  # an equal one, of another process say
        assert len(held(replay)) == 2
        found = replay.read(ids)
        assert all(one["image"] == {1: first, 4: second} for one in found[:SIZE])
        assert all(one["image"] == {2: first} for one in found[SIZE:])
        assert first != second
        again = replay.add({**found[0], "prompt": np.int64(7)})  # what is read can be added
        assert replay.read([again])[0]["image"] == found[0]["image"]
        sizes = replay.statistics()["media"]["main"]
        assert sizes["items"] == 2
        assert sizes["capacity_bytes"] == 16 << 10
        without = {name: value for name, value in group(2, {})[0].items() if name != "image"}
        assert replay.read([replay.add(without)])[0]["image"] == {}


def test_what_is_named_stays_and_the_oldest_of_the_rest_goes() -> None:
    with Replay(media_section({"capacity_bytes": 8 << 10})) as replay:  # 16 pages
        a, b = (
            [replay.add(one) for one in group(n, {0: image(n, 40)})] for n in (0, 1)
        )  # 1 page each
        replay.remove(a)
        for n in range(2, 17):
            replay.remove([replay.add(one) for one in group(n, {0: image(n, 40)})])
        names = [number_of(image(n, 40), replay) for n in range(17)]
        assert names[0] not in held(replay), "the oldest that nothing names"
        assert held(replay) >= {names[1], *names[5:]}
        assert replay.read(b)[0]["image"] == {0: image(1, 40)}
        many = {n: image(100 + n, 90) for n in range(8)}  # 3 pages each: more than there are
        with pytest.raises(
            StoreFullError, match=r"free pages of 512 bytes.*; raise media.capacity_bytes"
        ):
            replay.add(group(50, many)[0])
        states = replay.tables["main"].slots[:, Slot.STATE]
        assert np.count_nonzero(states == SlotState.RESERVED) == 0


@pytest.mark.parametrize("remove", ["none", "fifo"])
def test_trajectories_leave_for_media_as_they_do_for_rows(remove: str) -> None:
    with Replay(media_section({"capacity_bytes": 4 << 10}, remove=remove)) as replay:  # 8 pages
        ids = [[replay.add(one) for one in group(n, {0: image(n, 40)})] for n in range(8)]
        more = group(8, {0: image(8, 40)})
        if remove == "none":
            with pytest.raises(StoreFullError, match=r"1 free pages of 512 bytes, got '0 of 8'"):
                replay.add(more[0])
            assert replay.tables["main"].num_trajectories == 8 * SIZE
            assert replay.read(ids[0])[0]["image"] == {0: image(0, 40)}
        else:
            ids.append([replay.add(one) for one in more])
            assert [one["image"] for one in replay.read(ids[8])] == [{0: image(8, 40)}] * SIZE
            with pytest.raises(StoreError):
                replay.read(ids[0])
        check_pages(replay)


def test_a_rollout_batch_keeps_its_media_until_it_is_trained() -> None:
    with Replay(media_section({"capacity_bytes": 8 << 10}, rollout={"groups": 2})) as replay:
        for n in range(2):
            for one in group(n, {n: image(n, 40), 3: image(9, 30)}):
                replay.add(one)
        rollout = replay.rollout()
        replay.remove(rollout.trajectory_id)
        for n in range(2, 30):  # others take all the pages that they can get
            replay.remove([replay.add(one) for one in group(n, {0: image(n, 40)})])
        seen = 0
        for micro in micros(rollout):
            seen += len(micro.media.item)
            named = {int(r[0]) // 1000 for r in micro.media.columns["patches"]}
            assert named <= {0, 1, 9}
        assert seen == 2 * SIZE * 2


def test_what_is_added_is_not_evicted_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    with Replay(media_section()) as replay:
        replay.add(group(0, {0: image(1)})[0])
        replay.clear()
        added = MediaPages.add

        def add(
            self: MediaPages, *given: Any
        ) -> None:  # other processes need all pages before and after
            added(self, *given)
            with replay.tables["main"].lock:
                self._evict(len(self.words), np.zeros(0, np.int64))

        monkeypatch.setattr(MediaPages, "add", add)
        last = replay.add(group(1, {0: image(1), 3: image(2)})[0])
        assert replay.read([last])[0]["image"] == {0: image(1), 3: image(2)}


def test_what_is_in_training_stays_and_what_cannot_fit_evicts_nothing() -> None:
    with Replay(
        media_section({"capacity_bytes": 4 << 10}, rollout={"groups": 2})
    ) as replay:  # 8 pages
        for n in range(8):
            for one in group(n, {0: image(n, 40)}):
                replay.add(one)
        rollout = replay.rollout()  # the two oldest
        before = replay.tables["main"].num_trajectories
        with pytest.raises(
            StoreFullError, match="must have 7 free pages of 512 bytes, got '6 of 8'"
        ):
            replay.add(group(8, {step: image(50 + step, 30) for step in range(7)})[0])
        assert replay.tables["main"].num_trajectories == before
        number = replay.add(group(9, {0: image(9, 40)})[0])
        assert replay.read([number])[0]["image"] == {0: image(9, 40)}
        assert sum(len(micro.media.item) for micro in micros(rollout)) == 2 * SIZE


def test_extents_without_rows_hide_none() -> None:
    extents = np.array([[0, 2], [0, 0], [5, 0], [5, 1], [9, 3]])
    assert inside(np.arange(12), extents).tolist() == [n in (0, 1, 5, 9, 10, 11) for n in range(12)]


def test_media_compare_by_what_they_hold() -> None:
    half = torch.arange(3, dtype=torch.bfloat16)
    assert Media(px=half) == Media(px=half.clone())
    assert Media(px=half) != Media(px=half + 1)
    assert Media(px=[1]) != Media(py=[1])
    assert repr(Media(px=np.zeros((2, 3)))) == "Media(px: [2, 3])"


@pytest.mark.parametrize("prefix", ["own", "share"])
def test_packs_have_the_items_that_their_places_name(prefix: str) -> None:
    config = media_section(pack={"tokens": 64, "pad": {"multiple": 16}, "prefix": prefix})
    with Replay(config) as replay:
        for n in range(
            4
        ):  # in the prompt one image twice and another one, and one in the responses
            for m, one in enumerate(
                group(n, {0: image(n), 2: image(n), 4: image(20), 6: image(30 + n)})
            ):
                if n == 3 and m == 3:  # equal tokens, and another image: nothing is shared
                    one |= {
                        "image": {**one["image"], 2: image(40)},
                        "tokens": group(3, {})[0]["tokens"],
                    }
                replay.add(one)
        counted = 0
        every = set[int]()
        for micro in micros(replay.rollout()):
            media = micro.media
            numbers = micro["image"][0]
            assert torch.equal(media.place, numbers.nonzero()[:, 0])
            names = [number_of(image(n), replay) for n in range(41)]
            which = [names.index(number) for number in numbers[media.place].tolist()]
            rows = media.columns["patches"]
            grids = media.columns["grid"]
            assert len(media.counts["grid"]) == len(set(which)), "each once"
            assert rows.dtype == torch.float32
            firsts = media.counts["patches"].cumsum(0) - media.counts["patches"]
            for item, n in zip(media.item.tolist(), which, strict=True):
                part = rows[firsts[item] : firsts[item] + media.counts["patches"][item]]
                np.testing.assert_array_equal(part.numpy(), image(n).columns["patches"])
            repeated = micro.media.per_place()
            assert torch.equal(repeated["grid"][:, 0], torch.tensor(which))
            assert torch.equal(repeated["grid"], grids[media.item])
            counted = counted + len(which)
            every = every | set(which)
        assert every == {0, 1, 2, 3, 20, 30, 31, 32, 33, 40}
        # A shared prompt is there once for the four responses of a group, if they are in one pack.
        assert counted == 4 * 4 * SIZE if prefix == "own" else counted < 4 * 4 * SIZE


def test_rows_that_are_gone_are_refused_by_name() -> None:
    config = media_section(rollout={"groups": 1})
    with Replay(config) as replay:
        for one in group(0, {0: image(0)}):
            replay.add(one)
        late = micros(replay.rollout())
        replay.clear()
        pages_of(replay).words[:] = 0
        with pytest.raises(
            StoreError, match=r"while its rollout batch is trained; read micro\.media in the loop"
        ):
            _ = late[0].media
    fields = {**config, "fields": {"tokens": {}}}
    with Replay(fields) as replay:
        for one in group(0, {0: image(0)}):
            replay.add(one)
        with pytest.raises(FieldError, match="role media"):
            _ = micros(replay.rollout())[0].media


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_additions_and_removals_leave_exactly_whole_items(data: st.DataObject) -> None:
    with Replay(media_section({"capacity_bytes": 12 << 10}, capacity_steps=500)) as replay:
        pages = pages_of(replay)
        known = dict[int, dict[int, int]]()
        for n in range(data.draw(st.integers(1, 25))):
            wanted = data.draw(st.dictionaries(st.integers(0, 7), st.integers(0, 25), max_size=3))
            images = {step: image(which) for step, which in wanted.items()}
            try:
                for one in group(n, images):
                    known[replay.add(one)] = wanted
            except StoreFullError:
                assert sum(map(len, chain(pages.words, np.flatnonzero(whole(pages))))) > 12
            if known and data.draw(st.booleans()):
                replay.remove(
                    data.draw(st.lists(st.sampled_from(sorted(known)), max_size=9, unique=True))
                )
            table = replay.tables["main"]
            with table.lock:
                committed = table.slots[:, Slot.STATE] == SlotState.COMMITTED
                ids = table.slots[committed, Slot.ID].tolist()
            for one, there in zip(replay.read(ids), ids, strict=True):
                assert one["image"] == {step: image(which) for step, which in known[there].items()}
            check_pages(replay)


def whole(pages: Any) -> np.ndarray:
    return np.asarray(pages.words[:, MediaPage.STATE] == PageState.WHOLE)


def check_pages(replay: Replay) -> None:
    """Check that each page is free or in one chain, and that no item is there twice."""
    pages = pages_of(replay)
    heads = np.flatnonzero(whole(pages))
    assert len(set(pages.words[heads, MediaPage.NUMBER].tolist())) == len(heads)
    used = [page for some in chain(pages.words, heads) for page in some.tolist()]
    assert len(set(used)) == len(used)
    free = np.flatnonzero(pages.words[:, MediaPage.STATE] == PageState.FREE)
    assert sorted([*used, *free.tolist()]) == list(range(len(pages.words)))


@pytest.mark.parametrize("where", ["_reserve", "_free", "find"])
def test_a_death_at_any_line_leaves_whole_items(where: str) -> None:
    config = media_section({"capacity_bytes": 8 << 10}, writers=2)
    with Replay(config) as replay:
        for n in range(20):
            for one in group(n, {0: image(n, 40)}):
                replay.add(one)
        killed = 0
        for line in range(1, 40, 3):

            def dies(line: int = line) -> None:
                with TrajectoryWriter.attach(config, wait_s=5) as writer:
                    writer.add(group(100 + line, {0: image(100 + line, 90), 3: image(5, 40)})[0])

            killed += killed_at(line, dies, code=getattr(MediaPages, where).__code__)
            with TrajectoryWriter.attach(config, wait_s=5) as writer, replay.tables["main"].lock:
                pages_of(replay).recover()  # the place of the dead one has an owner again
                states = writer.parts[0].views["media_pages"][:, MediaPage.STATE]
                assert PageState.WRITING not in states.tolist()
            replay.add(group(200 + line, {1: image(200 + line, 90)})[0])
            with replay.tables["main"].lock:
                pages_of(replay).recover()
            check_pages(replay)
        assert killed > 2


def test_an_addition_whose_lock_times_out_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the bytes of an item and its commit point."""
    with Replay(media_section()) as replay:
        first = replay.add(group(0, {0: image(0, 90)})[0])
        find = MediaPages.find
        calls = list[int]()

        def found(self: MediaPages, numbers: np.ndarray) -> np.ndarray:
            calls.append(len(numbers))
            if len(calls) == 2:
                raise StoreError("the lock", "must be free within 1 s")
            return find(self, numbers)

        monkeypatch.setattr(MediaPages, "find", found)
        with pytest.raises(StoreError, match="the lock must be free"):
            replay.add(group(1, {0: image(1, 90)})[0])
        assert held(replay) == {number_of(image(0, 90), replay)}
        check_pages(replay)
        second = replay.add(group(1, {0: image(1, 90)})[0])
        images = [one["image"] for one in replay.read([first, second])]
        assert images == [{0: image(0, 90)}, {0: image(1, 90)}]


BAD = [
    ({"image": {9: image(0)}}, r"column image must have steps in \[0, 8\) as keys, .*9"),
    ({"image": {0: 5}}, "image: step 0 must be a Media"),
    ({"image": image(0)}, r"column image must be \{step: Media\}, or numbers of what is stored"),
    ({"image": {True: image(0)}}, r"must have steps in \[0, 8\) as keys"),
    (
        {"image": {0: Media(patch=[[1, 2, 3]])}},
        "patch must be one of the media columns patches, grid",
    ),
    ({"image": {0: Media(patches=[[1, 2]])}}, r"patches must have shape \['T', 3\]"),
    ({"image": {0: Media(patches=[[1, 2, np.nan]])}}, "patches must be finite"),
    ({"image": {0: Media(patches=np.zeros((0, 3)))}}, "must have at least one row"),
    (
        {"image": np.arange(8)},
        "must be held by the store, .* give the Media in place of its number",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), BAD)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], text: str) -> None:
    with Replay(media_section()) as replay:
        with pytest.raises(DataError, match=text):
            replay.add({**group(0, {})[0], **wrong})
        assert replay.tables["main"].num_trajectories == 0
        assert not held(replay)
        replay.add(group(0, {1: image(1)})[0])


def test_configs_and_data_sets_that_cannot_have_media_are_refused(tmp_path: Path) -> None:
    config = media_section()
    del config["tables"]["main"]["media"]
    with pytest.raises(
        ConfigError,
        match=re.escape("gear.tables.main.media must be given with a column of the role media"),
    ):
        Replay(config)
    config = media_section()
    columns = config["tables"]["main"]["schema"]["columns"]
    config["tables"]["main"]["schema"]["columns"] = {
        "ref": {"dtype": "float32", "late": True},
        **columns,
    }
    with Replay(config) as replay:  # steps are counted in a column that is there
        assert replay.read([replay.add(group(0, {1: image(1)})[0])])[0]["image"] == {1: image(1)}
    config = media_section()
    del config["tables"]["main"]["schema"]["columns"]["image"], config["fields"]["image"]
    with pytest.raises(ConfigError, match="media must be given with a column of the role media"):
        Replay({**config, "tables": config["tables"]})
    with pytest.raises(SchemaError, match="must not have the role media in a data set"):
        DatasetWriter(tmp_path / "data", Schema([Column("image", "int64", role="media")]))
    config = media_section(writers=1, sampler={"kind": "fifo"}, rollout={"trajectories": 4})
    del config["tables"]["main"]["group"]
    with Replay(config), TrajectoryWriter.attach(config) as writer, writer.trajectory() as steps:
        steps.set(reward=0.0, prompt=0)
        with pytest.raises(DataError, match="must have no media"):
            steps.append(tokens=1, loss_mask=True, logp=0.0, image=0, publish=True)
        steps.discard()


def test_sent_items_are_the_same_and_broken_ones_are_refused() -> None:
    spec = MediaSpec("image", tuple(Schema.from_json({"columns": MEDIA["columns"]}).columns))
    items = {one.number: one for one in (image(n).item("", spec.columns) for n in (0, 5, 8))}
    sent = spec.send(item.content for item in items.values())
    again = {one.number: one for one in spec.received("", sent)}
    assert again.keys() == items.keys()
    for number, item in items.items():
        np.testing.assert_array_equal(again[number].content, item.content)
        np.testing.assert_array_equal(again[number].digest, item.digest)
    assert spec.rows(items[next(iter(items))].content)["grid"].tolist() == [[0, 1]]
    nan = sent.copy()
    nan[24:28].view(np.float32)[0] = np.nan
    with pytest.raises(DataError, match=r"patches must be finite, got 'nan at row 0'"):
        list(spec.received("", nan))
    for at, value in ((0, 7), (0, 1 << 40), (0, -8), (8, -1), (8, 1 << 60), (16, 0)):
        broken = sent.copy()
        broken[at : at + 8].view(np.int64)[0] = value
        with pytest.raises(DataError, match="media must be the rows of its columns"):
            list(spec.received("", broken))
