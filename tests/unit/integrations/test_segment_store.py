"""Segment store: values by sample and field that outlive every process that uses them."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.errors import (
    CheckpointError,
    DataError,
    FieldError,
    StoreError,
    StoreFullError,
)
from deepspeed_gear.integrations import segment_store
from deepspeed_gear.integrations.segment_index import FieldBlock, Form
from deepspeed_gear.integrations.segment_store import LOG, SEGMENTS, SegmentStore

BYTES = Form("bytes", "", 1)
PAGE = os.sysconf("SC_PAGE_SIZE")


def block(values: list[bytes]) -> FieldBlock:
    sizes = np.array([len(one) for one in values], np.int64)
    return FieldBlock(BYTES, sizes, sizes[:, None], values)


def put(store: SegmentStore, samples: list[int], **fields: list[bytes]) -> None:
    store.put(samples, {name: block(values) for name, values in fields.items()})


def get(store: SegmentStore, samples: list[int], name: str) -> list[bytes]:
    stored = store.get(samples, [name])[name]
    assert stored.shapes[:, 0].tolist() == stored.sizes.tolist()
    ends = np.cumsum(stored.sizes)
    return [bytes(part) for part in np.split(stored.content, ends[:-1])]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    with SegmentStore(tmp_path / "values") as opened:
        yield opened


@pytest.fixture
def other(store: SegmentStore) -> Iterator[SegmentStore]:
    """The store as another process has it open."""
    with SegmentStore(store.folder) as opened:
        yield opened


def test_fields_of_samples_are_put_in_parts_and_read_in_any_order(
    store: SegmentStore, other: SegmentStore
) -> None:
    put(store, [0, 1, 2], a=[b"a0", b"", b"a22"], b=[b"b0", b"b1", b"b2"])
    put(other, [1, 2, 7], c=[b"c1", b"c2", b"c7" * PAGE])
    put(store, [2, 7], a=[b"new", b"a7"])
    assert get(other, [7, 0, 2, 1, 2], "a") == [b"a7", b"a0", b"new", b"", b"new"]
    assert get(store, [2, 7, 1], "c") == [b"c2", b"c7" * PAGE, b"c1"]
    assert len(other.get([], ["a"])["a"].sizes) == 0
    assert store.get([0, 1], []) == {}
    with pytest.raises(FieldError, match=r"field c must have a value for every sample.*\[0, 9\]"):
        get(store, [0, 1, 9], "c")
    with pytest.raises(FieldError, match="field d"):
        get(store, [0], "d")


def test_a_sample_named_twice_has_the_last_value(store: SegmentStore) -> None:
    put(store, [3, 3, 4], a=[b"1", b"2", b"3"])
    assert get(store, [3, 4], "a") == [b"2", b"3"]
    store.clear([3, 4, 4])
    assert store.statistics()["segments"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_changes_equals_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two processes put, clear, save and load; the log is written anew many times."""
    monkeypatch.setattr(segment_store, "_LEAST_LOG", 2000)
    random = np.random.default_rng(seed)
    stores = [SegmentStore(tmp_path / "values") for _ in range(2)]
    model: dict[tuple[int, str], bytes] = {}
    saved: dict[tuple[int, str], bytes] | None = None
    for step in range(120):
        store = stores[random.integers(2)]
        samples = random.choice(30, random.integers(1, 12), replace=False).tolist()
        kind = random.choice(
            ["put", "put", "put", "clear", "save", "load"], p=[0.3] * 3 + [0.06, 0.02, 0.02]
        )
        if kind == "put":
            names = random.choice(["a", "b", "c"], random.integers(1, 4), replace=False).tolist()
            fields = {
                name: [random.bytes(random.integers(3 * PAGE)) for _ in samples] for name in names
            }
            put(store, samples, **fields)
            for name, values in fields.items():
                model |= {(one, name): value for one, value in zip(samples, values, strict=True)}
        elif kind == "clear":
            store.clear(samples)
            model = {at: value for at, value in model.items() if at[0] not in samples}
        elif kind == "save":
            shutil.rmtree(tmp_path / "saved", ignore_errors=True)
            store.save(tmp_path / "saved")
            saved = dict(model)
        elif saved is not None:
            store.load(tmp_path / "saved")
            model = dict(saved)
        reader = stores[random.integers(2)]
        for name in ("a", "b", "c"):
            held = [one for one, field in model if field == name] or [0]
            if (held[0], name) not in model:
                continue
            random.shuffle(held)
            assert get(reader, held, name) == [model[one, name] for one in held], step
        assert reader.statistics()["live_bytes"] == sum(map(len, model.values()))
    stores[0].clear(range(30))
    assert list((tmp_path / "values" / SEGMENTS).iterdir()) == []
    assert stores[1].statistics() == stores[0].statistics()
    for one in stores:
        one.close()


