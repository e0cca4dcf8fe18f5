"""Ingest of tables: episodes, steps and conversations, in files and from a program."""

import gzip
import json
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gear_support import run_command
from ingest_refusals import refused

from deepspeed_gear import Column, Dataset, Schema
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import ConfigError, DataError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"
LENGTHS = (3, 7, 1, 33)


def episodes() -> list[dict[str, Any]]:
    """Rows of four episodes with nested observations; the second one has no end."""
    random = np.random.default_rng(0)
    return [
        {
            "obs": {"pos": random.random((n + 1, 2)).tolist(), "sign": [0] * n + [n]},
            "actions": random.random((n, 1, 3)).tolist(),
            "reward": random.random(n).tolist(),
            "done": n != 7,
            "goal": [1.0, n],
            "task": "ä" * n,
            "plan": [[1], list(range(n))] if n != 2 else None,
        }
        for n in LENGTHS
    ]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_arrow(path: Path, table: Any, **options: Any) -> Path:
    form = arrow.ipc.new_stream if path.name.startswith("stream") else arrow.ipc.new_file
    with form(str(path), table.schema, options=arrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=3)
    return path


def test_every_form_gives_the_same_data_set(tmp_path: Path) -> None:
    rows = episodes()
    table = arrow.Table.from_pylist(rows)
    lines = write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=2)
    write_arrow(tmp_path / "e.arrow", table, compression="zstd")
    write_arrow(tmp_path / "stream.arrow", table)
    (tmp_path / "shards").mkdir()
    for i in range(2):
        parquet.write_table(table.slice(2 * i, 2), tmp_path / "shards" / f"{i}.parquet")
    sources = [path for path in sorted(tmp_path.iterdir()) if path.name != "out"]
    sets = [ingest([source], tmp_path / "out", overwrite=True) for source in sources]
    sets.append(Dataset.from_iterable(iter(rows), tmp_path / "out", overwrite=True))
    assert len(sets) == 8
    assert len({data.fingerprint for data in sets}) == 1
    data = sets[-1]
    assert [(c.name, c.dtype, c.shape, c.role, c.rows) for c in data.schema][:-2] == [
        ("observation.pos", "float64", (2,), "observation", "T+1"),
        ("observation.sign", "int64", (), "observation", "T+1"),
        ("action", "float64", (1, 3), "action", "T"),
        ("reward", "float64", (), "reward", "T"),
        ("terminated", "bool", (), "terminated", "T"),
        ("truncated", "bool", (), "truncated", "T"),
        ("goal", "float64", (2,), "other", "1"),
        ("task", "bytes", (4 + 66,), "other", "1"),
        ("plan", "json", (4 + 96,), "other", "1"),
    ]
    for number, row in enumerate(rows):
        stored = data.trajectory(number)
        ends = row["done"]
        np.testing.assert_array_equal(stored["observation.pos"], row["obs"]["pos"])
        np.testing.assert_array_equal(stored["action"], row["actions"])
        assert (stored["task"].decode(), stored["plan"]) == (row["task"], row["plan"])
        assert (stored["terminated"].tolist()[-1], stored["truncated"].tolist()[-1]) == (
            ends,
            not ends,
        )
        assert stored["terminated"].sum() + stored["truncated"].sum() == 1
        assert stored["return"] == np.sum(row["reward"])


def test_several_tables_have_room_for_the_longest_text(tmp_path: Path) -> None:
    """Also where one is added to a data set whose texts are longer; longer ones than it has do not
    fit.
    """
    for name, text in (("a", "12"), ("b", "1234"), ("c", "123456")):
        write_lines(tmp_path / f"{name}.jsonl", [{"action": [1], "reward": [1], "task": text}])
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    data = ingest([a, b], tmp_path / "out")
    assert data.schema["task"].max_bytes == 4
    data = ingest([a], tmp_path / "out", append=True)
    assert [data.trajectory(i)["task"] for i in range(3)] == [b"12", b"1234", b"12"]
    with pytest.raises(DataError, match="column task must have at most max_bytes = 4 bytes, got 6"):
        ingest([c], tmp_path / "out", append=True)
    assert len(Dataset.open(tmp_path / "out")) == 3


