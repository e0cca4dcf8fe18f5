"""Ingest of chats: masks of messages, the user's functions, and files of preferences."""

import json
import os
import shutil
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
    module = SimpleNamespace(
        encode=encode,
        template=template,
        template_ids=lambda messages: template(messages)["input_ids"],
        answer=lambda answer: template([answer] if isinstance(answer, dict) else answer),
        whole_row=whole_row,
        list=list,
    )
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
        masked(0, 0.5, 0, 1),
        "message_loss_mask[1] must be 0 or 1: a loss mask has no weights, got 0.5",
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
    """A function whose tokens are not those of the messages one after the other is refused."""
    data = Dataset.from_iterable([row], tmp_path / "out", tokenize={"messages": template})
    assert data.columns["loss_mask"].tolist() == USUAL
    with pytest.raises(DataError, match="must be applied to the tokens of each message"):
        Dataset.from_iterable([row], tmp_path / "x", tokenize={"messages": lambda _: [1, 2]})


@pytest.mark.parametrize("function", ["template", "template_ids"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (masked(0, 0, 0, 1), [0, 0, 0, 0, 0, 1]),
        (masked(1, 1, 0, 0), [1, 1, 1, 1, 0, 0]),
        (weighted("weight", None, 0, None, 1), [0, 0, 0, 0, 0, 1]),
        (weighted("loss", None, False, None, None), [0, 0, 0, 0, 0, 1]),
        (weighted("train", True, True, None, None), [1, 1, 1, 1, 0, 1]),
    ],
)
def test_masks_by_message_are_applied_to_the_tokens_of_each(
    tmp_path: Path, row: dict[str, Any], expected: list[int], function: str
) -> None:
    """Also where the function makes no mask, and in a folder's other form of messages."""
    source = write(tmp_path / "a.jsonl", [row])
    dest = str(tmp_path / "out")
    assert run_command(command, source, dest, f"--tokenize=messages=chat_functions:{function}") == 0
    assert Dataset.open(dest).columns["loss_mask"].tolist() == expected
    assert Dataset.open(dest).columns["tokens"].tolist() == encode("abcdef")


def test_the_mask_of_a_template_counts_in_the_messages_with_loss(tmp_path: Path) -> None:
    """It leaves out the headers of messages; a message with loss of another role has all of its."""

    def headed(messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        parts = [(one["role"] == "assistant", encode(one["content"])) for one in messages]
        ids = [token for _, tokens in parts for token in (9, *tokens)]
        return ids, [own and n > 0 for own, tokens in parts for n in range(len(tokens) + 1)]

    data = Dataset.from_iterable(
        [masked(1, 1, 0, 0)], tmp_path / "a", tokenize={"messages": headed}
    )
    assert data.columns["loss_mask"].tolist() == [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]

    def backwards(messages: list[dict[str, str]]) -> list[int]:
        return encode("".join(one["content"] for one in reversed(messages)))

    text = (
        "message_loss_mask must be applied to the tokens of each message, and those of the first 1"
    )
    with pytest.raises(DataError, match=text):
        Dataset.from_iterable(
            [masked(1, 1, 0, 0)], tmp_path / "b", tokenize={"messages": backwards}
        )


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


USER = [{"role": "user", "content": "p"}]
GOOD = [{"role": "assistant", "content": "good"}]
BAD = [{"role": "assistant", "content": "no"}]
TURN = {"from": "human", "value": "p"}
IDS = encode("p"), encode("good"), encode("no")
# Rows of a pair with the prompt "p" and the answers "good" and "no", and the functions of columns.
PAIRS: list[tuple[dict[str, Any], dict[str, str]]] = [
    (pair("p", "good", "no"), {"prompt": "encode", "chosen": "encode", "rejected": "encode"}),
    ({"chosen": USER + GOOD, "rejected": USER + BAD}, {"chosen": "answer", "rejected": "answer"}),
    (
        pair(USER, GOOD, BAD),
        {"prompt": "template_ids", "chosen": "answer", "rejected": "answer"},
    ),
    (
        {
            "conversations": [TURN],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {"conversations": "template", "chosen": "answer", "rejected": "answer"},
    ),
    (
        {"input": "p", "preferred_output": GOOD, "non_preferred_output": BAD},
        {"input": "encode", "preferred_output": "answer", "non_preferred_output": "answer"},
    ),
    (dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), IDS, strict=True)), {}),
    (
        {
            "prompt_input_ids": IDS[0],
            "chosen_input_ids": IDS[0] + IDS[1],
            "rejected_input_ids": IDS[0] + IDS[2],
        },
        {},
    ),
    (
        {
            "prompt_input_ids": IDS[0],
            "chosen_input_ids": IDS[0] + IDS[1] + [0],
            "chosen_attention_mask": [1, 1, 1, 1, 1, 0],
            "chosen_labels": [-100, *IDS[1]],
            "rejected_input_ids": IDS[0] + IDS[2] + [0],
            "rejected_attention_mask": [1, 1, 1, 0],
            "rejected_labels": [-100, *IDS[2]],
        },
        {},
    ),
]


