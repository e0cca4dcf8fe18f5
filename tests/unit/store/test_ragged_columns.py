"""Ragged columns of a table: added, read, filled late, saved, and kept as long as trajectories."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import run_command
from media_tables import MEDIA, evict_all, image
from ragged_tables import MAX, MEMORY, ragged_section, support, supported
from rollout_support import micros, responses
from store_support import killed_at

from deepspeed_gear import (
    CheckpointError,
    Column,
    ConfigError,
    DataError,
    DatasetWriter,
    DeviceReplay,
    FieldError,
    FillWorker,
    Media,
    Ragged,
    Replay,
    Schema,
    SchemaError,
    ShapeError,
    StoreError,
    StoreFullError,
)
from deepspeed_gear.cli import export
from deepspeed_gear.store.eviction import Evictor
from deepspeed_gear.store.late_columns import fill_each
from deepspeed_gear.store.media_pages import MediaPages
from deepspeed_gear.store.records import MediaPage, PageState, SlotRetention
from deepspeed_gear.timeouts import Context

NAMES = ("ids", "logs")
FEW = {"ragged": {"capacity_bytes": 8 << 10, "page_bytes": 512}}  # 16 pages


def same(found: Any, given: Any) -> bool:
    """Return whether values are equal, whatever their dtypes; bfloat16 has those of the tests."""
    equal = found.values.double().tolist() == given.values.double().tolist()
    return equal and bool(torch.equal(found.offsets, given.offsets))


def check(replay: Replay, ids: list[int], given: list[dict[str, Any]]) -> None:
    for one, other in zip(replay.read(ids), given, strict=True):
        assert all(same(one[name], other[name]) for name in NAMES)


def num_items(replay: Replay) -> int:
    media = replay.tables["main"].media
    assert media is not None
    return int(np.count_nonzero(media.words[:, MediaPage.STATE] == PageState.WHOLE))


def long(steps: int, seed: int) -> dict[str, Ragged]:
    """Return values that take a page of 512 bytes for 20 steps."""
    values = (np.arange(steps * 5) + seed * 7) % 251
    return {name: Ragged(values, np.arange(steps + 1) * 5) for name in NAMES}


def test_what_is_added_is_read_back() -> None:
    with Replay(ragged_section()) as replay:
        given = supported(20)
        ids = [replay.add(one) for one in given]
        check(replay, ids, given)
        found = replay.read(ids[:1])[0]
        assert found["ids"].values.dtype == torch.int32
        assert found["logs"].values.dtype == torch.bfloat16
        again = replay.add(found)  # what is read can be added, and is there once
        check(replay, [again], given[:1])
        assert num_items(replay) == 2 * len(given)
        one = given[3]
        forms = [
            [part.tolist() for part in one["ids"]],
            [part.numpy() for part in one["ids"]],
            one["ids"].nested(),
            Ragged(one["ids"].values.numpy(), one["ids"].offsets.tolist()),
        ]
        for form in forms:
            check(replay, [replay.add({**one, "ids": form})], [one])
        none = Ragged([], [0] * (len(one["tokens"]) + 1))
        without = replay.add({**one, "ids": none, "logs": [[]] * len(one["tokens"])})
        check(replay, [without], [{"ids": none, "logs": none}])
        sizes = replay.statistics()["ragged"]["main"]
        assert sizes["items"] == 2 * len(given) + 2
        assert sizes["capacity_bytes"] == 1 << 20


def test_the_bytes_are_those_of_the_values() -> None:
    with Replay(ragged_section()) as replay:
        given = supported(40)
        for one in given:
            replay.add(one)
        values = sum(len(one["ids"].values) for one in given)
        steps = sum(len(one["tokens"]) for one in given)
        least = values * (4 + 2) + 2 * steps
        used = replay.statistics()["ragged"]["main"]["bytes"]
        assert least < used < least + 2 * len(given) * (512 + 64)  # a part of a page, and heads
        assert used < steps * MAX * (4 + 2) / 2, "less than half of rows of the largest size"


def test_what_does_not_fit_changes_nothing() -> None:
    with Replay(ragged_section()) as replay:
        given = supported(3)
        first = replay.add(given[0])
        steps = len(given[1]["tokens"])
        cases: list[tuple[Any, str]] = [
            (given[0]["ids"], f"ids must have values for each of the {steps} steps"),
            ([[1] * (MAX + 1)] + [[]] * (steps - 1), f"at most max_values = {MAX} values at a"),
            (np.int64(5), "ids must have values for each step; give Ragged"),
            (None, "ids must have values for each step"),
        ]
        for value, text in cases:
            with pytest.raises(DataError, match=text):
                replay.add({**given[1], "ids": value})
        lacking = {name: value for name, value in given[1].items() if name != "ids"}
        with pytest.raises(DataError, match="column ids must be in every trajectory"):
            replay.add(lacking)
        assert replay.tables["main"].num_trajectories == 1
        assert num_items(replay) == 2
        check(replay, [first], given[:1])


@pytest.mark.parametrize("remove", ["none", "fifo"])
def test_trajectories_leave_for_values_as_they_do_for_rows(remove: str) -> None:
    plain = {**responses(1)[0], "tokens": np.ones(20, np.int32), "loss_mask": np.ones(20, bool)}
    plain |= {"logp": np.zeros(20, np.float32)}
    with Replay(ragged_section(table={**FEW, "remove": remove})) as replay:
        given = [{**plain, **long(20, seed)} for seed in range(12)]
        added = []
        if remove == "none":
            with pytest.raises(StoreFullError, match=r"free pages .* raise ragged.capacity_bytes"):
                added += [replay.add(one) for one in given]
            held = replay.tables["main"].num_trajectories
            check(replay, list(range(held)), given[:held])
        else:
            added += [replay.add(one) for one in given]
            held = replay.tables["main"].num_trajectories
            assert 0 < held < 12
            check(replay, added[-held:], given[-held:])


def test_a_rollout_batch_keeps_its_values_until_it_is_trained() -> None:
    table = {**FEW, "remove": "fifo"}
    with Replay(ragged_section(table=table, rollout={"trajectories": 2})) as replay:
        plain = {"tokens": np.ones(20, np.int32), "loss_mask": np.ones(20, bool)}
        plain |= {"logp": np.zeros(20, np.float32), "reward": 0.0, "prompt": 0}
        for seed in range(2):
            replay.add({**plain, **long(20, seed)})
        rollout = replay.rollout()
        replay.remove(rollout.trajectory_id)
        for seed in range(2, 30):
            replay.remove([replay.add({**plain, **long(20, seed)})])
        kept = []
        for micro in micros(rollout):
            values = micro.ragged("ids").values
            assert len(values) == 2 * 19 * 5
            kept.append(micro)
        for seed in range(30, 60):
            replay.remove([replay.add({**plain, **long(20, seed)})])
        with pytest.raises(StoreError, match=r"read micro\.ragged in the loop"):
            kept[0].ragged("ids")


def test_a_save_has_the_values_of_its_trajectories(tmp_path: Path) -> None:
    config = ragged_section(late=True)
    with Replay(config) as replay:
        given = supported(30)
        plain = responses(30)
        ids = [replay.add(one) for one in plain]
        for number in ids[:20]:
            replay.fill(number, **{name: given[number][name] for name in NAMES})
        replay.fill(ids[20], ids=given[20]["ids"])  # the other column is absent
        replay.remove(ids[:5])
        table = replay.tables["main"]
        evictor = Evictor(table, Context())
        with table.lock:
            evictor.free_retired()
        state = replay.save(tmp_path)
    with Replay(config) as resumed:
        for one in supported(10, seed=5):
            resumed.add(one)
        resumed.load(tmp_path, state)
        check(resumed, ids[5:20], given[5:20])
        late = resumed.read(ids[20:22])
        assert same(late[0]["ids"], given[20]["ids"])
        assert all(not len(one["logs"].values) for one in late)
        assert resumed.statistics()["late"]["main"]["ids"]["absent"] == 9
        resumed.fill(ids[20], logs=given[20]["logs"])
        for number in ids[21:]:
            resumed.fill(number, **{name: given[number][name] for name in NAMES})
        check(resumed, ids[5:], given[5:])
    small = {**config, "tables": {"main": {**config["tables"]["main"]}}}
    small["tables"]["main"]["ragged"] = {"capacity_bytes": 2048, "page_bytes": 512}
    with Replay(small) as replay, pytest.raises(StoreFullError, match=r"raise ragged.capacity"):
        replay.load(tmp_path, state)
    with pytest.raises(DataError, match="must name a table without media and ragged columns"):
        run_command(export, "--format", "jsonl", str(tmp_path), str(tmp_path / "out"))
    with Replay(config) as fresh:
        fresh.load(tmp_path, state)
        assert num_items(fresh) == 2 * 15 + 1, "what trajectories name and no more"
    other = ragged_section(late=True)
    other["tables"]["main"]["schema"]["columns"]["ids"]["max_values"] = 7
    with (
        Replay(other) as replay,
        pytest.raises(CheckpointError, match="must be of the same seed, tables"),
    ):
        replay.load(tmp_path, state)


def test_a_save_within_an_epoch_has_slots_that_name_nothing(tmp_path: Path) -> None:
    config = ragged_section(rollout={"trajectories": 8})
    config["sampler"] = {"kind": "epoch", "unit": "trajectory"}
    with Replay(config) as replay:
        given = supported(24)
        ids = [replay.add(one) for one in given]
        first = replay.rollout().trajectory_id.tolist()
        gone = [number for number in ids if number not in first][:6]
        replay.remove(gone)
        table = replay.tables["main"]
        with table.lock:
            Evictor(table, Context()).free_retired()
            assert table.media is not None
            evict_all(table.media)
        assert num_items(replay) == 2 * 18
        state = replay.save(tmp_path)
    with Replay(config) as resumed:
        resumed.load(tmp_path, state)
        kept = [number for number in ids if number not in gone]
        check(resumed, kept, [given[number] for number in kept])


def test_late_values_are_written_once() -> None:
    with Replay(ragged_section(late=True)) as replay:
        given = supported(3)
        ids = [replay.add(one) for one in responses(3)]
        empty = replay.read(ids[:1])[0]["ids"]
        assert len(empty) == len(given[0]["tokens"])
        assert not len(empty.values)
        assert not replay.can_sample()
        steps = len(given[0]["tokens"])
        with pytest.raises(DataError, match=f"column ids must have the rows of {steps} steps, got"):
            replay.fill(ids[0], ids=given[1]["ids"])
        with pytest.raises(DataError, match="column logs must be finite"):
            replay.fill(ids[0], ids=given[0]["ids"], logs=[[np.nan]] + [[]] * (steps - 1))
        assert num_items(replay) == 0, "nothing has changed"
        replay.fill(ids[0], ids=given[0]["ids"])
        with pytest.raises(DataError, match="column ids must be written once"):
            replay.fill(ids[0], ids=given[0]["ids"])
        with pytest.raises(StoreError, match="must be stored on this node"):
            replay.fill(77, ids=given[0]["ids"])
        replay.fill(ids[0], logs=given[0]["logs"])
        check(replay, ids[:1], given[:1])


def test_an_item_that_leaves_before_it_is_named_is_added_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Replay(ragged_section(late=True)) as replay:
        given = supported(1)
        number = replay.add(responses(1)[0])
        added = MediaPages.add
        calls = []

        def add(self: MediaPages, *arguments: Any) -> None:
            added(self, *arguments)
            calls.append(1)
            if len(calls) < 3:  # another process needs all pages before the row names it
                with replay.tables["main"].lock:
                    self._evict(len(self.words), np.zeros(0, np.int64))

        monkeypatch.setattr(MediaPages, "add", add)
        replay.fill(number, **{name: given[0][name] for name in NAMES})
        assert len(calls) == 3
        check(replay, [number], given)


def test_a_death_between_the_pages_and_the_row_leaves_a_column_to_fill() -> None:
    with Replay(ragged_section(late=True)) as replay:
        given = supported(1)
        number = replay.add(responses(1)[0])
        table = replay.tables["main"]
        slot = int(table.slots_of(np.array([number]))[0])
        replay.fill(number, ids=given[0]["ids"])
        # As if the process had ended after the number and before the commit point.
        table.views["retention"][slot, SlotRetention.PRESENT] = 0
        assert replay.statistics()["late"]["main"]["ids"]["absent"] == 1
        replay.fill(number, **{name: given[0][name] for name in NAMES})
        check(replay, [number], given)


@pytest.mark.parametrize("code", [fill_each.__code__, MediaPages.add.__code__])
def test_a_worker_that_dies_at_any_line_leaves_whole_values_or_none(code: Any) -> None:
    config = ragged_section(late=True, table={"writers": 2, "remove": "fifo"})
    with Replay(config) as replay:
        given = [
            {**one, **long(len(one["tokens"]), seed)} for seed, one in enumerate(responses(24))
        ]
        ids = [replay.add(one) for one in responses(24)]
        killed = 0
        for line in range(1, 48, 2):

            def dies(line: int = line) -> None:
                with FillWorker.attach(config, list(NAMES), wait_s=5) as worker:
                    (lease,) = worker.lease(1, timeout_s=5)
                    lease.fill(**{name: given[lease.trajectory_id][name] for name in NAMES})

            killed += killed_at(line, dies, code=code)
            table = replay.tables["main"]
            for number, one in zip(ids, replay.read(ids), strict=True):
                slot = int(table.slots_of(np.array([number]))[0])
                for name in NAMES:
                    if table.late_present(slot) & table.schema.late_bits([name]):
                        assert same(one[name], given[number][name])
                    else:
                        assert not len(one[name].values) or same(one[name], given[number][name])
        assert killed > 5
        with FillWorker.attach(config, list(NAMES), wait_s=5) as worker:
            while leases := worker.lease(8, timeout_s=0):  # those of the dead have come back
                for lease in leases:
                    lease.fill(**{name: given[lease.trajectory_id][name] for name in NAMES})
        check(replay, ids, given)


def test_workers_and_passes_fill_the_same_values() -> None:
    config = ragged_section(late=True, table={"writers": 1})
    with Replay(config) as replay:
        given = supported(40)
        ids = [replay.add(one) for one in responses(40)]
        with FillWorker.attach(config, list(NAMES)) as worker:
            leases = worker.lease(20)
            with pytest.raises(DataError, match=r"ids must have values for each of the \d+ steps"):
                leases[0].fill(ids=[[1]], logs=[[1.0]])
            for lease in leases:
                own = given[lease.trajectory_id]
                assert "ids" not in lease.columns
                lease.fill(**{name: own[name] for name in NAMES})
            leases[0].fill(**{name: given[leases[0].trajectory_id][name] for name in NAMES})
        assert replay.statistics()["late"]["main"]["ids"]["repeated"] == 1
        for micro in replay.forward(*NAMES):
            with pytest.raises(ShapeError, match=r"'ids' must have values for each of the \d+ pla"):
                micro.fill(ids=[[1]])
            micro.fill(**{name: placed(micro, given, name) for name in NAMES})
        check(replay, ids[:20], given[:20])
        for number, one in zip(ids[20:], replay.read(ids[20:]), strict=True):
            for name in NAMES:  # no place predicts the first token
                rows = [*given[number][name]]
                rows[0] = torch.zeros(0)
                assert same(one[name], Ragged.of_rows(rows))
        with FillWorker.attach(config, "ids") as worker:
            assert worker.lease(1, timeout_s=0) == []


def placed(micro: Any, given: list[dict[str, Any]], name: str) -> Ragged:
    """Return the values of a pack at the places that predict."""
    rows: list[Any] = []
    for number in micro.trajectory_id.tolist():
        rows += [*given[number][name]][1:]
        rows.append([])
    rows += [[]] * (micro["tokens"].shape[1] - len(rows))
    return Ragged.of_rows(rows)


def test_a_worker_of_another_column_gets_the_values() -> None:
    config = ragged_section(table={"writers": 1})
    config["tables"]["main"]["schema"]["columns"]["score"] = {
        "dtype": "float32",
        "rows": "1",
        "late": True,
    }
    config["fields"] = {"tokens": {}, "ids": {}}
    config["rollout"] = {"trajectories": 2}
    with Replay(config) as replay:
        given = supported(2)
        for one in given:
            replay.add(one)
        with FillWorker.attach(config, "score") as worker:
            for lease in worker.lease(2):
                assert same(lease.columns["ids"], given[lease.trajectory_id]["ids"])
                lease.fill(1.0)
        micro = micros(replay.rollout())[0]
        assert len(micro.ragged("ids")) == micro["tokens"].shape[1]
        with pytest.raises(FieldError, match=r"ragged field 'logs' must be in the micro batch"):
            micro.ragged("logs")
        with pytest.raises(FieldError, match=r"its values are ragged: micro.ragged\('ids'\)"):
            micro["ids"]
        assert f"ids: int32 x 0 to {MAX} values per step" in repr(replay.tables["main"].schema)


def test_many_threads_of_processes_fill_while_others_add() -> None:
    table = {**FEW, "remove": "fifo", "writers": 1}
    config = ragged_section(late=True, table=table)
    plain = {"tokens": np.ones(20, np.int32), "loss_mask": np.ones(20, bool)}
    plain |= {"logp": np.zeros(20, np.float32), "reward": 0.0, "prompt": 0}
    with Replay(config) as replay:
        done = threading.Event()
        errors: list[BaseException] = []

        def fills() -> None:
            try:
                with FillWorker.attach(config, list(NAMES)) as worker:
                    while not done.is_set():
                        for lease in worker.lease(3, timeout_s=0.05):
                            lease.fill(**long(20, lease.trajectory_id))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=fills)
        thread.start()
        for _ in range(300):
            replay.add(plain)
        done.set()
        thread.join()
        assert not errors, errors
        for number in range(300):
            try:
                found = replay.read([number])[0]
            except StoreError:
                continue  # evicted
            if len(found["ids"].values):
                assert same(found["ids"], long(20, number)["ids"])


def test_media_and_ragged_columns_share_pages() -> None:
    config = ragged_section()
    main = config["tables"]["main"]
    main["media"] = MEDIA
    main["schema"]["columns"]["image"] = {"dtype": "int64", "role": "media"}
    with Replay(config) as replay:
        given = supported(24)
        pictures = [{0: image(number % 4)} for number in range(24)]
        ids = [
            replay.add({**one, "image": picture})
            for one, picture in zip(given, pictures, strict=True)
        ]
        check(replay, ids, given)
        assert [one["image"] for one in replay.read(ids)] == pictures
        seen = 0
        for micro in micros(replay.rollout()):
            assert set(micro.media.columns) == set(MEDIA["columns"])
            assert len(micro.ragged("ids")) == micro["tokens"].shape[1]
            seen += len(micro.media.item)
        assert seen == 24
        sizes = replay.statistics()["media"]["main"]
        assert sizes["capacity_bytes"] == MEDIA["capacity_bytes"] + MEMORY["capacity_bytes"]
        odd = {**given[0], "image": {0: Media(patches=np.ones((1, 3)), ids=[1])}}
        with pytest.raises(DataError, match="must be a column of the media, not a ragged one"):
            replay.add(odd)


def test_items_are_copied_to_other_tables() -> None:
    config = ragged_section(rollout={"trajectories": 8})
    config["tables"]["again"] = {**config["tables"]["main"]}
    config["sampler"] = {
        "kind": "mixture",
        "shares": {"main": 0.5, "again": 0.5},
        "of": {"kind": "uniform", "unit": "trajectory"},
    }
    with Replay(config) as replay:
        given = supported(16)
        for table, of in (("main", given[:8]), ("again", given[8:])):
            for one in of:
                replay.add(one, table=table)
        for micro in micros(replay.rollout()):
            assert micro.ragged("ids").values.numel()
        assert replay.tables["again"].num_trajectories == 8
        rollout = replay.rollout()
        chosen = np.asarray(rollout.table == 0)
        assert replay.copy_items(rollout, "again", chosen) == int(chosen.sum())
        numbers = rollout.trajectory_id[torch.from_numpy(chosen)].tolist()
        ids = list(range(8, 8 + len(numbers)))
        for one, number in zip(replay.read(ids, table="again"), numbers, strict=True):
            assert same(one["ids"], given[number]["ids"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ragged": None}, r"gear.tables.main.ragged must be given with columns that have max_val"),
        ({"ragged": {"capacity_bytes": 100}}, r"ragged.capacity_bytes must be at least one page"),
        ({"ragged": {"capacity_bytes": 0}}, r"ragged.capacity_bytes"),
        ({"placement": "device", "remove": "fifo"}, r"ragged must not be given for a table on dev"),
    ],
)
def test_options_of_the_table_that_do_not_suit(change: dict[str, Any], text: str) -> None:
    config = ragged_section(table=change)
    if change.get("placement"):
        del config["pack"], config["rollout"]
        config["sampler"] = {"kind": "uniform", "unit": "step"}
        config["batch_size"] = 4
    with pytest.raises(ConfigError, match=text):
        Replay(config)


def test_a_table_on_devices_has_no_ragged_columns() -> None:
    table = {"placement": "device", "remove": "fifo"}
    config = ragged_section(table=table, batch_size=4)
    del config["pack"], config["rollout"], config["tables"]["main"]["ragged"]
    config["sampler"] = {"kind": "uniform", "unit": "step"}
    with pytest.raises(ConfigError, match="must not have a column with max_values on devices"):
        DeviceReplay(config)


def test_what_has_no_ragged_columns_is_refused_by_name(tmp_path: Path) -> None:
    schema = Schema([Column("tokens", "int32", role="token"), Column("ids", "int32", max_values=3)])
    with pytest.raises(SchemaError, match="column ids must not be ragged in a data set"):
        DatasetWriter(tmp_path / "data", schema)
    config = ragged_section()
    del config["tables"]["main"]["ragged"]
    for name in NAMES:
        del config["tables"]["main"]["schema"]["columns"][name]
    config["tables"]["main"]["ragged"] = dict(MEMORY)
    with pytest.raises(ConfigError, match="ragged must be given with columns that have max_values"):
        Replay(config)
    with Replay(ragged_section(table={"writers": 1})) as replay:
        for one in supported(24):
            replay.add(one)
        rollout = replay.rollout()
        with pytest.raises(ConfigError, match=r"'ids' must be a column .* with one value per"):
            rollout.values("ids")
        for _ in rollout:
            pass


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"scale": 2.0}, r"gear.fields.ids.scale must not be given for a ragged column"),
        ({"normalize": "mean_std"}, r"normalize must not be given"),
        ({"as": "float32"}, r"as must not be given for a ragged column"),
        ({"offset": 2}, r"gear.fields.ids.offset must be"),
    ],
)
def test_options_of_a_field_that_do_not_suit(field: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Replay(ragged_section(fields={"tokens": {}, "ids": field}))


def test_windows_have_no_ragged_columns() -> None:
    config = ragged_section()
    del config["pack"], config["rollout"]
    config["sampler"] = {"kind": "uniform", "unit": "step"}
    config["batch_size"] = 4
    with Replay(config) as replay:  # they are left out where no field names them
        for one in supported(4):
            replay.add(one)
        assert "ids" not in replay.sample()
    config["fields"] = {"tokens": {}, "ids": {}}
    with pytest.raises(ConfigError, match=r"gear.fields.ids must not name a ragged column without"):
        Replay(config)


def test_values_of_a_step_without_tokens_stay_in_place() -> None:
    config = ragged_section()
    columns = config["tables"]["main"]["schema"]["columns"]
    del columns["tokens"], columns["loss_mask"], columns["prompt"]
    with Replay(config) as replay:
        given = [support(5, seed) for seed in range(24)]
        for one in given:
            replay.add({**one, "logp": np.zeros(5, np.float32), "reward": 0.0})
        for micro in micros(replay.rollout()):
            found = micro.ragged("ids")
            for index, number in enumerate(micro.trajectory_id.tolist()):
                assert same(found.part(5 * index, 5 * index + 5), given[number]["ids"])
