"""Ingest of arrays: npz, pickles, robomimic, RLlib; flags inside, the last observation, hostile
files.
"""

import base64
import json
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gear_support import run_command
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.data.ingest.decoding.array_pickles import load_pickle
from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.errors import DataError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"
Arrays = dict[str, Any]


def read(path: Path, **options: Any) -> list[Arrays]:
    """Return the episodes that a source is read as."""
    with open_source(path, **options) as reader:
        return [arrays for _, arrays in reader.episodes()]


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, **options)
    return str(caught.value).replace(f"{path}", "FILE")


def test_imitation_trajectories(tmp_path: Path) -> None:
    """A real file: its `terminal` is set at ends of both causes, and the time limit is
    500 steps.
    """
    source = EXAMPLES / "cartpole_expert.npz"
    assert (
        run_command(
            command, str(source), str(tmp_path / "out"), "--episode-length", "500", "--quiet"
        )
        == 0
    )
    dataset = Dataset.open(tmp_path / "out")
    with np.load(source) as file:
        bounds = [0, *file["indices"], len(file["acts"])]
        for i in range(57):
            low, high = bounds[i : i + 2]
            stored = dataset.trajectory(i)
            is_cut = high - low == 500
            np.testing.assert_array_equal(
                stored["observation"], file["obs"][low + i : high + i + 1]
            )
            np.testing.assert_array_equal(stored["action"], file["acts"][low:high])
            assert [stored["terminated"][-1], stored["truncated"][-1]] == [not is_cut, is_cut]
    assert len(dataset) == 57
    with open_source(source) as reader:
        assert [note[:12] for note in reader.notes] == ["infos: not a", "end flags ar"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rollouts_are_divided_by_their_flags(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Against a loop over the environments, for all ways in which ends and last observations are
    given.
    """
    steps, num, seed = (data.draw(st.integers(1, high)) for high in (12, 3, 99))
    flags = data.draw(st.sampled_from(["both", "done+truncated", "done+terminated", "truncated"]))
    last = data.draw(st.sampled_from(["next", "final", "more", "none"]))
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(steps + 1, num, 2))
    finals = rng.normal(size=(steps, num, 2))
    actions = rng.integers(0, 5, (steps, num))
    rewards = rng.normal(size=(steps, num))
    terminated, truncated = rng.random((2, steps, num)) < 0.2
    terminated &= flags != "truncated"
    truncated &= ~terminated
    ends = terminated | truncated
    arrays: Arrays = {"obs": states if last in ("final", "more") else states[:-1]}
    arrays |= {"actions": actions, "rewards": rewards}
    arrays |= {"terminated": terminated} if flags in ("both", "done+terminated") else {}
    arrays |= {"truncations": truncated} if flags in ("both", "done+truncated", "truncated") else {}
    arrays |= {"dones": ends} if flags.startswith("done") else {}
    if last == "next":
        arrays["next_obs"] = np.where(ends[..., None], finals, states[1:])
    if last == "final":
        arrays["final_observation"] = np.where(ends[..., None], finals, 0)
    expected = []
    for n in range(num):
        low = 0
        for t in range(steps):
            if not (ends[t, n] or t == steps - 1):
                continue
            high = t + 1
            is_end = bool(ends[t, n])
            after = finals[t, n] if is_end else states[t + 1, n]
            if last == "none" or (last == "more" and is_end):  # not known
                high -= not terminated[t, n]
                after = states[high, n] if not terminated[t, n] else states[t, n]
            rows = [*states[low:high, n], after]
            if high > low:
                expected.append(
                    (rows, actions[low:high, n], rewards[low:high, n], bool(terminated[t, n]))
                )
            low = t + 1
    path = npz(tmp_path_factory.mktemp("rollout") / "a.npz", **arrays)
    if num == 1:  # also without the axis of environments
        path = npz(path, **{key: array[:, 0] for key, array in arrays.items()})
    found = read(path)
    assert len(found) == len(expected)
    for episode, (rows, acts, gains, is_terminal) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(episode["observation"], rows)
        np.testing.assert_array_equal(episode["action"], acts)
        np.testing.assert_array_equal(episode["reward"], gains)
        kept = [False] * (len(acts) - 1)
        assert episode["terminated"].tolist() == [*kept, is_terminal]
        assert episode["truncated"].tolist() == [*kept, not is_terminal]


def ogbench(path: Path, lengths: tuple[int, ...], **more: Any) -> Path:
    """Write a file in the layout of OGBench: row i has the observation i and the action -i."""
    rows = np.arange(sum(lengths))
    ends = np.isin(rows + 1, np.cumsum(lengths))
    steps = {"observations": rows[:, None] * 1.0, "actions": -rows[:, None] * 1.0, "qpos": rows * 2}
    return npz(path, **steps, terminals=ends.astype(np.float32), **more)


def test_ogbench(tmp_path: Path) -> None:
    """The last row of a trajectory holds only an observation, and `terminals` no termination."""
    source = ogbench(tmp_path / "a.npz", (5, 5, 5))
    assert run_command(command, str(source), str(tmp_path / "out"), "--reward", "none") == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.lengths.tolist() == [4, 4, 4]
    for i in range(3):
        stored = dataset.trajectory(i)
        assert stored["observation"][:, 0].tolist() == [*range(5 * i, 5 * i + 5)]
        assert stored["action"][:, 0].tolist() == [*range(-5 * i, -5 * i - 4, -1)]
        assert stored["qpos"].tolist() == [*range(10 * i, 10 * i + 8, 2)]
        assert stored["terminated"].tolist() == [False] * 4
        assert stored["truncated"].tolist() == [False] * 3 + [True]
    note = "the last row of each episode is the observation after its last step"
    assert dataset.source["sources"][0]["notes"] == [note]
    assert refusal(source, episode_length=5).startswith("FILE: --episode-length must be for the")
    uneven = ogbench(tmp_path / "b.npz", (5, 3, 1))
    assert "--format ogbench reads an npz file whose terminals mark the last row" in refusal(uneven)
    with open_source(uneven, "ogbench") as reader:
        assert reader.notes == [note, "1 episodes of one row have no step: left out"]
        assert [len(arrays["action"]) for _, arrays in reader.episodes()] == [4, 2]
    rewarded = ogbench(tmp_path / "c.npz", (5, 5), rewards=np.zeros(10))
    assert "timeouts must be in the source" in refusal(rewarded)  # not recognised as OGBench


def test_terminals_that_are_time_limits_are_refused(tmp_path: Path) -> None:
    """Terminal flags that mark all ends of `--episode-length`, and no others."""
    source = ogbench(tmp_path / "a.npz", (5, 5, 5), rewards=np.zeros(15))
    with pytest.raises(DataError) as caught:
        run_command(command, str(source), str(tmp_path / "out"), "--episode-length", "5")
    assert str(caught.value).startswith(
        f"{source}: terminals must not mark all ends after 5 steps and no others: these are time "
        "limits, got '3 such ends'; --rename terminals=dones names flags of any end; --last-step "
        "observation (or --format ogbench) is for trajectories whose last row holds only"
    )
    for lengths, ends in (((5, 3, 5), [1, 1, 1]), ((5, 5, 4), [1, 1, 1])):
        one = ogbench(tmp_path / "b.npz", lengths, rewards=np.zeros(sum(lengths)))
        assert [int(e["terminated"][-1]) for e in read(one, episode_length=5)] == ends
    assert [len(e["action"]) for e in read(source, episode_length=6)] == [5, 5, 5]


def test_flags_one_row_after_the_limit_are_refused(tmp_path: Path) -> None:
    """The rows of 4 steps and a last observation: a limit of 4 would make single steps of these."""
    source = ogbench(tmp_path / "a.npz", (5, 5, 5), rewards=np.zeros(15))
    assert refusal(source, episode_length=4).startswith(
        "FILE: --episode-length 4 must come with --last-step where a source has 5 rows for each "
        "episode, got '15 rows'; --rename terminals=dones --last-step action: a row has the action"
    )
    options: dict[str, Any] = {"episode_length": 4, "rename": {"terminals": "dones"}}
    found = read(source, last_step="observation", **options)
    assert [e["action"][:, 0].tolist() for e in found] == [
        [0, -1, -2, -3],
        [-5, -6, -7, -8],
        [-10, -11, -12, -13],
    ]
    assert not any(e["terminated"].any() for e in found)
    assert all(e["truncated"].tolist() == [False] * 3 + [True] for e in found)
    given = read(source, episode_length=4, last_step="transition")
    assert [int(e["terminated"][-1]) for e in given] == [0, 1] * 3
    assert refusal(source, **options).startswith("FILE: --episode-length 4 must come with")
    for lengths in ((5, 5, 4), (5, 6), (10, 5)):
        one = ogbench(tmp_path / "b.npz", lengths, rewards=np.zeros(sum(lengths)))
        assert sum(int(e["terminated"][-1]) for e in read(one, episode_length=4)) == len(lengths)


def test_other_arrays_of_steps(tmp_path: Path, d4rl: Callable[..., Any]) -> None:
    """Stable-Baselines' recordings, next observations after a reset, D4RL without timeouts."""
    starts = np.array([1, 0, 0, 1, 0], bool)
    steps: Arrays = {
        "obs": np.arange(5.0)[:, None],
        "actions": np.arange(5)[:, None],
        "rewards": np.ones(5),
    }
    path = npz(
        tmp_path / "a.npz", **steps, episode_starts=starts, episode_returns=np.array([3.0, 2.0])
    )
    assert [e["terminated"].tolist() for e in read(path)] == [[False, False, True], [False, True]]
    found = read(npz(path, **steps, episode_starts=starts), episode_length=3)  # the last may go on
    assert [(len(e["reward"]), bool(e["truncated"][-1])) for e in found] == [(2, True), (1, True)]
    assert found[1]["observation"].tolist() == [[3.0], [4.0]]
    states = np.arange(7.0)[:, None]
    ends = np.array([0, 1, 0, 0, 1, 0], bool)
    arrays: Arrays = {
        "observations": states[:-1],
        "next_observations": states[1:],
        "actions": np.ones(6),
    }
    with open_source(
        npz(path, **arrays, terminals=ends & (np.arange(6) < 2), timeouts=ends)
    ) as reader:
        assert (
            "next observations at ends are those of the next episodes: not used there"
            in reader.notes
        )
        rows = [episode["observation"][:, 0].tolist() for _, episode in reader.episodes()]
    assert rows == [[0, 1, 1], [2, 3, 4], [5, 6]]
    d4rl(tmp_path / "a.hdf5", (5, 2, 3), ("terminals", "terminals", ""), timeouts=None)
    flags = [
        (len(e["reward"]), e["terminated"][-1], e["truncated"][-1])
        for e in read(tmp_path / "a.hdf5", episode_length=2)
    ]
    assert flags == [(2, 0, 1), (2, 0, 1), (1, 1, 0), (2, 1, 0), (2, 0, 1), (1, 0, 1)]
    assert (
        refusal(tmp_path / "a.hdf5", mask="x")
        == "FILE: --mask must be for the format robomimic, got 'd4rl'; leave it out for this format"
    )


@dataclass(frozen=True)
class Trajectory:
    """As imitation's."""

    obs: np.ndarray
    acts: np.ndarray
    infos: Any
    terminal: bool


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """Of NumPy 1 and 2, of dicts and of imitation's class."""
    rng = np.random.default_rng(protocol)
    path = tmp_path / "a.pkl"
    obs = rng.normal(size=(4, 2))
    acts = np.asfortranarray(rng.integers(0, 9, (3, 2)).astype(">i4"))
    part = {
        "obs": obs,
        "acts": acts,
        "rews": [np.float32(1), 2, 3],
        "env": "door",
        "terminal": np.bool_(1),
    }
    content = pickle.dumps([part, part], protocol)
    imitation = types.ModuleType("imitation.data.types")
    for name in ("imitation", "imitation.data", "imitation.data.types"):
        monkeypatch.setitem(sys.modules, name, imitation)
    imitation.Trajectory = Trajectory  # type: ignore[attr-defined]
    monkeypatch.setattr(Trajectory, "__module__", "imitation.data.types")
    objects = pickle.dumps([Trajectory(obs, acts, None, True)] * 2, protocol)
    earlier = content.replace(b"numpy._core", b"numpy.core")
    for name in (b"numpy.core.multiarray", b"numpy.core.numeric") if protocol > 3 else ():
        earlier = earlier.replace(bytes([len(name) + 1]) + name, bytes([len(name)]) + name)
    earlier = earlier[:2] + earlier[11:] if protocol > 3 else earlier  # without the frame's length
    for made, has_reward in ((content, True), (earlier, True), (objects, False)):
        path.write_bytes(made)
        found = read(path, allow_pickle=True, columns=[])
        assert len(found) == 2
        for episode in found:
            np.testing.assert_array_equal(episode["observation"], obs)
            np.testing.assert_array_equal(episode["action"], acts)
            assert episode["terminated"].tolist() == [False, False, True]
            assert ("reward" in episode) == has_reward
    assert "--allow-pickle reads the arrays in it" in refusal(path)
    path.write_bytes(pickle.dumps([part, {**part, "more": np.zeros(3)}], protocol))
    assert refusal(path, allow_pickle=True).startswith(
        "FILE: trajectory 1: more must be in every trajectory"
    )


class Runs:
    def __reduce__(self) -> Any:
        return (eval, ("1 / 0",))


def test_hostile_pickles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    deep: Any = [0.0] * 10
    for _ in range(9):
        deep = [deep] * 10
    cases = [
        (pickle.dumps([Runs()]), "builtins.eval"),
        (b"\x80\x04cos\nsystem\n.", "os.system"),
        (b"\x80\x04cnumpy\nload\n.", "numpy.load"),
        (
            b"\x80\x04]r" + struct.pack("<I", 2**31 - 1) + b".",
            "at least one step",
        ),  # memo of 32 GiB
        (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".", "only"),  # a bytearray of 1 TiB
        (pickle.dumps([{"obs": deep, "acts": deep}]), "must hold at most 100 bytes for each"),
        (pickle.dumps([{"obs": np.zeros(9)}])[:-40], "only"),
        (pickle.dumps(3), "must be a dict of arrays, got 'int'"),
    ]
    for size in (2**40, -1):
        old, new = (pickle.dumps((n,), 2)[2:-3] for n in (1, size))
        cases.append(
            (
                pickle.dumps(np.zeros(1), 2).replace(b"K\1" + old, b"K\1" + new),
                f"of shape ({size},)",
            )
        )
    for content, text in cases:
        path.write_bytes(content)
        assert text in refusal(path, allow_pickle=True), content[:40]


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _kind(spec: str) -> bytes:
    return _name("numpy", "dtype") + b"\x8c" + bytes([len(spec)]) + spec.encode() + b"\x85R"


def _state(spec: str, size: int, content: bytes) -> bytes:
    return b"(K\x01K" + bytes([size]) + b"\x85" + _kind(spec) + b"\x89" + content + b"t"


def _viewed(array: bytes) -> bytes:
    """A view of what `array` pushes, as unsigned numbers."""
    return (
        _name("numpy.core.numeric", "_frombuffer")
        + b"("
        + array
        + _kind("u8")
        + b"K\x01\x85\x8c\x01CtR"
    )


EMPTY = (
    _name("numpy.core.multiarray", "_reconstruct")
    + _name("numpy", "ndarray")
    + b"K\x00\x85C\x01b\x87R"
)
BYTES = _state("u8", 1, b"C\x08" + bytes(8))
TRAJECTORY = _name("imitation.data.types", "Trajectory") + b")\x81"
# Opcodes that could reach memory, or objects of other kinds: what the pickle holds, and how it is
# refused.
LED_ASTRAY = {
    "a view of an array of objects": (
        EMPTY + _state("O", 1, b"](Ne") + b"bq\x010" + _viewed(b"h\x01"),
        "an array of",
    ),
    "a view of an array": (EMPTY + BYTES + b"bq\x010" + _viewed(b"h\x01"), "an array of uint64"),
    "a view of an empty array": (EMPTY + b"q\x010" + _viewed(b"h\x01"), "an array of uint64"),
    "a second state": (EMPTY + BYTES + b"b" + BYTES + b"b", "a state of ndarray"),
    "a second state by the memo": (
        EMPTY + b"q\x01" + BYTES + b"b0h\x01" + BYTES + b"b",
        "a state of ndarray",
    ),
    "a second state of a copy": (
        EMPTY + b"2" + BYTES + b"b0" + BYTES + b"b",
        "a state of _Pending",
    ),
    "no state": (EMPTY, "a value _Pending"),
    "an array that holds itself": (
        EMPTY + b"q\x01" + _state("O", 1, b"](h\x01e") + b"b",
        "a value _Pending",
    ),
    "an item of an array": (EMPTY + BYTES + b"bK\x00K\x01s", "an item of a ndarray"),
    "items of an array": (EMPTY + BYTES + b"b(K\x00K\x01u", "an item of a ndarray"),
    "an item of a new array": (EMPTY + b"K\x00K\x01s", "an item of a _Pending"),
    "an append to an array": (EMPTY + BYTES + b"bNa", "an item of a ndarray"),
    "appends to a bytearray": (
        b"\x96" + struct.pack("<Q", 1) + b"x(K\x01e",
        "an item of a bytearray",
    ),
    "appends to a tuple": (b")(Ne", "an item of a tuple"),
    "adds to a dict": (b"}(N\x90", "an item of a dict"),
    "a state of a dict": (b"}}b", "a state of dict"),
    "a state of a dtype twice": (
        _kind("f8") + b"(K\x03\x8c\x01<NNNJ\xff\xff\xff\xfftq\x01bh\x01b",
        "a state of a dtype",
    ),
    "fields of a dtype": (_kind("f8") + b"(K\x03\x8c\x01<N)NtbN", "a dtype with fields"),
    "methods of a record": (TRAJECTORY + b"}K\x01Nsb", "a state of a Trajectory, dict"),
    "a second state of a record": (TRAJECTORY + b"}b}b", "a state of dict"),
    "a scalar of an object": (
        _name("numpy.core.multiarray", "scalar") + _kind("O") + b"C\x08" + bytes(8) + b"\x86R",
        "an array of object made of bytes",
    ),
    "an array of a class": (
        EMPTY.replace(_name("numpy", "ndarray"), _name("builtins", "list")),
        "of the class builtins.list",
    ),
    "an encoding": (
        _name("_codecs", "encode") + b"\x8c\x01x\x8c\x05rot13\x86R",
        "in the encoding 'rot13'",
    ),
    "bytes to encode": (
        _name("_codecs", "encode") + b"C\x01x\x8c\x06latin1\x86R",
        "in the encoding 'latin1'",
    ),
    "a factory": (_name("collections", "defaultdict") + b"\x8c\x01x\x85R", "a defaultdict of str"),
    "a call of an argument": (_name("builtins", "dict") + b")R", "a call of builtins.dict"),
    "a call of a value": (b"])R", "a call of list"),
    "a global as a value": (_name("builtins", "list"), "a value builtins.list"),
    "a dtype as a value": (_kind("f8"), "a value _Dtype"),
    "a new array": (_name("numpy", "ndarray") + b"K\x00\x85\x85\x81", "a call of numpy.ndarray"),
    "a new dtype": (_name("numpy", "dtype") + b"\x8c\x01O\x85\x81", "an object of numpy.dtype"),
    "an old class": (b"(inumpy\nndarray\n", "the opcode INST"),
    "an object": (b"(" + _name("numpy", "ndarray") + b"o", "the opcode OBJ"),
    "keywords": (TRAJECTORY[:-2] + b")}\x92", "the opcode NEWOBJ_EX"),
    "a persistent id": (b"NQ", "the opcode BINPERSID"),
    "an extension": (b"\x82\x01", "the opcode EXT1"),
    "a read-only view": (EMPTY + BYTES + b"b\x98", "the opcode READONLY_BUFFER"),
    "an outer buffer": (b"\x97", "the opcode NEXT_BUFFER"),
    "a deep key": (b"}" + b")" + b"\x85" * 100_000 + b"Ns", "a key tuple"),
    "a deep member": (b"\x8f(" + b")" + b"\x85" * 100_000 + b"\x90", "a key tuple"),
    "a large dtype": (
        EMPTY + _state("U999999", 1, b"C\x00") + b"b",
        "an array of shape (1,) with 0 bytes",
    ),
    "rows without values": (
        EMPTY + b"(K\x01J\xff\xff\xff\x7fK\x00\x86" + _kind("u8") + b"\x89C\x00tb",
        "at most 100 bytes",
    ),
    "a false size": (
        EMPTY + _state("u8", 2, b"C\x08" + bytes(8)) + b"b",
        "an array of shape (2,) with 8 bytes",
    ),
    "code points": (
        EMPTY + _state("U1", 1, b"C\x04" + b"\xff" * 4) + b"b",
        "a text that is not Unicode",
    ),
    "too few values": (b"0", "a stack without a mark"),
    "bytes that are shared": (
        b"](B"
        + struct.pack("<I", 1 << 20)
        + bytes(1 << 20)
        + b"q\x010"
        + b"".join(
            EMPTY + b"(K\x01J\x00\x00\x10\x00\x85" + _kind("u1") + b"\x89h\x01tb"
            for _ in range(130)
        )
        + b"e",
        "at most 100 bytes",
    ),
}


@pytest.mark.parametrize("case", LED_ASTRAY)
def test_no_opcode_reaches_memory_or_other_objects(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr("deepspeed_gear.data.ingest.source_checks.FLOOR_BYTES", 1 << 20)
    content, text = LED_ASTRAY[case]
    with pytest.raises(DataError) as caught:
        load_pickle("it", b"\x80\x04" + content + b".", Expansion(), len(content))
    assert text in str(caught.value)


def test_arrays_of_pickles_are_ordinary_ones() -> None:
    """Shared and nested ones too, each with its own memory, which may be written."""
    shared = np.arange(6.0).reshape(2, 3)
    given = {
        "a": [shared, shared],
        "objects": np.array([shared, None, "text", [1]], object),
        "flags": np.array([True, False]),
        "text": np.array(["ab", "c"]),
        "scalar": np.float32(2),
        "ordered": OrderedDict(a=1, b=(2, 3)),
        "of lists": defaultdict(list, {1: [2]}),
        "big": np.arange(4, dtype=">i2").reshape(2, 2).T,
    }
    for protocol in range(2, 6):
        content = pickle.dumps(given, protocol)
        found = load_pickle("it", content, Expansion(), len(content))
        assert found["a"][0] is found["a"][1]
        for value in (found["a"][0], found["flags"], found["text"], found["objects"], found["big"]):
            assert type(value) is np.ndarray
            assert value.flags.writeable
        np.testing.assert_array_equal(found["objects"][0], shared)
        assert [*found["objects"][1:]] == [None, "text", [1]]
        assert found["text"].tolist() == ["ab", "c"]
        assert (found["scalar"], type(found["scalar"])) == (2, np.float32)
        assert (found["ordered"], found["of lists"]) == ({"a": 1, "b": (2, 3)}, {1: [2]})
        np.testing.assert_array_equal(found["big"], given["big"])


def test_hostile_npz_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_gear.data.ingest.source_checks.FLOOR_BYTES", 1 << 20)
    path = tmp_path / "a.npz"
    good: Arrays = {"obs": np.zeros((3, 2)), "actions": np.zeros(2), "dones": np.array([0, 1])}

    def entry(content: bytes, kind: int = zipfile.ZIP_DEFLATED) -> str:
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("obs.npy", content)
        return refusal(path)

    def header(shape: str) -> bytes:
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16)

    for shape in ("(-2,)", "(1000000000000,)", "(3,)"):
        assert "FILE: obs must have the size of its entry in the archive, 16 bytes" in entry(
            header(shape)
        )
    assert "must be stored or deflated" in entry(header("(2,)"), zipfile.ZIP_BZIP2)
    assert "must hold at most 100 bytes" in entry(bytes(2 << 20))
    assert "must be a readable npz file" in entry(b"no array")
    objects = np.array([np.zeros((3, 2)), np.zeros((5, 2))], object)
    path = npz(path, obs=objects, acts=np.array([np.ones(2), np.ones(4)], object))
    assert refusal(path).startswith(
        "FILE: obs must not be Python objects, got 'object'; --allow-pickle"
    )
    assert [len(episode["action"]) for episode in read(path, allow_pickle=True)] == [2, 4]
    terminals = npz(path, obs=np.zeros((2, 1)), actions=np.zeros(2), terminals=np.zeros(2))
    assert "timeouts must be in the source" in refusal(terminals)
    longer = npz(path, **{**good, "obs": np.zeros(7)})
    assert "FILE: obs must have 2 rows as actions has, got 7" in refusal(longer)
    bad = {**good, "terminal": good.pop("dones")}
    assert "indices must rise" in refusal(npz(path, **bad, indices=np.array([-1])))


def test_robomimic(tmp_path: Path) -> None:
    """Demonstrations in numerical order; `dones` inside end nothing; observations of
    several parts.
    """
    path = tmp_path / "a.hdf5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_name": "Lift"})
        for number, length in ((0, 4), (2, 1), (10, 7)):
            states = rng.normal(size=(length + 1, 3))
            dones = np.arange(length) >= length - 2
            parts = {
                "actions": rng.normal(size=(length, 2)),
                "dones": dones.astype(int),
                "rewards": dones * 1.0,
            }
            parts |= {"obs/pos": states[:-1], "next_obs/pos": states[1:], "states": states[:-1]}
            parts |= {
                f"{key}/image": np.full((length, 4, 4, 3), 9, np.uint8)
                for key in ("obs", "next_obs")
            }
            for key, array in parts.items():
                file[f"data/demo_{number}/{key}"] = array
        file["mask/train"] = np.array([b"demo_10", b"demo_0"])
        file["mask/gone"] = np.array([b"demo_7"])
    for mask, numbers in ((None, (0, 2, 10)), ("train", (0, 10))):
        dataset = ingest([open_source(path, mask=mask)], tmp_path / f"{mask}")
        source = dataset.source["sources"][0]
        assert [source[key] for key in ("env_args", "masks", "mask")] == [
            {"env_name": "Lift"},
            ["gone", "train"],
            mask,
        ]
        assert "dones before the last step of 2 demonstrations end nothing" in source["notes"]
        with h5py.File(path) as file:
            for i, number in enumerate(numbers):
                stored = dataset.trajectory(i)
                group = file[f"data/demo_{number}"]
                rows = [*group["obs/pos"], group["next_obs/pos"][-1]]
                np.testing.assert_array_equal(stored["observation.pos"], rows)
                np.testing.assert_array_equal(stored["action"], group["actions"])
                assert stored["observation.image"].shape == (len(rows), 4, 4, 3)
                assert stored["terminated"].tolist() == [False] * (len(rows) - 2) + [True]
    assert "--mask must be a filter of the file, got 'trian'; did you mean" in refusal(
        path, mask="trian"
    )
    assert "mask/gone must name demonstrations of the file, got ['demo_7']" in refusal(
        path, mask="gone"
    )


