"""Prompt sets with images.

The rows are those of verl's examples/data_preprocess/geo3k.py (volcengine/verl at 0646a9b4, Apache
2.0) in the types that datasets writes to Parquet: an image is a struct of bytes and path. TRL's
prompts are chats whose contents are lists, with a column `images` or `image`.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import serving

from deepspeed_gear import Dataset
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.encoded_images import image_files, open_images, pack_images
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import DataError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pil = pytest.importorskip("PIL.Image")

IMAGE = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])


def encode(messages: list[dict[str, Any]]) -> list[int]:
    return list(json.dumps(messages).encode())


def picture(number: int, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (5 + number, 7, 3), np.uint8)
    file = io.BytesIO()
    pil.fromarray(pixels).save(file, form)
    return file.getvalue()


def verl_row(number: int, images: Any) -> dict[str, Any]:
    question = f"<image>What is {number} + {number}?"
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"content": question, "role": "user"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": "train", "index": number, "answer": "", "question": question},
    }


def trl_row(number: int, images: Any) -> dict[str, Any]:
    content = [{"type": "image", "text": None}, {"type": "text", "text": f"Number {number}?"}]
    return {"prompt": [{"role": "user", "content": content}], "images": images}


def write(path: Path, rows: list[dict[str, Any]], kind: Any = None) -> Path:
    table = arrow.Table.from_pylist(rows)
    if kind is not None:
        values = arrow.array([row["images"] for row in rows], kind)
        table = table.set_column(table.schema.get_field_index("images"), "images", values)
    parquet.write_table(table, path)
    return path


def struct(content: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": content, "path": path}


@pytest.mark.parametrize("make", [verl_row, trl_row])
def test_published_layouts_by_command_and_program(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [[picture(0)], [picture(1), picture(2, "JPEG")], [], [picture(3, "WEBP")]]
    rows = [make(number, [struct(one) for one in row]) for number, row in enumerate(files)]
    source = write(tmp_path / "train.parquet", rows, arrow.list_(IMAGE))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_template.py").write_text(
        "import json\ndef encode(messages):\n    return list(json.dumps(messages).encode())\n"
    )
    options = ["--tokenize", "prompt=own_template:encode"]
    assert main(["ingest", str(source), str(tmp_path / "set"), *options]) == 0
    dataset = Dataset.open(tmp_path / "set")
    assert dataset.schema["images"].dtype == "bytes"
    for number, row in enumerate(files):
        trajectory = dataset.trajectory(number)
        assert image_files(trajectory["images"]) == row
        opened = open_images(trajectory["images"])
        assert [image.size for image in opened] == [pil.open(io.BytesIO(one)).size for one in row]
        if "reward_model" in rows[number]:
            assert trajectory["reward_model"] == rows[number]["reward_model"]
        assert trajectory["tokens"].tolist() == encode(rows[number]["prompt"])
    assert dataset.source["sources"][0]["images"] == ["images"]
    same = open_source(source, tokenize={"prompt": encode})
    assert ingest([same], tmp_path / "again").fingerprint == dataset.fingerprint
    given = Dataset.from_iterable(rows, tmp_path / "given", tokenize={"prompt": encode})
    assert given.fingerprint == dataset.fingerprint
    assert main(["export", str(dataset.path), str(tmp_path / "out.npz"), "--format", "npz"]) == 0
    assert ingest(tmp_path / "out.npz", tmp_path / "back").fingerprint == dataset.fingerprint


@pytest.mark.parametrize(
    ("values", "kind", "options"),
    [
        ([struct(b"A"), struct(b"B")], IMAGE, {}),
        ([[b"A"], [b"B"]], arrow.list_(arrow.binary()), {}),
        ([b"A", b"B"], arrow.binary(), {"images": ["images"]}),
        ([["a.png"], ["b.png"]], arrow.list_(arrow.string()), {"images": ["images"]}),
        (["a.png", "b.png"], arrow.string(), {"images": ["images"]}),
        ([struct(None, "a.png"), struct(None, "b.png")], IMAGE, {}),
        ([[struct(None, "a.png")], [struct(b"B", "/elsewhere/b.png")]], arrow.list_(IMAGE), {}),
    ],
)
def test_forms_of_images(tmp_path: Path, values: Any, kind: Any, options: Any) -> None:
    contents = {b"A": picture(0), b"B": picture(1)}
    (tmp_path / "a.png").write_bytes(contents[b"A"])
    (tmp_path / "b.png").write_bytes(contents[b"B"])

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(one) for one in value]
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        return contents.get(value, value) if isinstance(value, bytes) else value

    rows = [verl_row(number, filled(value)) for number, value in enumerate(values)]
    source = write(tmp_path / "train.parquet", rows, kind)
    reader = open_source(source, tokenize={"prompt": encode}, **options)
    dataset = ingest([reader], tmp_path / "set")
    found = [image_files(dataset.trajectory(number)["images"]) for number in range(2)]
    assert found == [[contents[b"A"]], [contents[b"B"]]]


def test_images_that_only_later_rows_have(tmp_path: Path) -> None:
    values = [None, [], [struct(picture(0))], None]
    rows = [verl_row(number, value) for number, value in enumerate(values)]
    source = write(tmp_path / "train.parquet", rows, arrow.list_(IMAGE))
    dataset = ingest([open_source(source, tokenize={"prompt": encode})], tmp_path / "set")
    found = [image_files(dataset.trajectory(number)["images"]) for number in range(4)]
    assert found == [[], [], [picture(0)], []]


def test_a_function_of_tokens_gets_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
    source = write(tmp_path / "a.parquet", [verl_row(0, [struct(None, "a.png")])])

    def sized(messages: Any, row: dict[str, Any]) -> list[int]:
        return [len(one["bytes"]) for one in row["images"]]

    dataset = ingest([open_source(source, tokenize={"prompt": sized})], tmp_path / "set")
    assert dataset.columns["tokens"].tolist() == [len(picture(0))]


@pytest.mark.parametrize(
    ("images", "text"),
    [
        ([struct(None, "../secret.png")], "must be a file below"),
        ([struct(None, "link.png")], "must be a file below"),
        ([struct(None, "/etc/passwd")], "must be a file below"),
        ([struct(None, "none.png")], "must be a file below"),
        ([struct(None, "folder")], "must be a file below"),
        ([struct(None, "a\0b")], "must be a file below"),
        ([struct(None, "pointer.png")], "must contain the data, got 'a Git LFS pointer'"),
        ([struct(None, "text.png")], "must be an image in the format PNG, JPEG, WEBP, GIF, BMP"),
        ([struct(b"%!PS-Adobe")], "must be an image in the format PNG"),
        ([struct(None)], "must be an image: bytes, or a path, got 'null'"),
        ([struct(picture(0)), None], "images[1] must be an image: bytes, or a path, got 'null'"),
    ],
)
def test_refusals_name_row_and_image(tmp_path: Path, images: Any, text: str) -> None:
    inner = tmp_path / "inner"
    (inner / "folder").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(picture(0))
    os.symlink(tmp_path / "secret.png", inner / "link.png")
    (inner / "text.png").write_text("text")
    (inner / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    rows = [verl_row(0, [struct(picture(0))]), verl_row(1, images)]
    source = write(inner / "train.parquet", rows, arrow.list_(IMAGE))
    with pytest.raises(DataError) as caught:
        open_source(source, tokenize={"prompt": encode})
    assert text in str(caught.value)
    place = f"{source}: row 1: images[{len(images) - 1}]"
    assert place in str(caught.value) or f"{inner / 'pointer.png'} must" in str(caught.value)
    reader = open_source(source, tokenize={"prompt": encode}, columns=["!images"])
    assert "images" not in ingest([reader], tmp_path / "set").schema


def test_images_of_a_program_need_their_bytes(tmp_path: Path) -> None:
    rows = [verl_row(0, [struct(None, "a.png")])]
    with pytest.raises(DataError, match="must have its bytes in rows of a program"):
        Dataset.from_iterable(rows, tmp_path / "set", tokenize={"prompt": encode})


def test_one_image_in_many_rows_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0) + bytes(1 << 20))
    rows = [verl_row(number, [struct(None, "a.png")]) for number in range(400)]
    source = write(tmp_path / "train.parquet", rows)
    with pytest.raises(DataError, match="columns of texts and objects must hold at most 1 bytes"):
        open_source(source, max_expansion=1, tokenize={"prompt": encode})


def test_zeros_after_large_values_take_no_disk(tmp_path: Path) -> None:
    large = picture(0) + np.random.default_rng(0).bytes(1 << 20)
    rows = [verl_row(i, [struct(large if i == 3 else picture(1))]) for i in range(8)]
    source = write(tmp_path / "train.parquet", rows)
    dataset = ingest([open_source(source, tokenize={"prompt": encode})], tmp_path / "set")
    dataset.verify()
    found = [image_files(dataset.trajectory(number)["images"]) for number in range(8)]
    assert found == [[large if number == 3 else picture(1)] for number in range(8)]
    facts = (tmp_path / "set" / "columns" / "images.npy").stat()
    assert facts.st_size > 8 << 20
    if facts.st_blocks * 512 > 2 << 20:
        pytest.skip("this file system has no files with holes")


def test_images_beside_a_remote_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "local"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "a.png").write_bytes(picture(0))
    rows = [verl_row(0, [struct(None, "images/a.png")])]
    source = write(folder / "train.parquet", rows, arrow.list_(IMAGE))
    local = ingest([open_source(source, tokenize={"prompt": encode})], tmp_path / "whole")
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        files = (file for file in folder.rglob("*") if file.is_file())
        server.repos["me/set"] = {
            file.relative_to(folder).as_posix(): file.read_bytes() for file in files
        }
        reader = open_source("hf://me/set", tokenize={"prompt": encode})
        assert ingest([reader], tmp_path / "remote").fingerprint == local.fingerprint


def test_packed_images(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [b"", b"one", b"two22"]
    value = pack_images(files)
    assert image_files(value) == files
    assert image_files(b"") == image_files(pack_images([])) == []
    for broken in (value[:-1], value + b"x", b"x", value[:20], b"\xff" * 16, bytes(8)):
        with pytest.raises(DataError, match="must be images as gear ingest packs them"):
            image_files(broken)
    with pytest.raises(DataError, match=r"images\[0\] must be an image in the format PNG"):
        open_images(pack_images([b"%!PS-Adobe"]))
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(DataError, match="pip install pillow"):
        open_images(value)