def test_episode_ids_of_several_tables_stand_for_one_episode_each(tmp_path: Path) -> None:
    """Shards of one data set keep their ids; appending gives what one ingest gives."""
    ids = {"a": [0, 1, 2], "b": [1, 0], "c": [7, 3], "d": [5, 9]}
    for name, numbers in ids.items():
        rows = [
            {"episode_index": n, "reward": 1.0, "action": [n, n]} for n in numbers for _ in "12"
        ]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    sources = [tmp_path / f"{name}.jsonl" for name in ids]
    data = ingest(sources, tmp_path / "out")
    assert data.columns["episode_index"].tolist() == [0, 1, 2, 3, 4, 7, 5, 6, 9]
    grown = ingest(sources[:1], tmp_path / "grown")
    for source in sources[1:]:
        grown = ingest([source], tmp_path / "grown", append=True)
    assert grown.fingerprint == data.fingerprint


def test_episode_ids_that_a_dtype_has_no_free_number_for_are_refused(tmp_path: Path) -> None:
    steps = {"reward": np.ones(400, np.float32), "action": np.ones(400, np.float32)}
    ids = np.arange(200, dtype=np.uint8).repeat(2)
    sources = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for source in sources:
        parquet.write_table(arrow.table({"episode_index": ids, **steps}), source)
    refused = "b.parquet: episode 56: episode_index must have a free number.*256 in place of 56"
    with pytest.raises(DataError, match=refused):
        run_command(command, *sources, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    for options in (["--columns", "!episode_index"], ["--dtype", "episode_index=int64"]):
        given = [*sources, str(tmp_path / "out"), "--overwrite", *options]
        assert run_command(command, *given) == 0
        assert len(Dataset.open(tmp_path / "out")) == 400


def test_groups_that_a_dtype_has_no_free_number_for_are_refused(tmp_path: Path) -> None:
    rows = {"tokens": [[1, 2]] * 100, "loss_mask": [[0, 1]] * 100, "reward": [1.0] * 100}
    sources = [str(tmp_path / f"{name}.parquet") for name in "ab"]
    for source in sources:
        parquet.write_table(arrow.table({"prompt_id": range(100), **rows}), source)
    given = [*sources, str(tmp_path / "out"), "--group-scope", "file"]
    refused = "b.parquet: row 28: prompt_id must have a free number.*128 in place of 28.*--dtype"
    with pytest.raises(DataError, match=refused):
        run_command(command, *given, "--dtype", "prompt_id=int8")
    assert not (tmp_path / "out").exists()
    assert run_command(command, *given, "--dtype", "prompt_id=int64") == 0
    assert Dataset.open(tmp_path / "out").columns["prompt_id"].tolist() == [*range(200)]


def step_rows() -> Iterator[dict[str, Any]]:
    for number, row in enumerate(episodes()):
        for step in range(LENGTHS[number]):
            yield {
                "episode_index": number,
                "state": row["obs"]["pos"][step],
                "reward": row["reward"][step],
                "dones": step + 1 == LENGTHS[number],
                "timeouts": step + 1 == LENGTHS[number] == 7,
                "task": row["task"],
            }


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_steps_become_episodes_by_their_id_or_their_flags(tmp_path: Path, form: str) -> None:
    """In blocks of any size; a done step that is also a timeout does not terminate."""
    rows = list(step_rows())
    sets = []
    for left_out in ("", "episode_index"):
        given = [{name: value for name, value in row.items() if name != left_out} for row in rows]
        path = write_lines(tmp_path / "a.jsonl", given)
        if form == "parquet":
            path = tmp_path / "a.parquet"
            parquet.write_table(arrow.Table.from_pylist(given), path, row_group_size=5)
        role = {"state": "observation"}
        sets.append(ingest([path], tmp_path / f"out{left_out}", role=role))
    assert sets[0].schema["state"] == Column("state", "float64", (2,), "observation")
    assert sets[0].schema["episode_index"] == Column("episode_index", "int64", rows="1")
    for data in sets:
        assert data.lengths.tolist() == list(LENGTHS)
        assert np.flatnonzero(data.columns["truncated"]).tolist() == [9]
        assert np.flatnonzero(data.columns["terminated"]).tolist() == [2, 10, 43]
        assert data.trajectory(1)["task"].decode() == "ä" * 7
        np.testing.assert_array_equal(data.columns["state"], [row["state"] for row in rows])
    named = open_source(
        write_lines(tmp_path / "b.jsonl", rows), episode_id="task", columns=["state"]
    )
    assert [*(column.name for column in named.columns)] == [
        "reward",
        "terminated",
        "truncated",
        "state",
    ]


LAYOUTS = {  # of the tokens 5 and 6, and a response of 1 and 2
    "flat": '{"input_ids": [5, 6, 1, 2], "labels": [-100, -100, 1, 2], "logprobs": [0, 0, -1, -2]}',
    "TRL": '{"prompt_ids": [5, 6], "completion_ids": [1, 2], "logprobs": [-1, -2]}',
    "verl": """{"prompts": [0, 5, 6], "responses": [1, 2, 0], "input_ids": [0, 5, 6, 1, 2, 0],
        "attention_mask": [0, 1, 1, 1, 1, 0], "response_mask": [1, 1, 0],
        "rollout_log_probs": [-1, -2, 9]}""",
    "NeMo-RL": """{"token_ids": [[5, 6, 1, 2, 0]], "input_lengths": [4], "sample_loss_mask": [1.0],
        "token_loss_mask": [[0, 0, 1, 1, 0]], "generation_logprobs": [[0, 0, -1, -2, 0]]}""",
    "messages": """{"message_log": [{"role": "assistant", "token_ids": [5]},
        {"role": "user", "token_ids": [6]},
        {"role": "assistant", "token_ids": [1, 2], "generation_logprobs": [-1, -2]}]}""",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_rollouts(tmp_path: Path, layout: str) -> None:
    """Each is the same prompt, response, log-probabilities, reward and group, in a line
    or a table.
    """
    row = json.loads(LAYOUTS[layout])
    rows = [{**row, "score": score, "uid": uid} for score, uid in ((1, "b"), (0, "a"), (0.5, "b"))]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"):
        data = ingest([path], tmp_path / "out", overwrite=True)
        assert [(c.name, c.dtype, c.role, c.rows) for c in data.schema][:5] == [
            ("tokens", "int32", "token", "T"),
            ("loss_mask", "bool", "loss_mask", "T"),
            ("logp", "float32", "other", "T"),
            ("reward", "float32", "other", "1"),
            ("prompt_id", "int64", "other", "1"),
        ]
        assert data.columns["tokens"].tolist() == [5, 6, 1, 2] * 3
        assert data.columns["loss_mask"].tolist() == [False, False, True, True] * 3
        assert data.columns["logp"].tolist() == [0, 0, -1, -2] * 3
        assert data.columns["reward"].tolist() == [1, 0, 0.5]
        ids = data.columns["prompt_id"].tolist()
        assert ids[0] == ids[2] != ids[1]
    other = write_lines(
        tmp_path / "b.jsonl", [{**row, "score": 0, "uid": "a"}]
    )  # a text is one group in all
    assert ingest([path, other], tmp_path / "both").columns["prompt_id"].tolist() == [*ids, ids[1]]


def write_dump(path: Path, groups: list[Any]) -> Path:
    tokens = {"token_ids": [1, 2], "token_loss_mask": [0, 1]}
    path.parent.mkdir(exist_ok=True)
    return write_lines(path, [{**tokens, "group_id": one, "reward": 0} for one in groups])


def test_group_numbers_that_files_count_anew_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files given one by one, in a folder, and appended; numbers, and texts of them."""
    given: list[list[Any]] = [[0, 0, 1, 1], [1, 1, "0", 7], [2, 0]]
    files = [write_dump(tmp_path / "dumps" / f"{i}.jsonl", one) for i, one in enumerate(given)]
    apart = [0, 0, 1, 1, 2, 2, 3, 7, 4, 5]

    def run(sources: list[Path], *options: str) -> list[int]:
        paths = map(str, sources)
        assert run_command(command, *paths, str(tmp_path / "out"), "--quiet", *options) == 0
        return list(Dataset.open(tmp_path / "out").columns["prompt_id"].tolist())

    rule = "must not be the number of a group in an earlier file, got 1; --group-scope file: they"
    for sources, place in (
        (files, "1.jsonl: row 0"),
        ([tmp_path / "dumps"], "dumps: 1.jsonl: row 0"),
    ):
        with pytest.raises(DataError, match=f"{place}: prompt_id {rule}"):
            run(sources)
        assert os.listdir(tmp_path) == ["dumps"]
        with pytest.raises(DataError, match="must not be the number of a group in an earlier file"):
            ingest(sources, tmp_path / "out")
        assert run(sources, "--group-scope", "all", "--overwrite") == [0, 0, 1, 1, 1, 1, 0, 7, 2, 0]
        assert run(sources, "--group-scope", "file", "--overwrite") == apart
        shutil.rmtree(tmp_path / "out")
    whole = ingest(files, tmp_path / "out", group_scope="file")
    assert run(files[:1], "--overwrite") == [0, 0, 1, 1]
    with pytest.raises(
        DataError, match="must not be the number of a group in an earlier file, got 1"
    ):
        run(files[1:], "--append")
    assert run(files[1:2], "--append", "--group-scope", "file") == apart[:8]
    assert run(files[2:], "--append", "--group-scope", "file") == apart
    assert Dataset.open(tmp_path / "out").fingerprint == whole.fingerprint
    with pytest.raises(
        DataError, match="question must not be the number of a group in an earlier file"
    ):
        run(files, "--overwrite", "--rename", "prompt_id=question")


def test_group_ids_that_are_not_counted_are_the_same_in_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text or a hash is in two files for a reason, which a note says."""
    texts = [write_dump(tmp_path / f"{name}.jsonl", ["a", "b", 1 << 40]) for name in "ab"]
    assert run_command(command, *map(str, texts), str(tmp_path / "out")) == 0
    note = "3 groups are in several files by their ids: taken as the same ones"
    assert note in capsys.readouterr().err
    data = Dataset.open(tmp_path / "out")
    assert note in data.source["sources"][1]["notes"][-1]
    numbers = data.columns["prompt_id"].tolist()
    assert numbers[:3] == numbers[3:]
    apart = ingest(texts, tmp_path / "out", overwrite=True, group_scope="file").columns["prompt_id"]
    assert len(set(apart.tolist())) == 6
    with pytest.raises(ConfigError, match="group_scope must be one of file, all, got 'fil'"):
        ingest(texts, tmp_path / "x", group_scope="fil")
    lines = write_lines(tmp_path / "c.jsonl", [{"token_ids": [1, 2]}])
    with pytest.raises(
        DataError, match="--group-scope must be for sources with a column of groups"
    ):
        ingest([lines], tmp_path / "x", group_scope="file")


def template(messages: list[dict[str, str]]) -> dict[str, list[int]]:
    parts = [(message["role"] == "assistant", message["content"].encode()) for message in messages]
    return {
        "input_ids": [token for _, content in parts for token in content],
        "assistant_masks": [int(own) for own, content in parts for _ in content],
    }


def test_texts_are_tokenized_by_a_named_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def encode(text):\n    return list(text.encode())\n"
    (tmp_path / "my_tokens.py").write_text(code)
    source = str(EXAMPLES / "gsm8k.jsonl")
    dest = str(tmp_path / "out")
    options = [f"--tokenize={name}=my_tokens:encode" for name in ("question", "answer")]
    assert run_command(command, source, dest, *options) == 0
    assert "read as a table with one conversation per row" in capsys.readouterr().err
    data = Dataset.open(dest)
    for number, line in enumerate((EXAMPLES / "gsm8k.jsonl").read_text().splitlines()):
        row = json.loads(line)
        stored = data.trajectory(number)
        assert bytes(stored["tokens"].tolist()).decode() == row["question"] + row["answer"]
        assert bytes(stored["tokens"][stored["loss_mask"]].tolist()).decode() == row["answer"]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": chat, "answer": 42}]
    data = Dataset.from_iterable(rows, tmp_path / "chat", tokenize={"messages": template})
    assert data.columns["loss_mask"].tolist() == [False] * 2 + [True] * 3
    assert data.schema["answer"].rows == "1"


def test_objects_of_a_program(tmp_path: Path) -> None:
    """Frames, and data sets of Minari and of Hugging Face, are known by their methods."""
    columns = {
        "episode": np.array([0, 0, 1]),
        "action": np.arange(3.0),
        "reward": np.ones(3, np.float32),
    }
    columns["task"] = np.array(["a", "a", "b"], object)

    class Frame:
        iloc = None

        def __init__(self) -> None:
            self.columns = list(columns)

        def __getitem__(self, name: str) -> Any:
            return SimpleNamespace(to_numpy=lambda: columns[name])

    data = Dataset.from_iterable(Frame(), tmp_path / "frame", dtype={"action": "float32"})
    assert (data.lengths.tolist(), data.trajectory(1)["task"]) == ([2, 1], b"b")
    assert data.schema["action"].dtype == data.schema["reward"].dtype == "float32"

    class Hub:
        features = None
        table = arrow.Table.from_pylist(episodes())

        def with_format(self, form: str) -> Any:
            assert form == "arrow"
            return SimpleNamespace(iter=lambda batch_size: iter([self.table]))

    hub = Dataset.from_iterable(Hub(), tmp_path / "hub")
    assert hub.fingerprint == Dataset.from_iterable(episodes(), tmp_path / "rows").fingerprint
    names = ("observations", "actions", "rewards", "terminations", "truncations", "infos")
    arrays = (np.zeros((4, 2)), np.ones(3), np.ones(3), np.zeros(3, bool), np.arange(3) == 2, {})
    episode = SimpleNamespace(**dict(zip(names, arrays, strict=True)))
    data = Dataset.from_iterable(
        SimpleNamespace(iterate_episodes=lambda: [episode] * 2), tmp_path / "minari"
    )
    assert data.schema["observation"].rows == "T+1"
    assert "infos" not in data.schema
    schema = Schema(
        [Column("observation", "float32", (), "observation", "T+1"), Column("x.y", "int8")]
    )
    given = ({"observation": [0, 1, n], "x": {"y": [n, n]}} for n in range(3))
    data = Dataset.from_iterable(given, tmp_path / "schema", schema=schema)
    assert data.columns["x.y"].tolist() == [0, 0, 0, 1, 1, 0, 2, 2, 0]
    assert "reward" not in data.schema
    more = [{"observation": [0, 1], "x": {"y": [7]}}]
    assert len(Dataset.from_iterable(more, tmp_path / "schema", schema=schema, append=True)) == 4


def test_odd_but_legal_tables(tmp_path: Path) -> None:
    def made(rows: Any, **options: Any) -> Dataset:
        return Dataset.from_iterable(rows, tmp_path / "out", overwrite=True, **options)

    rows = [{"episode_id": number, "action": number, "reward": number} for number in range(3)]
    data = made(rows, episode_id="episode_id")
    assert data.lengths.tolist() == [1, 1, 1]
    batches = arrow.Table.from_pylist(rows).to_batches(max_chunksize=1)
    none = batches[0].slice(0, 0)
    with arrow.ipc.new_stream(str(tmp_path / "a.arrow"), none.schema) as stream:
        for batch in (none, batches[0], none, *batches[1:]):
            stream.write_batch(batch)
    with open_source(tmp_path / "a.arrow", episode_id="episode_id") as reader:
        assert ingest(reader, tmp_path / "arrow").fingerprint == data.fingerprint

    ends: dict[str, Any] = {"action": [1, 2], "reward": [0, 1]}
    flag = [False, True]
    data = made([{**ends, "terminated": flag, "truncated": flag, "done": flag}])
    assert (
        data.columns["terminated"].tolist() == data.columns["truncated"].tolist() == [False, True]
    )
    names = ("action", "reward", "dones", "terminations")
    data = made(
        [
            dict(zip(names, (1, 1, *flags), strict=True))
            for flags in ((0, 0), (1, 1), (0, 0), (1, 0))
        ]
    )
    assert data.lengths.tolist() == [2, 2]
    assert data.columns["terminated"].tolist() == [False, True, False, False]
    assert data.columns["truncated"].tolist() == [False, False, False, True]

    steps = [{"action": [1, 2, 3, 4], "done": [False, True, False, True]}]
    data = made(steps, reward="last=1", split_by_flags=True)
    assert (data.columns["reward"].tolist(), data.columns["return"].tolist()) == (
        [0, 1, 0, 1],
        [1, 1],
    )

    data = made([{**ends, "key": key} for key in (1, 2**64 - 1)])
    assert [data.trajectory(i)["key"] for i in range(2)] == [1, 2**64 - 1]
    kind = arrow.fixed_shape_tensor(arrow.int64(), (2, 3), permutation=[1, 0])
    values = arrow.array([[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], kind.storage_type)
    columns = {"observation": arrow.ExtensionArray.from_storage(kind, values), "action": [0, 1]}
    path = write_arrow(tmp_path / "b.arrow", arrow.table({**columns, "done": [False, True]}))
    data = ingest([path], tmp_path / "tensors", reward="none")
    assert data.columns["observation"][1].tolist() == [[6, 9], [7, 10], [8, 11]]

    returns = Column("return", "float64", role="return", rows="1")
    schema = Schema([Column("action", "int8"), returns])
    assert made([{"action": [1], "return": 3}], schema=schema).columns["return"].tolist() == [3]
    schema = Schema([Column("reward", "float32", role="reward"), returns])
    with pytest.raises(
        DataError, match=r"row 0: column return must be 3.0, as ingest derives it, got 9"
    ):
        made([{"reward": [1, 2], "return": 9}], schema=schema)
    with pytest.raises(ConfigError, match="schema must be a Schema, got 'dict'"):
        made([{"action": [1]}], schema={"columns": {}})
    with pytest.raises(
        DataError, match=r"row 0: when must be a JSON value, got .*; leave it out with"
    ):
        made([{**ends, "when": datetime(2024, 1, 1)}])


BROKEN = """
[{"action": [1, 2], "obs": [[1], [1, 2]]}] | row 0: observation must hold numbers, without gaps and in row
[{"action": [1, 2], "reward": [1, 1]}, {"action": [1, null], "reward": [1, 1]}] | row 1: action[1] must no
[{"action": [[1, 2], [1, null]], "reward": [1, 1]}] | row 0: action[1][1] must not be null
[{"action": [1], "reward": [1]}, {"action": [1], "reward": null}] | row 1: reward must be in every row, an
[{"episode": 0, "action": 1, "reward": 0}, {"episode": 0, "action": 1, "reward": null}] | reward[1] must n
[{"input_ids": [1, null]}] | row 0: input_ids[1] must not be null
[{"input_ids": [1, 2], "reward": 1.0}, {"input_ids": [1, 2], "reward": null}] | row 1: reward must be in e
[{"action": [1, 2], "obs": [{"a": 1}, {"b": 2}]}] | row 0: column obs.a must be in every row or in none, g
[{"action": [1, 2]}, {"action": [1], "obs": [1, 2]}] | row 0: observation must be in every row, and not nu
[{"action": [1, 2], "reward": [0, 1]}, {"action": [1], "reward": [0, 1, 2]}] | reward must have a row for
[{"action": [1, 2]}, [1]] | row 1 must be a mapping by column, got 'list'
[{"action": 1, "reward": 0}] | must have a column of episode ids, or of end flags, with one step per row
[{"episode": 0, "reward": 0}, {"episode": 1, "reward": 0}, {"episode": 0, "reward": 0}] | rows of episode 0
[{"episode": 0, "reward": 0}, {"episode": 0, "reward": 0}, {"reward": 0}] | row 2: episode must be a numbe
[{"obs": [1], "observations": [3], "action": [1]}] | observation must come from one key only, got 'obs
[{"reward": 1, "done": true}, {"reward": 1, "done": [1, 2]}] | must have an end flag in every row
[{"action": [1, 2], "done": 18446744073709551616}] | row 0: terminated must hold numbers
[{"question": "a", "answer": "b"}] | row 0 must have a column with a value per step, got 'question, answer'
[{"messages": [{"role": "user", "content": "a"}]}] | row 0 must have token ids, got 'messages'; make them
[{"input_ids": [1, 2], "loss_mask": [1]}] | loss_mask must be a list of numbers, one for each of 2 tokens
[{"message_log": [{"token_ids": [1]}, 3]}] | row 0: message 1 must be an object, got 'int'
[{"input_ids": [1], "responses": [1, 2]}] | row 0 must have at least the 2 tokens of its response, got 1
[{"input_ids": [1, 2], "input_lengths": "a"}] | row 0: input_lengths must be a number, got 'str'
[{"input_ids": ["a"]}] | row 0: input_ids must be a list of numbers, got 'list'
[] | must hold at least one row, got 0; the table is empty
"""


@pytest.mark.parametrize("case", BROKEN.strip().splitlines())
def test_broken_tables_are_refused(tmp_path: Path, case: str) -> None:
    rows, text = case.split(" | ")
    source = write_lines(tmp_path / "a.jsonl", json.loads(rows))
    assert text in refused(source, tmp_path / "out", reward="none")


def test_options_of_tables_name_columns(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    for options, text in (
        (
            {"episode_id": "test"},
            "--episode-id must name a column of the source, got 'test'; did you mean",
        ),
        (
            {"tokenize": {"test": template}},
            "row 0: --tokenize must name a column of every row, got 'test'",
        ),
    ):
        with pytest.raises(DataError, match=text):
            open_source(source, **options)


def test_a_selection_keeps_observations_and_actions_or_names_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    rows = [{"qpos": [[0.0], [1.0]], "torque": [[1.0], [2.0]], "force": [1, 2], "reward": [0, 1]}]
    rule = (
        "--columns must keep a column of the role action: it leaves out torque, force; name the "
        "actions as well, with --role COLUMN=action where they lack the role; or leave columns "
        "out by name: !torque,!force"
    )
    role = {"qpos": "observation"}
    with pytest.raises(DataError) as caught:
        Dataset.from_iterable(rows, tmp_path / "out", columns=["qpos"], role=role)
    assert rule in str(caught.value)
    source = str(write_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match="it leaves out torque, force"):
        run_command(
            command, source, str(tmp_path / "out"), "--columns", "qpos", "--role=qpos=observation"
        )
    data = Dataset.from_iterable(rows, tmp_path / "out", columns=["!torque", "!force"], role=role)
    assert [*data.schema.names] == ["reward", "qpos", "return", "length"]
    role["torque"] = "action"
    data = Dataset.from_iterable(rows, tmp_path / "b", columns=["qpos", "torque"], role=role)
    assert (
        data.source["sources"][0]["notes"][-1] == "left out, as --columns does not name them: force"
    )


def test_hostile_tables_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files that are large in memory, deep nesting, and files cut anywhere."""
    monkeypatch.setattr("deepspeed_gear.data.ingest.source_checks.FLOOR_BYTES", 1 << 20)
    table = arrow.table({"action": [[0.0] * 200_000] * 4, "reward": [[0.0] * 200_000] * 4})
    write_arrow(tmp_path / "a.arrow", table, compression="zstd")
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    line = b'{"action": [' + b"0, " * 1_000_000 + b"0]}\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    for name in ("a.arrow", "a.parquet", "a.jsonl.gz"):
        with pytest.raises(DataError, match="must hold at most 100 bytes for each of the"):
            open_source(tmp_path / name)
    (tmp_path / "deep.jsonl").write_text('{"action": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(DataError, match=r"deep.jsonl: line 1 must hold a JSON object per line"):
        open_source(tmp_path / "deep.jsonl")
    small = arrow.Table.from_pylist(episodes())
    parquet.write_table(small, tmp_path / "b.parquet")
    for path in (write_arrow(tmp_path / "b.arrow", small), tmp_path / "b.parquet"):
        whole = path.read_bytes()
        for length in (9, len(whole) // 2, len(whole) - 9):
            path.write_bytes(whole[:length])
            with pytest.raises(DataError, match=r"must be a readable|must hold at least one row"):
                ingest([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rllib = write_lines(
        tmp_path / "rllib.json", [{"type": "SampleBatch", "obs": [[0.0]], "rewards": [1.0]}]
    )
    with pytest.raises(DataError, match=r"rllib.json: trajectory 0 must have observations"):
        open_source(rllib)


def test_nulls_are_named_where_a_row_is_found_out(tmp_path: Path) -> None:
    """Also in the first rows, by which it is found out whether a row is a step or an episode."""
    row = {"episode_id": 0, "observation": [1.0, 2.0], "action": 1, "reward": 1.0, "done": False}
    places = {"episode_id": "row 1: episode_id must be a number or a text, got 'null'"}
    for number in (0, 1):
        for name in row if number else [*row][1:]:
            rows = [dict(row), dict(row)]
            rows[number][name] = None
            usual = "terminated" if name == "done" else name
            text = places.get(name, f"episode 0: {usual}[{number}] must not be null; fill it in")
            source = write_lines(tmp_path / "a.jsonl", rows)
            with pytest.raises(DataError) as caught:
                run_command(command, str(source), str(tmp_path / "out"))
            assert text in str(caught.value), name

    class NAType:
        """As pandas' missing value."""

    class Frame:
        iloc = None
        columns = tuple(row)

        def __getitem__(self, name: str) -> Any:
            values = np.array([row[name], row[name], None], object)
            values[2] = NAType() if name == "action" else row[name]
            return SimpleNamespace(to_numpy=lambda: values)

    with pytest.raises(DataError, match=r"episode 0: action\[2\] must not be null"):
        Dataset.from_iterable(Frame(), tmp_path / "out")


def test_files_that_describe_a_source_are_none(tmp_path: Path) -> None:
    """A folder's JSON file is not named as the source, and a missing path is called missing."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "info.json").write_text('{"features": {}}')
    with pytest.raises(
        DataError, match=r"must have a known layout, got 'a folder with info[.]json'; kn"
    ):
        open_source(tmp_path / "set")
    for name in ("none", "none.hdf5"):
        with pytest.raises(DataError, match="got 'nothing at this path'; check the path, or make"):
            Dataset.open(tmp_path / name)
    (tmp_path / "a.npz").touch()
    with pytest.raises(DataError, match=r"got 'no folder'; make one with gear ingest .*a.npz DEST"):
        Dataset.open(tmp_path / "a.npz")
    info = tmp_path / "set" / "meta" / "info.json"
    info.parent.mkdir()
    info.write_text('{"codebase_version": "v2.1"}')
    for path in (info, info.parent):
        with pytest.raises(
            DataError, match=rf"not what describes .*; give its folder: {tmp_path}/set"
        ):
            open_source(path)
    with pytest.raises(
        DataError, match=rf"make one with gear ingest {tmp_path}/set DEST, and name"
    ):
        Dataset.open(info)
    rows = tmp_path / "metadata.json"  # an array is a table, as it is with a format that is given
    rows.write_text(json.dumps([{"tokens": [1, 2]}]))
    assert len(ingest([rows], tmp_path / "made")) == 1
    rows.write_text(json.dumps({"tokens": [1, 2]}))
    assert open_source(rows, "table").num_steps == 2
    with pytest.raises(DataError, match=rf"name the folder that it lies in: {tmp_path}/made$"):
        Dataset.open(tmp_path / "made" / "schema.json")
    (tmp_path / "set" / "schema.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"schema.json must contain the data, got 'a Git LFS"):
        open_source(tmp_path / "set")


def test_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of episodes, in blocks of any size, compressed or not; nulls and names are checked."""
    monkeypatch.setattr("deepspeed_gear.data.ingest.table_blocks.BLOCK_BYTES", 256)
    rows = list(step_rows())
    lines = ["episode_index,observation.x,observation.y,reward,dones,timeouts,task"]
    for row in rows:
        x, y = row["state"]
        flags = f"{row['dones']},{row['timeouts']}".lower()
        lines.append(
            f'{row["episode_index"]},{x!r},{y!r},{row["reward"]!r},{flags},"a, {len(lines)}"'
        )
    text = "\n".join(lines)
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert run_command(command, str(tmp_path / "a.csv"), str(tmp_path / "out")) == 0
    data = Dataset.open(tmp_path / "out")
    assert data.fingerprint == ingest([tmp_path / "b.csv.gz"], tmp_path / "gz").fingerprint
    assert data.lengths.tolist() == list(LENGTHS)
    for name, column in (("x", 0), ("y", 1)):
        given = [row["state"][column] for row in rows]
        assert data.columns[f"observation.{name}"].tolist() == given
    assert data.columns["reward"].tolist() == [row["reward"] for row in rows]
    assert data.columns["truncated"].sum() == 1
    assert data.trajectory(1)["task"] == [f"a, {n}" for n in range(4, 11)]
    (tmp_path / "a.csv").write_text("episode_id,action,reward\n0,1,1.5\n0,,2.5\n")
    with pytest.raises(DataError, match=r"episode 0: action\[1\] must not be null"):
        open_source(tmp_path / "a.csv")
    for broken in ("action,action\n1,2\n", "action,reward\n1,2\n1,2,3\n", ""):
        (tmp_path / "a.csv").write_text(broken)
        with pytest.raises(
            DataError, match=r"a.csv must (be a readable csv|have a different name)"
        ):
            open_source(tmp_path / "a.csv")