@pytest.mark.parametrize(("row", "by_column"), PAIRS, ids=range(len(PAIRS)))
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_pair_of_answers_is_a_group_of_two(
    tmp_path: Path, row: dict[str, Any], by_column: dict[str, str], form: str
) -> None:
    """In several files the pairs have different numbers, also where they are added."""
    is_openai = "preferred_output" in row
    sides = ("preferred", "non_preferred") if is_openai else ("chosen", "rejected")
    row = {**row, f"score_{sides[0]}": 9, f"score_{sides[1]}": 4}
    source = write(tmp_path / "a.jsonl", [row] * 2)
    dest = str(tmp_path / "out")
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        source = str(tmp_path / "a.parquet")
        parquet.write_table(arrow.Table.from_pylist([row] * 2), source)
    other = str(shutil.copy(source, tmp_path / f"b.{form}"))
    given = [f"--tokenize={name}=chat_functions:{f}" for name, f in by_column.items()]
    assert run_command(command, source, dest, *given) == 0
    assert run_command(command, other, dest, *given, "--append") == 0
    data = Dataset.open(dest)
    assert data.columns["prompt_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.columns["reward"].tolist() == [1, 0] * 4
    assert data.columns["score"].tolist() == [9, 4] * 4
    for number, answer in ((0, "good"), (1, "no"), (7, "no")):
        stored = data.trajectory(number)
        assert stored["tokens"].tolist() == encode(f"p{answer}")
        assert stored["loss_mask"].tolist() == [0, *[1] * len(answer)]


REFUSED_PAIRS: list[dict[str, Any]] = [
    pair("a", "b", "c"),
    {"chosen": USER + GOOD, "rejected": USER + BAD},
    {"messages": CHAT, "rejected_response": "c"},
    {"messages": CHAT, "rejected_messages": CHAT},
]


@pytest.mark.parametrize("row", REFUSED_PAIRS, ids=range(len(REFUSED_PAIRS)))
def test_pairs_without_tokens_of_both_answers_are_refused(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    """Also with the rule of missing rewards, and where both would be one conversation."""
    source = write(tmp_path / "a.jsonl", [row] * 2)
    every = [f"--tokenize={name}=chat_functions:list" for name in row if "messages" in row]
    for options in ([], ["--reward", "none"], every):
        with pytest.raises(DataError) as caught:
            run_command(command, source, str(tmp_path / "out"), *options)
        text = "must not be a pair of answers whose tokens are unknown"
        assert str(caught.value).startswith(f"{source}: row 0 {text}")
        assert "--tokenize chosen=... --tokenize rejected=..." in str(caught.value)
    with pytest.raises(DataError, match="must not be a pair of answers"):
        Dataset.from_iterable([row], tmp_path / "out", reward="none")
    assert os.listdir(tmp_path) == ["a.jsonl"]


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
    for remedy in ([], ["--rename", "label=reward"]):
        assert run_command(command, source, dest, *options, *remedy, "--overwrite") == 0
        data = Dataset.open(dest)
        assert data.columns["loss_mask"].tolist() == [0, 1, 0, 1]
        assert data.columns["reward"].tolist() == [1, 0]
        assert ("label of an answer (KTO)" in data.source["sources"][0]["notes"][-1]) == (
            not remedy
        )
    rows = [{"prompt": CHAT[:1], "completion": CHAT[1:2], "label": True}]
    for rule in ({}, {"reward": "none"}):  # messages are no steps
        with pytest.raises(
            DataError, match="row 0 must have token ids, got 'prompt, completion, label'"
        ):
            Dataset.from_iterable(rows, tmp_path / "x", **rule)
