"""Ingest of chats: masks of messages, the user's functions, and files of preferences."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gear_support import run_command

from deepspeed_gear import Dataset
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import ConfigError, DataError

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f"},
]
USUAL = [0, 0, 1, 1, 0, 1]  # the mask of the assistant's letters


def encode(text: str) -> list[int]:
    return list(text.encode())


def template(messages: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the tokens and the mask of a chat template, of either form of messages."""
    parts = [
        (one.get("role", one.get("from")), one.get("content", one.get("value"))) for one in messages
    ]
    return {
        "input_ids": [token for _, text in parts for token in encode(str(text))],
        "assistant_masks": [
            int(role in ("assistant", "gpt")) for role, text in parts for _ in str(text)
        ],
    }


def whole_row(messages: list[dict[str, str]], row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return a mask with loss for the last token only, which no template gives."""
    ids = template(row["messages"])["input_ids"]
    return ids, [0] * (len(ids) - 1) + [1]


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(encode=encode, template=template, whole_row=whole_row, list=list)
    monkeypatch.setitem(sys.modules, "chat_functions", module)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def weighted(key: str, *weights: Any) -> dict[str, Any]:
    """Return the chat with a key in its messages, but where the weight is None."""
    pairs = zip(CHAT, weights, strict=True)
    return {
        "messages": [{**one, **({} if weight is None else {key: weight})} for one, weight in pairs]
    }


def masked(*mask: float) -> dict[str, Any]:
    return {"messages": CHAT, "message_loss_mask": mask}


NO_MEANING = "must not mask messages: the meaning of this key is ambiguous"
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        masked(0, 0, 0, 1),
        "message_loss_mask must be applied to the tokens of each message, got [0, 0, 0, 1]",
    ),
    (
        masked(0, 0.5, 0, 1),
        "message_loss_mask[1] must be 0 or 1: a loss mask has no weights, got 0.5",
    ),
    (weighted("weight", None, 0, None, 1), "weight must be applied to the tokens of each message"),
    (
        weighted("loss", None, False, None, None),
        "loss must be applied to the tokens of each message",
    ),
    (
        weighted("train", True, True, None, None),
        "train must be applied to the tokens of each message",
    ),
    (
        weighted("weight", None, 0.5, None, 1),
        "message 1: weight must be 0 or 1: a loss mask has no weights",
    ),
    (weighted("mask", None, 1, None, 1), f"message 1: mask {NO_MEANING}"),
    ({"messages": CHAT, "mask": "user"}, f"mask {NO_MEANING}"),
    (
        {"messages": CHAT, "loss_mask": [1, 1]},
        "loss_mask must apply to token ids in the row, not to those that",
    ),
]


@pytest.mark.parametrize(("row", "text"), REFUSED, ids=range(len(REFUSED)))
def test_masks_of_messages_are_refused_unless_the_function_takes_the_row(
    tmp_path: Path, row: dict[str, Any], text: str
) -> None:
    source = write(tmp_path / "a.jsonl", [row])
    dest = str(tmp_path / "out")
    with pytest.raises(DataError) as caught:
        run_command(command, source, dest, "--tokenize=messages=chat_functions:template")
    assert str(caught.value).startswith(f"{source}: row 0: {text}")
    assert "def encode(messages, row), where row is the whole row" in str(caught.value)
    with pytest.raises(DataError) as caught:
        Dataset.from_iterable([row], dest, tokenize={"messages": template})
    assert f"row 0: {text}" in str(caught.value)
    assert os.listdir(tmp_path) == ["a.jsonl"]
    assert run_command(command, source, dest, "--tokenize=messages=chat_functions:whole_row") == 0
    assert Dataset.open(dest).columns["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "row",
    [masked(0, 1, 0, 1), weighted("weight", None, 1, None, 1), weighted("loss", 0, 1, None, None)],
)
def test_masks_that_say_what_a_template_says_are_applied(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    """Without a mask of the function all tokens would have loss, so it needs one."""
    data = Dataset.from_iterable([row], tmp_path / "out", tokenize={"messages": template})
    assert data.columns["loss_mask"].tolist() == USUAL
    with pytest.raises(DataError, match="must be applied to the tokens of each message"):
        Dataset.from_iterable([row], tmp_path / "x", tokenize={"messages": lambda _: [1, 2]})


def test_a_sample_without_loss_and_messages_of_sharegpt(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "sample_loss_mask": number} for number in (1, 0)]
    data = Dataset.from_iterable(rows, tmp_path / "a", tokenize={"messages": template})
    assert data.columns["loss_mask"].tolist() == [*USUAL, *[0] * 6]
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[one["role"]], "value": one["content"]} for one in CHAT]
    data = Dataset.from_iterable(
        [{"conversations": turns, "message_loss_mask": [0, 1, 0, 1]}],
        tmp_path / "b",
        tokenize={"conversations": template},
    )
    assert data.columns["loss_mask"].tolist() == USUAL


@pytest.mark.parametrize(
    ("keys", "row", "expected"),
    [
        ({}, {}, [0, 0, 1, 1, 0, 1]),
        ({}, {"message_loss_mask": [0, 0, 0, 1]}, [0, 0, 0, 0, 0, 1]),
        ({}, {"message_loss_mask": [1, 0, 0, 1]}, [1, 1, 0, 0, 0, 1]),
        ({}, {"sample_loss_mask": 0}, [0, 0, 0, 0, 0, 0]),
        ({"weight": 0}, {}, [0, 0, 0, 0, 0, 1]),
        ({"train": 0}, {"message_loss_mask": [0, 1, 0, 1]}, [0, 0, 0, 0, 0, 1]),
        ({"token_loss_mask": [0, 1]}, {}, [0, 0, 0, 1, 0, 1]),
        ({"token_loss_mask": [0, 1]}, {"message_loss_mask": [0, 0, 0, 1]}, [0, 0, 0, 0, 0, 1]),
        ({"mask": 1}, {}, f"message 1: mask {NO_MEANING}"),
        (
            {},
            {"message_loss_mask": [1]},
            "message_loss_mask must have a value for each of 4 messages",
        ),
    ],
)
@pytest.mark.parametrize("role", ["role", "from"])
def test_masks_of_messages_with_tokens(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any], expected: Any, role: str
) -> None:
    """Keys are of the second message. Both doors, and both forms of messages."""
    log: list[dict[str, Any]] = [
        {role: one["role"], "token_ids": encode(one["content"])} for one in CHAT
    ]
    log[1].update(keys)
    source = write(tmp_path / "a.jsonl", [{"message_log": log, **row}])
    if isinstance(expected, str):
        with pytest.raises(DataError) as caught:
            run_command(command, source, str(tmp_path / "out"))
        assert str(caught.value).startswith(f"{source}: row 0: {expected}")
        return
    assert run_command(command, source, str(tmp_path / "out")) == 0
    assert Dataset.open(tmp_path / "out").columns["loss_mask"].tolist() == expected
    log = [{**one, "token_ids": np.array(one["token_ids"])} for one in log]
    data = Dataset.from_iterable([{"message_log": log, **row}], tmp_path / "program")
    assert data.columns["loss_mask"].tolist() == expected


def test_errors_of_the_users_functions_name_row_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tokens.py").write_text("def encode(text):\n    return text.nothing\n")
    (tmp_path / "broken_module.py").write_text("nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dumps").mkdir()
    for name in "ab":
        write(
            tmp_path / "dumps" / f"{name}.jsonl",
            [{"text": "x", "n": 1}, {"text": name * 2, "n": 1}],
        )
    source = str(tmp_path / "dumps")
    dest = str(tmp_path / "out")

    def error(option: str) -> str:
        with pytest.raises((DataError, ConfigError)) as caught:
            run_command(command, source, dest, "--tokenize", option)
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    text = error("text=broken_tokens:encode")
    assert text.startswith(
        f"{source}: a.jsonl: row 0: --tokenize text must hold a value that broken_tokens:encode "
        f"takes, got "
    )
    assert "AttributeError: 'str' object has no attribute 'nothing'" in text
    assert text.endswith(f"raised in {tmp_path / 'broken_tokens.py'}, line 2")
    text = (
        "--tokenize must name what can be imported, got 'broken_module:encode'; name "
        "'nothing' is not"
    )
    assert error("text=broken_module:encode").startswith(text)

    def chosen(text: str) -> Any:
        return ([1], [1], [1]) if text == "bb" else [1]

    with pytest.raises(
        DataError, match=r"b.jsonl: row 1: .* must get token ids, or the ids and a mask, of"
    ):
        ingest(open_source(source, tokenize={"text": chosen}), dest)


def pair(prompt: Any, chosen: Any, rejected: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


PREFERENCES: list[dict[str, Any]] = [
    pair("a", "b", "c"),
    {**pair("a", CHAT, CHAT), "score_chosen": 1.0, "score_rejected": 0.5},
    {
        "chosen": [{**one, "turn": 1} for one in CHAT],
        "rejected": [{**one, "turn": 1} for one in CHAT],
    },
    pair(CHAT[:1], CHAT[1:2], CHAT[1:2]),
    {"messages": CHAT, "rejected_response": "c"},
    {"messages": CHAT, "rejected_messages": CHAT},
    {"conversations": [{"from": "human", "value": "a"}], **pair("", CHAT[1], CHAT[1])},
    {"input": {"messages": CHAT}, "preferred_output": CHAT[1:], "non_preferred_output": CHAT[1:]},
    {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
    {"prompt_input_ids": [1, 2], "chosen_input_ids": [3], "rejected_input_ids": [4, 5]},
]


@pytest.mark.parametrize("row", PREFERENCES, ids=range(len(PREFERENCES)))
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_pairs_of_answers_are_no_trajectories(
    tmp_path: Path, row: dict[str, Any], form: str
) -> None:
    """Neither with the rule of missing rewards, nor as tokens one after the other."""
    source = write(tmp_path / "a.jsonl", [row] * 2)
    dest = str(tmp_path / "out")
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        source = str(tmp_path / "a.parquet")
        parquet.write_table(arrow.Table.from_pylist([row] * 2), source)
    texts = [name for name, value in row.items() if isinstance(value, (str, list, dict))]
    every = [f"--tokenize={name}=chat_functions:list" for name in texts]
    for options in ([], ["--reward", "none"], every):
        with pytest.raises(DataError) as caught:
            run_command(command, source, dest, *options)
        assert str(caught.value).startswith(
            f"{source}: row 0 must not be a pair of answers: a trajectory is"
        )
        assert "make two rows of each, with the same prompt_id and the rewards 1 and 0" in str(
            caught.value
        )
        assert not Path(dest).exists()
    with pytest.raises(DataError, match="must not be a pair of answers"):
        Dataset.from_iterable([row], dest, reward="none")


def test_one_answer_of_a_pair_and_labels_of_answers_are_conversations(tmp_path: Path) -> None:
    options = [f"--tokenize={name}=chat_functions:encode" for name in ("prompt", "chosen")]
    source = write(tmp_path / "a.jsonl", [pair("a", "b", "c")])
    assert run_command(command, source, str(tmp_path / "sft"), *options) == 0
    assert Dataset.open(tmp_path / "sft").columns["tokens"].tolist() == encode("ab")
    options = [f"--tokenize={name}=chat_functions:encode" for name in ("prompt", "completion")]
    rows = [{"prompt": "a", "completion": text, "label": text == "b"} for text in "bc"]
    source = write(tmp_path / "kto.jsonl", rows)
    dest = str(tmp_path / "kto")
    with pytest.raises(DataError) as caught:
        run_command(command, source, dest, *options, "--role", "label=reward")
    assert str(caught.value) == (
        f"{source}: --role label=reward must have a value for each step, got 'one per trajectory'; "
        "--rename label=reward makes it the reward of a trajectory"
    )
    remedy = ["--rename", "label=reward", "--dtype", "reward=float32"]
    assert run_command(command, source, dest, *options, *remedy) == 0
    data = Dataset.open(dest)
    assert data.columns["loss_mask"].tolist() == [0, 1, 0, 1]
    assert data.columns["reward"].tolist() == [1, 0]
    rows = [{"prompt": CHAT[:1], "completion": CHAT[1:2], "label": True}]
    for rule in ({}, {"reward": "none"}):  # messages are no steps
        with pytest.raises(
            DataError, match="row 0 must have token ids, got 'prompt, completion, label'"
        ):
            Dataset.from_iterable(rows, tmp_path / "x", **rule)