def test_a_clear_frees_the_pages_of_its_samples(store: SegmentStore) -> None:
    size = 20 * PAGE + 5
    put(store, [*range(16)], a=[bytes([one]) * size for one in range(16)], b=[b"x"] * 16)
    whole = store.statistics()["held_bytes"]
    store.clear([1, 3, 4, 5, 9])
    kept = store.statistics()
    assert kept["live_bytes"] == 11 * (size + 1)
    # At most a page at each end of a run of cleared samples stays: [1], [3, 4, 5], [9].
    assert whole - kept["held_bytes"] >= 5 * size - 3 * 2 * PAGE
    rest = [one for one in range(16) if one not in (1, 3, 4, 5, 9)]
    assert get(store, rest, "a") == [bytes([one]) * size for one in rest]
    put(store, rest[:-1], a=[b"new"] * (len(rest) - 1))
    assert store.statistics()["held_bytes"] < 2 * size + 10 * PAGE
    store.clear(rest)
    assert store.statistics()["held_bytes"] == 0


def test_the_log_stays_bounded(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_store, "_LEAST_LOG", 10_000)
    for number in range(300):
        put(store, [number], a=[b"value"])
        store.clear([number - 5] if number >= 5 else [])
        assert store.statistics()["log_bytes"] < 20_000
    assert get(store, [*range(295, 300)], "a") == [b"value"] * 5


def test_a_full_store_refuses_a_put_and_takes_clears(tmp_path: Path) -> None:
    with SegmentStore(tmp_path, capacity_bytes=100) as store:
        put(store, [0, 1], a=[b"x" * 40, b"y" * 40])
        with pytest.raises(StoreFullError, match=r"must have 21 B free.*raise capacity_bytes"):
            put(store, [2], a=[b"z" * 21])
        assert get(store, [0, 1], "a") == [b"x" * 40, b"y" * 40]
        with pytest.raises(FieldError):
            get(store, [2], "a")
        store.clear([0])
        put(store, [2], a=[b"z" * 21])