@pytest.mark.parametrize("is_packed", [False, True])
def test_rllib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool) -> None:
    """Three episodes, interleaved and cut over lines and files; one does not end."""
    frame = pytest.importorskip("lz4.frame") if is_packed else None

    def pack(value: Any) -> Any:
        return (
            base64.b64encode(frame.compress(pickle.dumps(value, 5))).decode()
            if frame
            else value.tolist()
        )

    rng = np.random.default_rng(1)
    folder = tmp_path / "out"
    truth = {
        episode: rng.normal(size=(length + 1, 2)) for episode, length in ((7, 5), (8, 1), (9, 4))
    }
    rows = sorted((t, episode) for episode, states in truth.items() for t in range(len(states) - 1))
    folder.mkdir()
    for number, part in enumerate((rows[:4], rows[4:5], rows[5:])):
        obs, new = (np.array([truth[episode][t + more] for t, episode in part]) for more in (0, 1))
        ends = [t == len(truth[episode]) - 2 and episode != 9 for t, episode in part]
        times, episodes = zip(*part, strict=True)
        batch = {
            "type": "SampleBatch",
            "obs": pack(obs),
            "new_obs": pack(new),
            "actions": times,
            "t": times,
        }
        batch |= {
            "rewards": [1.0] * len(part),
            "terminateds": ends,
            "truncateds": [False] * len(part),
        }
        batch |= {"eps_id": episodes, "agent_index": [0] * len(part), "infos": [{}] * len(part)}
        with (folder / f"output-{number // 2}.json").open("a") as file:
            file.write(json.dumps(batch) + "\n")
    found = read(folder, allow_pickle=is_packed or None)
    for episode, states in zip(found, truth.values(), strict=True):
        np.testing.assert_array_equal(episode["observation"], states)
        assert episode["action"].tolist() == list(range(len(states) - 1))
        assert set(episode) == {"observation", "action", "reward", "terminated", "truncated"}
    assert [bool(episode["truncated"][-1]) for episode in found] == [False, False, True]
    (folder / "output-2.json").write_bytes((folder / "output-0.json").read_bytes())
    assert "t must not repeat, got 0" in refusal(folder, allow_pickle=is_packed or None)
    monkeypatch.setattr("deepspeed_gear.data.ingest.source_checks.FLOOR_BYTES", 1 << 20)
    path = tmp_path / "a.json"
    columns = {"actions": [1]}
    policies = {key: value for key, value in batch.items() if key != "type"}
    path.write_text(
        json.dumps({"type": "MultiAgentBatch", "policy_batches": {"a": policies, "b": policies}})
    )
    assert len(read(path, allow_pickle=True)) == 4
    refused = [([1, 2], "must have as many rows in each column"), ("QQ==", "must be")]
    if frame:
        bomb = base64.b64encode(frame.compress(bytes(2 << 20))).decode()
        refused += [(bomb, "must hold at most 100 bytes for each"), (pack(Runs()), "builtins.eval")]
        refused += [(pack(np.zeros(3))[:-8], "must be base64 of an LZ4 frame")]
    for value, error in refused:
        path.write_text(json.dumps({"type": "SampleBatch", "obs": value, **columns}))
        assert error in refusal(path, allow_pickle=True)
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    path.write_text(json.dumps({"type": "SampleBatch", "obs": "QQ==", **columns}))
    assert "must be decompressed by LZ4; pip install lz4" in refusal(path, allow_pickle=True)
    assert "obs must not be a pickle, as compressed columns are" in refusal(path)
    path.write_text('{"type": "SampleBatch", "obs": [1]')
    assert "line 1 must be the JSON of a SampleBatch" in refusal(path)
