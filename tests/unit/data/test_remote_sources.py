"""Sources on other machines: the rows of local files, fetched by ranges, whole or not at all."""

import gzip
import io
import json
import shutil
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from ingest_refusals import refused
from range_server import COMMIT, RangeServer, serving

from deepspeed_gear import Dataset
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.ingest import ingest, ingested, open_source
from deepspeed_gear.data.sources import remote_source, source_path
from deepspeed_gear.data.sources.block_cache import BLOCK_BYTES, BlockCache
from deepspeed_gear.data.sources.http_source import SafeRedirects
from deepspeed_gear.data.sources.opened_files import is_below
from deepspeed_gear.data.sources.ranged_file import RangedFile, RemoteBytes
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.data.sources.remote_source import RemoteSource
from deepspeed_gear.errors import DataError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "data"
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_source, "WAITS_S", (0.0, 0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as running:
        yield running


@pytest.fixture
def hub(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    """A server that huggingface_hub takes for the hub."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return server


def steps(num_rows: int = 400, wide: int = 0) -> Any:
    random = np.random.default_rng(0)
    columns = {
        "episode_index": np.arange(num_rows) // 25,
        "observation": list(random.random((num_rows, 3 + wide))),
        "action": list(random.random((num_rows, 2))),
        "reward": random.random(num_rows),
        "terminated": np.arange(num_rows) % 25 == 24,
    }
    return arrow.table({name: arrow.array(rows) for name, rows in columns.items()})


def write_forms(folder: Path) -> list[str]:
    """Write a source of each form; return their names."""
    table = steps()
    parquet.write_table(table, folder / "steps.parquet", row_group_size=50)
    with arrow.ipc.new_file(str(folder / "steps.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (folder / "steps.jsonl").write_text(lines)
    (folder / "steps.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    rows = zip(*(table[name].to_pylist() for name in ("episode_index", "reward")), strict=True)
    texts = (f"{number},{reward},{reward},{reward}\n" for number, reward in rows)
    (folder / "steps.csv").write_text(f"episode_index,observation,action,reward\n{''.join(texts)}")
    for number in range(2):
        (folder / "shards").mkdir(exist_ok=True)
        part = table.slice(200 * number, 200)
        parquet.write_table(part, folder / "shards" / f"train-{number}.parquet")
    for name in ("hopper_medium.hdf5", "cartpole_expert.npz"):
        shutil.copy(EXAMPLES / name, folder / name)
    plain = str(folder.parent / "plain")
    ingest(folder / "steps.parquet", plain)
    assert main(["export", plain, str(folder / "exported.npz"), "--format", "npz"]) == 0
    names = "steps.parquet steps.arrow steps.jsonl steps.jsonl.gz steps.csv shards"
    return [*names.split(), "hopper_medium.hdf5", "cartpole_expert.npz", "exported.npz"]


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def refusal(*sources: Any, dest: Path, **options: Any) -> str:
    """Return the error of an ingest, which leaves nothing and no credentials."""
    text = refused([*sources], dest, **options)
    assert "secret" not in text
    assert "; " in text  # the remedy
    return text


def test_every_form_has_the_rows_of_the_local_file(tmp_path: Path, hub: RangeServer) -> None:
    local = tmp_path / "local"
    local.mkdir()
    forms = write_forms(local)
    hub.repos["me/set"] = contents(local)
    hub.files = {f"/files/{name}": content for name, content in contents(local).items()}
    for number, name in enumerate(forms):
        whole = ingest(local / name, tmp_path / f"{number}")
        addresses = [f"hf://me/set/{name}"]
        addresses += [f"{hub.url}/files/{name}"] if name != "shards" else []
        for address in addresses:
            dataset = ingest(address, tmp_path / "remote", overwrite=True)
            assert dataset.fingerprint == whole.fingerprint, address


def test_a_lerobot_folder_with_videos(tmp_path: Path, hub: RangeServer) -> None:
    pytest.importorskip("av")
    hub.repos["me/robot"] = contents(EXAMPLES / "lerobot_v3")
    local = ingest(EXAMPLES / "lerobot_v3", tmp_path / "local")
    remote = ingest("hf://datasets/me/robot@v1", tmp_path / "remote")
    assert remote.fingerprint == local.fingerprint
    source = json.loads((tmp_path / "remote" / "schema.json").read_text())["source"]["sources"][0]
    assert source["url"] == "hf://datasets/me/robot"
    assert source["revision"] == COMMIT


def test_shards_that_a_pattern_of_braces_names(tmp_path: Path, hub: RangeServer) -> None:
    files = {}
    for number in range(12):
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as archive:
            text = json.dumps({"episode": 0, "obs": [0.5], "action": 1, "reward": 0.5, "n": number})
            member = tarfile.TarInfo(f"{number:03}.json")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        files[f"part-{number}.tar"] = (tmp_path / f"part-{number}.tar").read_bytes()
    hub.repos["me/set"] = {f"{of}/{name}": files[name] for of in "ab" for name in files}
    expected = ingest([tmp_path / "part-{0..11}.tar"], tmp_path / "out")
    assert expected.trajectory(0)["n"].tolist() == [*range(12)]
    read = ingest(["hf://me/set@main/a/part-{0..11}.tar"], tmp_path / "remote")
    assert read.fingerprint == expected.fingerprint
    both = ingest(["hf://me/set/{b,a}/part-{0..5}.tar"], tmp_path / "both")
    assert both.trajectory(0)["n"].tolist() == [*range(6), *range(6)]
    with pytest.raises(DataError, match=r"hf://datasets/me/set/a/part-12\.tar must exist"):
        ingest(["hf://me/set/a/part-{11..12}.tar"], tmp_path / "none")


def test_a_zarr_store_as_a_folder_and_as_a_zip_file(tmp_path: Path, hub: RangeServer) -> None:
    source = EXAMPLES.parents[1] / "tests/support/formats/mini_zarr/sharded.zarr.zip"
    local = ingest(source, tmp_path / "local")
    shutil.unpack_archive(source, tmp_path / "store")
    hub.repos["me/store"] = contents(tmp_path / "store")
    assert ingest("hf://me/store", tmp_path / "folder").fingerprint == local.fingerprint
    hub.files["/store.zarr.zip"] = source.read_bytes()
    zipped = ingest(f"{hub.url}/store.zarr.zip", tmp_path / "zip")
    assert zipped.fingerprint == local.fingerprint


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_a_minari_folder(
    tmp_path: Path, hub: RangeServer, minari: Callable[..., Any], form: str
) -> None:
    folder = tmp_path / "set"
    minari(folder, form, (3, 7, 1))
    local = ingest(folder, tmp_path / "local")
    hub.repos["me/minari"] = contents(folder)
    assert ingest("hf://me/minari", tmp_path / "remote").fingerprint == local.fingerprint


def test_a_cut_connection_continues_at_its_byte(tmp_path: Path, server: RangeServer) -> None:
    content = (EXAMPLES / "hopper_medium.hdf5").read_bytes()
    server.files["/medium.hdf5"] = content
    server.cuts = [0, 100_000, 70_001, 1]
    local = ingest(EXAMPLES / "hopper_medium.hdf5", tmp_path / "local")
    address = f"{server.url}/medium.hdf5"
    reader = open_source(address)
    assert ingest([reader], tmp_path / "remote").fingerprint == local.fingerprint
    assert not server.cuts
    source = reader.path.source  # type: ignore[attr-defined]
    assert source.num_bytes <= len(content)  # no byte twice, although it is read in two passes
    assert source.num_retries == 4
    ranges = server.ranges()[1:]
    first, last = ranges[0]
    assert ranges[1:5] == [(first, last), (100_000, last), (170_001, last), (170_002, last)]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"cuts": [0] * 50}, "must answer in one of 4 attempts, got 'the connection ended"),
        ({"statuses": [503] * 50}, "must answer in one of 4 attempts, got 'status 503'"),
        ({"statuses": [403]}, "must be readable from its server, got 'status 403'"),
        ({"statuses": [404]}, "must exist"),
        ({"statuses": [412]}, "must not change"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    tmp_path: Path, server: RangeServer, fault: dict[str, Any], text: str
) -> None:
    server.files["/medium.hdf5"] = (EXAMPLES / "hopper_medium.hdf5").read_bytes()
    reader = open_source(f"{server.url}/medium.hdf5?token=secret")
    reader.path.source.cache.close()  # type: ignore[attr-defined]
    for name, value in fault.items():
        setattr(server, name, value)
    assert text in refusal(reader, dest=tmp_path / "set")


def test_faults_while_a_source_is_opened(tmp_path: Path, server: RangeServer) -> None:
    parquet.write_table(steps(), tmp_path / "steps.parquet")
    server.files["/steps.parquet"] = (tmp_path / "steps.parquet").read_bytes()
    server.statuses = [500, 429, 503]
    address = server.url.replace("http://", "http://me:secret@") + "/steps.parquet?key=secret"
    local = ingest(tmp_path / "steps.parquet", tmp_path / "local")
    assert ingest(address, tmp_path / "remote").fingerprint == local.fingerprint
    assert server.requests[-1][1]["authorization"].startswith("Basic ")
    assert server.requests[-1][0].endswith("?key=secret")
    for content in contents(tmp_path / "remote").values():
        assert b"secret" not in content
    server.statuses = [401]
    assert "must be readable" in refusal(address, dest=tmp_path / "other")
    server.files.clear()
    assert "must exist" in refusal(address, dest=tmp_path / "other")
    server.server_close()
    assert "no connection" in refusal(address, dest=tmp_path / "other")


def test_a_server_without_ranges_sends_the_file_once(tmp_path: Path, server: RangeServer) -> None:
    server.has_ranges = False
    content = (EXAMPLES / "hopper_medium.hdf5").read_bytes()
    server.files["/medium.hdf5"] = content
    local = ingest(EXAMPLES / "hopper_medium.hdf5", tmp_path / "local")
    reader = open_source(f"{server.url}/medium.hdf5")
    assert ingest([reader], tmp_path / "remote").fingerprint == local.fingerprint
    assert len(server.requests) == 2  # for the size, and for the file
    server.cuts = [1, 300_000]
    again = ingest(f"{server.url}/medium.hdf5", tmp_path / "again")
    assert again.fingerprint == local.fingerprint


def test_a_file_that_changes_is_refused(tmp_path: Path, server: RangeServer) -> None:
    server.files["/medium.hdf5"] = (EXAMPLES / "hopper_medium.hdf5").read_bytes()
    reader = open_source(f"{server.url}/medium.hdf5")
    reader.path.source.cache.close()  # type: ignore[attr-defined]
    server.files["/medium.hdf5"] = server.files["/medium.hdf5"][:-1] + b"x"
    assert "must not change" in refusal(reader, dest=tmp_path / "set")


def test_redirects_take_no_credentials_to_other_hosts(tmp_path: Path, hub: RangeServer) -> None:
    parquet.write_table(steps(), tmp_path / "steps.parquet")
    content = (tmp_path / "steps.parquet").read_bytes()
    hub.repos["me/set"] = {"data/steps.parquet": content}
    with serving({"/blob": content}) as storage:
        place = f"/datasets/me/set/resolve/{COMMIT}/data/steps.parquet"
        hub.redirects[place] = f"{storage.url}/blob?signature=secret"
        local = ingest(tmp_path / "steps.parquet", tmp_path / "local")
        remote = ingest("hf://me/set/data/*.parquet", tmp_path / "remote")
        assert remote.fingerprint == local.fingerprint
        asked = [headers for path, headers in hub.requests if path == place]
        assert asked
        assert {headers["authorization"] for headers in asked} == {"Bearer hf_secret"}
        assert not any("authorization" in headers for _, headers in storage.requests)
        # Signed addresses expire: the next request begins with the address of the hub.
        large = (EXAMPLES / "hopper_medium.hdf5").read_bytes()
        hub.repos["me/set"]["data/steps.parquet"] = storage.files["/blob"] = large
        with source_path("hf://me/set/data/steps.parquet").open("rb") as file:
            assert file.read(10) == large[:10]
            storage.statuses = [403]
            assert file.read() == large[10:]
        assert not storage.statuses
    assert not any(b"secret" in one for one in contents(tmp_path / "remote").values())


def test_https_is_not_left() -> None:
    handler = SafeRedirects("https://host/name")
    request = urllib.request.Request("https://host/name")
    for target in ("http://host/name", "ftp://host/name", "file:///etc/passwd"):
        with pytest.raises(DataError, match="must stay on https, got 'a redirect to"):
            handler.redirect_request(request, io.BytesIO(), 302, "", {}, target)


def test_only_what_is_read_is_fetched(tmp_path: Path, server: RangeServer) -> None:
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "wide.hdf5", "w") as file:
        file["observations"] = random.random((100, 3))
        file["actions"] = random.random((100, 2))
        file["rewards"] = random.random(100)
        file["terminals"] = np.arange(100) % 10 == 9
        file["timeouts"] = np.zeros(100, bool)
        file["infos/pixels"] = random.integers(0, 255, (100, 80_000), dtype=np.uint8)
    server.files["/wide.hdf5"] = (tmp_path / "wide.hdf5").read_bytes()
    reader = open_source(f"{server.url}/wide.hdf5", columns=[])
    local = ingest(tmp_path / "wide.hdf5", tmp_path / "local", columns=[])
    assert ingest([reader], tmp_path / "remote").fingerprint == local.fingerprint
    assert reader.path.source.num_bytes <= 8 * BLOCK_BYTES  # type: ignore[attr-defined]
    assert len(server.files["/wide.hdf5"]) > 30 * BLOCK_BYTES


def test_the_command_shows_bytes_and_no_credentials(
    tmp_path: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet.write_table(steps(), tmp_path / "steps.parquet")
    server.files["/steps.parquet"] = (tmp_path / "steps.parquet").read_bytes()
    address = server.url.replace("http://", "http://me:secret@") + "/steps.parquet?key=secret"
    assert main(["ingest", address, str(tmp_path / "set")]) == 0
    out, err = capsys.readouterr()
    assert "16 trajectories, 400 steps" in out
    assert "fetch (at most" in err
    assert "requests, 0 of them repeated" in err
    assert "secret" not in out + err
    assert main(["ingest", str(tmp_path / "set"), "s3://bucket/set"]) == 2
    assert "DEST must be on this machine" in capsys.readouterr().err
    assert main(["ingest", address.replace("steps", "none"), str(tmp_path / "no")]) == 2
    err = capsys.readouterr().err
    assert "must exist" in err
    assert "secret" not in err
    assert not (tmp_path / "no").exists()
    with pytest.raises(DataError, match="a data set must be on this machine, got 'hf://'"):
        ingested("hf://me/set")
    with pytest.raises(DataError, match="must be on this machine"):
        ingest(tmp_path / "steps.parquet", "gs://bucket/set")


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("ftp://host/name", "ftp:// must be one of hf://, s3://, gs://, https://, http://"),
        ("https://host/", "https://host/ must be the address of a file"),
        ("https://me:secret@host/folder/", "must be the address of a file"),
        ("https://host/data-*.parquet", "must not be a pattern"),
        ("hf://models/me/set", "must be a data set"),
        ("hf://set", "must be hf://OWNER/NAME"),
        ("hf://secret@me/set", "hf://me/set must be hf://OWNER/NAME"),
        ("hf://me/set/a?token=secret", "must be hf://OWNER/NAME"),
        ("s3://me:secret@bucket/name", "s3://bucket must be s3://BUCKET/PATH"),
        ("s3://bucket/name?X-Amz-Signature=secret", "must be s3://BUCKET/PATH"),
        ("gs://", "must be gs://BUCKET/PATH"),
    ],
)
def test_malformed_addresses(tmp_path: Path, address: str, text: str) -> None:
    assert text in refusal(address, dest=tmp_path / "set")


@pytest.mark.parametrize(
    ("address", "module", "package"),
    [
        ("hf://me/set", "huggingface_hub", "huggingface_hub"),
        ("s3://bucket/name", "s3fs", "s3fs"),
        ("gs://bucket/name", "gcsfs", "gcsfs"),
    ],
)
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, module: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    text = refusal(address, dest=tmp_path / "set")
    assert f"needs {package}; pip install 'deepspeed_gear[cloud]'" in text


def test_refusals_of_the_hub(tmp_path: Path, hub: RangeServer) -> None:
    hub.repos["me/set"] = {"data/a.parquet": b"x", "README.md": b"x"}
    dest = tmp_path / "set"
    assert "must be readable on the hub" in refusal("hf://me/other", dest=dest)
    assert "must have the revision, got 'v9'" in refusal("hf://me/set@v9", dest=dest)
    assert "must exist" in refusal("hf://me/set/none.parquet", dest=dest)
    assert "must contain files" in refusal("hf://me/set/data/*.csv", dest=dest)
    hub.statuses = [503] * 50
    assert "must answer in one of 4 attempts, got 'status 503'" in refusal("hf://me/set", dest=dest)


def test_parts_of_a_hub_data_set(hub: RangeServer) -> None:
    names = ("README.md", "data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet")
    hub.repos["me/set"] = {name: name.encode() for name in names}

    def files(address: str) -> list[str]:
        path = source_path(address)
        assert path.source.revision == COMMIT
        return [str(file) for file in path.files_below()]

    root = "hf://datasets/me/set"
    assert files("hf://me/set") == sorted(f"{root}/{name}" for name in names)
    assert files("hf://datasets/me/set@main/data") == sorted(f"{root}/{n}" for n in names[1:])
    assert files("hf://me/set@refs/convert/parquet/data/train-?.parquet") == [
        f"{root}/{name}" for name in names[1:3]
    ]
    assert files("hf://me/set/README.md") == [f"{root}/README.md"]


class Bucket:
    """A file system of fsspec's interface, with faults."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        fsspec = pytest.importorskip("fsspec")
        self.memory = fsspec.filesystem("memory", skip_instance_cache=True)
        self.memory.store = dict.fromkeys(())
        for name, content in objects.items():
            self.memory.pipe(f"/{name}", content)
        self.faults: list[Exception] = []
        self.reads: list[tuple[int, int]] = []

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        return {**info, "name": info["name"].lstrip("/"), "ETag": '"tag"'}

    def info(self, path: str) -> dict[str, Any]:
        if self.faults:
            raise self.faults.pop()
        return self._info(self.memory.info(f"/{path}"))

    def find(self, path: str, detail: bool) -> dict[str, Any]:
        found = self.memory.find(f"/{path}", detail=True)
        return {name.lstrip("/"): self._info(info) for name, info in found.items()}

    def glob(self, path: str, detail: bool) -> dict[str, Any]:
        found = self.memory.glob(f"/{path}", detail=True)
        return {name.lstrip("/"): self._info(info) for name, info in found.items()}

    def open(self, path: str, mode: str, cache_type: str) -> Any:
        file = self.memory.open(f"/{path}", mode)

        def read(count: int) -> bytes:
            if self.faults:
                raise self.faults.pop()
            self.reads.append((file.tell(), count))
            content: bytes = file.read(count)
            return content

        return SimpleNamespace(seek=file.seek, read=read)


def test_objects_folders_and_patterns_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    write_forms(local)
    bucket = Bucket({f"bucket/{name}": content for name, content in contents(local).items()})
    monkeypatch.setattr("fsspec.filesystem", lambda _: bucket)
    addresses = {
        "s3://bucket/steps.parquet": "steps.parquet",
        "gs://bucket/shards/": "shards",
        "s3://bucket/shards/train-*.parquet": "shards",
        "s3://bucket/hopper_medium.hdf5": "hopper_medium.hdf5",
    }
    for number, (address, name) in enumerate(addresses.items()):
        dest = tmp_path / f"local-{number}"
        whole = ingest(local / name, dest)
        bucket.faults = [OSError("https://host/?signature=secret")]
        remote = ingest(address, tmp_path / f"remote-{number}")
        assert remote.fingerprint == whole.fingerprint
    assert max(count for _, count in bucket.reads) <= 8 << 20
    record = json.loads((tmp_path / "remote-0" / "schema.json").read_text())["source"]["sources"]
    assert record[0]["revision"] == "tag"
    dest = tmp_path / "set"
    assert "must exist" in refusal("s3://bucket/none.parquet", dest=dest)
    assert "must contain files" in refusal("s3://bucket/*.none", dest=dest)
    bucket.faults = [PermissionError("secret")]
    assert "must be readable, got 'PermissionError'" in refusal("s3://bucket/shards", dest=dest)
    bucket.faults = [OSError("secret")] * 50
    assert "got 'a failed request (OSError)'" in refusal("s3://bucket/shards", dest=dest)
    FileExpired = type("FileExpired", (Exception,), {})
    reader = open_source("s3://bucket/hopper_medium.hdf5") if not bucket.faults.clear() else None
    reader.path.source.cache.close()  # type: ignore[union-attr, attr-defined]
    bucket.faults = [FileExpired("secret")]
    assert "must not change" in refusal(reader, dest=dest)


class Held(RemoteSource):
    """A source whose files are in memory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("mem://host/folder")
        self.contents = files
        for name, content in files.items():
            self.add_file(name, len(content), "")

    def range_reader(self, name: str) -> Callable[[int, int], Iterator[bytes]]:
        return lambda low, high: iter([self.contents[name][low:high]])


def test_a_remote_path_is_a_path(tmp_path: Path) -> None:
    files = {"a/b.txt": b"one\ntwo\n", "a/c/d.json": b"{}", "e.json": b"[]"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    remote = RemotePath(Held(files), "")

    def names(root: Path, paths: Any) -> list[str]:
        return [path.relative_to(root).as_posix() for path in sorted(paths)]

    for root in (tmp_path, remote):
        assert names(root, root.iterdir()) == ["a", "e.json"]
        assert names(root, root.glob("*.json")) == ["e.json"]
        assert names(root, root.glob("*/*.txt")) == ["a/b.txt"]
        assert names(root, root.rglob("*.json")) == ["a/c/d.json", "e.json"]
        path = root / "a" / "b.txt"
        assert (path.name, path.suffix, path.stem) == ("b.txt", ".txt", "b")
        assert path.is_file()
        assert not path.is_dir()
        assert path.parent == root / Path("a")
        assert path.parent.is_dir()
        assert path.parent.parent == root
        assert path.stat().st_size == 8
        assert path.read_text() == "one\ntwo\n"
        assert path.read_bytes() == b"one\ntwo\n"
        assert path.with_suffix(".json").name == "b.json"
        assert path.with_name("c").is_dir()
        assert not (path / "x").exists()
        assert not (root / "none").exists()
        assert root.joinpath("a", "c", "d.json").exists()
        assert path in {path}
        assert is_below(path, root)
        with path.open("rb") as file:
            assert file.readline() == b"one\n"
            assert file.seek(-4, io.SEEK_END) == 4
            assert file.read() == b"two\n"
            assert file.read() == b""
        with pytest.raises(OSError, match="none"):
            (root / "none").open("rb")
    path = remote / "a" / "b.txt"
    assert str(path) == "mem://host/folder/a/b.txt"
    assert path.relative_to(remote) == PurePosixPath("a/b.txt")
    assert not is_below(remote / ".." / "x", remote)
    for use in (lambda: h5py.File(path, "r"), lambda: zipfile.ZipFile(path), lambda: np.load(path)):
        with pytest.raises(DataError, match=r"b.txt must be opened with path\.open\(\)"):
            use()
    with pytest.raises(DataError, match="must be opened for reading"):
        path.open("wb")
    with pytest.raises(DataError, match=r"must have a name without empty parts"):
        Held({"a/../../etc/passwd": b""})


@pytest.mark.parametrize("most_blocks", [0, 1, 3, 1000])
def test_ranges_of_any_place_and_cache(most_blocks: int) -> None:
    content = np.random.default_rng(0).bytes(40 * BLOCK_BYTES + 17)
    source = Held({"x": content})
    source.cache = BlockCache(most_blocks)
    file = RangedFile(source, "x")
    places = [(0, 1), (BLOCK_BYTES - 1, 2), (0, len(content)), (len(content) - 1, 5)]
    places += [(5 * BLOCK_BYTES, 3 * BLOCK_BYTES + 1), (7, 0), (len(content) + 5, 3)]
    for at, count in places:
        file.seek(at)
        assert file.read(count) == content[at : at + count]
    if most_blocks == 1000:
        assert source.num_bytes == len(content)
        assert source.num_requests < 12
    part = RemoteBytes.whole(source, "x")[1000:-1000]
    assert (len(part), part[0], part[-1 + len(part)]) == (
        len(content) - 2000,
        content[1000],
        content[-1001],
    )
    assert part[300:700].tobytes() == content[1300:1700]
    with pytest.raises(IndexError):
        part[len(part)]
    source.close()


def test_a_user_of_a_dataset_sees_its_origin(tmp_path: Path, hub: RangeServer) -> None:
    parquet.write_table(steps(), tmp_path / "steps.parquet")
    content = (tmp_path / "steps.parquet").read_bytes()
    hub.repos["me/set"] = {"a.parquet": content}
    ingest(["hf://me/set/a.parquet", str(tmp_path / "steps.parquet")], tmp_path / "set")
    both = Dataset.open(tmp_path / "set")
    assert len(both) == 32
    sources = json.loads((tmp_path / "set" / "schema.json").read_text())["source"]["sources"]
    assert sources[0]["url"] == "hf://datasets/me/set/a.parquet"
    assert "url" not in sources[1]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes], None]]:
    """moto's server of S3 with an empty bucket; returns what puts an object into it."""
    moto = pytest.importorskip("moto.server", reason="moto[server,s3] is in no extra")
    s3fs = pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    values = {
        "AWS_ACCESS_KEY_ID": "name",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield lambda key, content: client.put_object(Bucket="bucket", Key=key, Body=content)
    server.stop()


def test_a_bucket_of_an_s3_server(tmp_path: Path, s3: Callable[[str, bytes], None]) -> None:
    local = tmp_path / "local"
    local.mkdir()
    write_forms(local)
    for name, content in contents(local).items():
        s3(f"data/{name}", content)
    for address, name in {
        "s3://bucket/data/steps.parquet": "steps.parquet",
        "s3://bucket/data/shards": "shards",
        "s3://bucket/data/shards/*.parquet": "shards",
        "s3://bucket/data/hopper_medium.hdf5": "hopper_medium.hdf5",
        "s3://bucket/data/cartpole_expert.npz": "cartpole_expert.npz",
    }.items():
        whole = ingest(local / name, tmp_path / "whole", overwrite=True)
        remote = ingest(address, tmp_path / "remote", overwrite=True)
        assert remote.fingerprint == whole.fingerprint, address
    record = (tmp_path / "remote" / "schema.json").read_text()
    assert json.loads(record)["source"]["sources"][0]["revision"]
    assert "secret" not in record
    dest = tmp_path / "set"
    assert "must exist" in refusal("s3://bucket/data/none.parquet", dest=dest)
    assert "must exist" in refusal("s3://none/data", dest=dest)
    # An object that is replaced between two reads has another ETag.
    reader = open_source("s3://bucket/data/hopper_medium.hdf5")
    reader.path.source.cache.close()  # type: ignore[attr-defined]
    s3("data/hopper_medium.hdf5", b"x" * 3_000_000)
    assert "must not change" in refusal(reader, dest=dest)