@pytest.mark.parametrize(
    ("samples", "fields", "message"),
    [
        (
            [0, -1],
            {"a": [b"", b""]},
            r"must be in \[0, 134217728\), got -1; number samples densely",
        ),
        ([1 << 40], {"a": [b""]}, "number samples densely"),
        (
            [0, 1],
            {"a": [b"", b""], "b": [b""]},
            "field b must have 2 values, one for each sample, got 1",
        ),
    ],
)
def test_wrong_puts_are_refused(
    store: SegmentStore, samples: list[int], fields: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        put(store, samples, **fields)
    assert store.statistics()["segments"] == 0


def test_a_record_that_a_death_cut_off_is_not_committed(
    store: SegmentStore, tmp_path: Path
) -> None:
    put(store, [0, 1], a=[b"a0", b"a1"])
    before = store.statistics()["log_bytes"]
    put(store, [1, 2], a=[b"new", b"a2"])
    whole = (store.folder / LOG).read_bytes()
    for size in range(before, len(whole), 7):
        copied = tmp_path / f"cut-{size}"
        shutil.copytree(store.folder, copied)
        (copied / LOG).write_bytes(whole[:size])
        with SegmentStore(copied) as opened:
            assert get(opened, [0, 1], "a") == [b"a0", b"a1"]
            assert [one.name for one in (copied / SEGMENTS).iterdir()] == ["0"]
            assert (copied / LOG).stat().st_size == opened.statistics()["log_bytes"]
            put(opened, [2], a=[b"again"])
            assert get(opened, [1, 2], "a") == [b"a1", b"again"]


@pytest.mark.parametrize("where", ["_append", "_free"])
def test_a_death_between_the_steps_of_a_put_leaves_it_done_or_undone(
    store: SegmentStore, other: SegmentStore, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    put(store, [0], a=[b"old" * PAGE])
    reached = []

    def die(*_: Any) -> None:
        reached.append(where)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, where, die)
    with pytest.raises(KeyboardInterrupt):
        put(store, [0, 1], a=[b"new", b"more"])
    assert reached == [where]
    is_done = where == "_free"
    assert get(other, [0], "a") == [b"new" if is_done else b"old" * PAGE]
    put(other, [5], a=[b"a5"])  # it has the number of what was left
    assert get(other, [5], "a") == [b"a5"]
    with SegmentStore(store.folder) as opened:  # and what was left is freed
        live = opened.statistics()
        assert live["segments"] == len(list((store.folder / SEGMENTS).iterdir())) == 2
        assert live["held_bytes"] <= live["live_bytes"] + 2 * PAGE


WRITER = """
import sys
import numpy as np
from pathlib import Path
from deepspeed_gear.integrations.segment_index import FieldBlock, Form
from deepspeed_gear.integrations.segment_store import SegmentStore
store = SegmentStore(Path(sys.argv[1]))
first = int(sys.argv[2])
for number in range(first, first + 100000):
    value = np.full(2000, number, np.int64)
    size = np.array([value.nbytes])
    blocks = {name: FieldBlock(Form("bytes", "", 1), size, size[:, None], [value]) for name in ("a", "b")}
    store.put([number], blocks)
    print(number, flush=True)
    if number % 3 == 0:
        store.clear([number - 1])
        print(-number, flush=True)
"""


def test_nothing_that_was_put_is_lost_by_kills(tmp_path: Path) -> None:
    """verl-project/verl#7579 asks for a buffer that a crash does not empty.

    Processes are killed while they put and clear: what they reported is there and whole.
    """
    folder = tmp_path / "values"
    random = np.random.default_rng(0)
    kept: set[int] = set()
    for turn in range(6):
        first = 1 + 100_000 * turn
        arguments = [sys.executable, "-c", WRITER, str(folder), str(first)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            reported = [int(writer.stdout.readline()) for _ in range(int(random.integers(5, 200)))]
            writer.send_signal(signal.SIGKILL)
            reported += [int(line) for line in writer.stdout.read().split()]
        kept |= {number for number in reported if number > 0}
        kept -= {-number - 1 for number in reported if number < 0}
        # The last clear may have been done without its report.
        last = max(map(abs, reported))
        kept -= {last - 1} if last % 3 == 0 else set()
    with SegmentStore(folder) as store:
        samples = sorted(kept)
        for name in ("a", "b"):
            stored = store.get(samples, [name])[name]
            values = stored.content.view(np.int64).reshape(len(samples), 2000)
            assert (values == np.array(samples)[:, None]).all()
        files = {int(one.name) for one in (folder / SEGMENTS).iterdir()}
        assert len(files) == store.statistics()["segments"] <= len(kept) + 2 * 6


@pytest.mark.parametrize("change", ["part", "whole", "clear", "load"])
def test_a_value_that_others_change_while_it_is_read_is_read_again(
    store: SegmentStore,
    other: SegmentStore,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: str,
) -> None:
    """The pages of the old values are freed before they are read."""
    put(store, [0, 1], a=[b"0" * 9 * PAGE, b"1" * 9 * PAGE])
    store.save(tmp_path / "saved")
    put(store, [0, 1], a=[b"2" * 9 * PAGE, b"3" * 9 * PAGE])
    read = store._read
    reads = []

    def read_late(*arguments: Any) -> None:
        reads.append(change)
        if len(reads) == 1 and change == "load":
            other.load(tmp_path / "saved")
        elif len(reads) == 1 and change == "clear":
            other.clear([1])
        elif len(reads) == 1:
            count = 1 if change == "part" else 2
            put(other, [0, 1][:count], a=[b"4", b"5"][:count])
        read(*arguments)

    monkeypatch.setattr(store, "_read", read_late)
    if change == "clear":
        with pytest.raises(FieldError, match=r"none for samples \[1\]"):
            get(store, [1, 0], "a")
        return
    new = {"part": [b"3" * 9 * PAGE, b"4"], "whole": [b"5", b"4"]}
    saved = [b"1" * 9 * PAGE, b"0" * 9 * PAGE]
    assert get(store, [1, 0], "a") == new.get(change, saved)
    assert len(reads) == 2


def test_a_save_shares_its_files_and_keeps_what_is_cleared_after_it(
    store: SegmentStore, other: SegmentStore, tmp_path: Path
) -> None:
    put(store, [0, 1], a=[b"a" * 9 * PAGE, b"b" * 9 * PAGE])
    store.save(tmp_path / "saved")
    (only,) = (tmp_path / "saved" / SEGMENTS).iterdir()
    assert only.stat().st_nlink == 2
    store.clear([0])
    put(store, [1, 2], a=[b"new", b"more"])
    store.clear([1])
    other.load(tmp_path / "saved")
    assert get(store, [0, 1], "a") == [b"a" * 9 * PAGE, b"b" * 9 * PAGE]
    with pytest.raises(FieldError):
        get(store, [2], "a")


def test_a_save_on_another_file_system_is_a_copy(store: SegmentStore) -> None:
    shm = Path("/dev/shm")
    if store.folder.stat().st_dev == shm.stat().st_dev:
        pytest.skip("the folder of the tests is on /dev/shm")
    put(store, [0, 1], a=[b"a" * PAGE, b"b"])
    folder = shm / f"transfer-queue-test-{os.getpid()}"
    try:
        store.save(folder)
        store.clear([0, 1])
        assert not [one for one in store.folder.iterdir() if one.name.startswith("saving")]
        store.load(folder)
        assert get(store, [1, 0], "a") == [b"b", b"a" * PAGE]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("damage", ["log", "segment", "cut"])
def test_a_save_that_is_not_whole_is_refused(
    store: SegmentStore, tmp_path: Path, damage: str
) -> None:
    put(store, [0], a=[b"a"])
    saved = tmp_path / "saved"
    store.save(saved)
    if damage == "log":
        (saved / LOG).unlink()
    elif damage == "segment":
        (saved / SEGMENTS / "0").unlink()
    else:
        (saved / LOG).write_bytes((saved / LOG).read_bytes()[:-1])
    put(store, [0], a=[b"b"])
    with pytest.raises(CheckpointError, match="must hold a whole log and the segments"):
        store.load(saved)
    assert get(store, [0], "a") == [b"b"]


def test_a_segment_that_another_program_removed_is_an_error(store: SegmentStore) -> None:
    put(store, [0], a=[b"a"])
    (store.folder / SEGMENTS / "0").unlink()
    with pytest.raises(StoreError, match="must exist while its values are live"):
        get(store, [0], "a")


def test_a_closed_store_is_refused(store: SegmentStore) -> None:
    store.close()
    for call in (store.statistics, lambda: store.clear([0]), lambda: get(store, [0], "a")):
        with pytest.raises(StoreError, match="must be open"):
            call()


def test_what_is_flushed_is_flushed_before_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with SegmentStore(tmp_path, syncs=True) as store:
        flush = os.fsync

        def noted(call: Callable[..., Any], name: str) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                order.append(name)
                return call(*arguments, **options)

            return run

        monkeypatch.setattr(os, "fsync", noted(flush, "flush"))
        monkeypatch.setattr(os, "link", noted(os.link, "link"))
        monkeypatch.setattr(store, "_append", noted(store._append, "append"))
        put(store, [0], a=[b"a"])
    assert order == ["flush", "link", "flush", "append", "flush"]
