"""Weights of a run's policy board arrive on other machines as whole versions, to the bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from gear_support import wait_until
from remote_support import (
    SCHEMA,
    TOKEN,
    WRONG,
    Proxy,
    section,
    serve,
    served,
    serving,
    write_run,
)
from torch import nn

from deepspeed_gear import PolicyBoard, RemotePolicyBoard, Replay
from deepspeed_gear.errors import DataError, LostNodeError, NotReadyError, StoreError
from deepspeed_gear.remote import board_downloads, remote_policy_board
from deepspeed_gear.remote import remote_policy_board as client_module
from deepspeed_gear.remote.board_downloads import BoardDownloads, VersionCopy
from deepspeed_gear.remote.connection import Connection
from deepspeed_gear.remote.gateway_messages import VERSION

CHUNK = 1 << 12


def policy(value: float | None = None, width: int = 1000) -> nn.Module:
    """Make a module of three dtypes; without a value, with random ones."""
    torch.manual_seed(7)
    first = nn.Linear(10, width).bfloat16()
    made = nn.Sequential(first, nn.BatchNorm1d(width), nn.Linear(width, 2).double())
    for tensor in made.state_dict().values() if value is not None else ():
        tensor.fill_(value)
    return made


def value_of(module: nn.Module) -> float:
    """Return the one value that all of a module's parameters and buffers have."""
    state = [t.flatten().double() for t in module.state_dict().values() if t.is_floating_point()]
    values = torch.cat(state).unique()
    assert len(values) == 1, f"torn: {len(values)} values"
    return float(values[0])


def connect(url: str, **options: Any) -> RemotePolicyBoard:
    given = {"token": TOKEN, "timeout_s": 20.0, "poll_s": 0.0, **options}
    return RemotePolicyBoard.connect(url, **given)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_downloads, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def scene() -> Iterator[tuple[Replay, PolicyBoard, str]]:
    """Run a table, its board and its gateway in this process."""
    with ExitStack() as stack:
        replay, gateway = stack.enter_context(served(section()))
        board = stack.enter_context(PolicyBoard.create(policy(1.0), replay))
        yield replay, board, gateway.url


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the chunks that the gateway is asked for, as they come."""
    asked = list[int]()
    whole = BoardDownloads.chunk

    def chunk(self: BoardDownloads, header: Any, content: pa.Buffer) -> dict[str, Any]:
        asked.append(header["chunk"])
        return whole(self, header, content)

    monkeypatch.setattr(BoardDownloads, "chunk", chunk)
    return asked


def after_chunk(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act once, when a download has so many chunks."""
    take = client_module.Download.take
    acts = [act]

    def acting(self: Any, answer: dict[str, Any]) -> None:
        take(self, answer)
        if self.next == number and acts:
            acts.pop()()

    monkeypatch.setattr(client_module.Download, "take", acting)


def test_local_and_remote_workers_load_the_same_bits(
    scene: tuple[Replay, PolicyBoard, str], chunks: list[int]
) -> None:
    _, board, url = scene
    board.publish(policy())
    local = policy(0.0)
    remote = policy(0.0)
    with PolicyBoard.attach(section()) as near, connect(url) as far:
        assert near.name == board.name
        assert (near.load_into(local), far.load_into(remote)) == (2, 2)
        assert chunks == list(range(-(-board.tensors.num_bytes // CHUNK)))
        for wanted, *found in zip(
            policy().state_dict().values(),
            local.state_dict().values(),
            remote.state_dict().values(),
            strict=True,
        ):
            assert all(torch.equal(wanted, one) for one in found if wanted.is_floating_point())
        assert (far.version, far.is_published, far.loaded) == (2, True, 2)
        assert far.load_into(remote) == 2  # nothing newer: no byte comes
        assert len(chunks) == board.tensors.num_bytes // CHUNK + 1
        wide = policy(0.0).double()
        board.publish(policy(3.0))
        assert (far.load_into(wide), value_of(wide)) == (3, 3.0)


def test_a_board_of_bfloat16_sends_two_bytes_a_parameter(chunks: list[int]) -> None:
    with served(section()) as (replay, gateway):
        module = nn.Linear(64, 256, bias=False).bfloat16()
        with PolicyBoard.create(module, replay) as board, connect(gateway.url) as far:
            assert board.tensors.num_bytes == 2 * 64 * 256
            found = nn.Linear(64, 256, bias=False).bfloat16()
            assert far.load_into(found) == 1
            assert len(chunks) * CHUNK == 2 * 64 * 256
            assert torch.equal(found.weight, module.weight)


def test_what_is_published_during_a_download_comes_with_the_next(
    scene: tuple[Replay, PolicyBoard, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots of the board are overwritten, and the version that was begun arrives whole."""
    _, board, url = scene
    after_chunk(2, lambda: [board.publish(policy(float(n))) for n in range(2, 7)], monkeypatch)
    module = policy(0.0)
    with connect(url) as far:
        assert (far.load_into(module), value_of(module)) == (1, 1.0)
        assert (far.load_into(module), value_of(module)) == (6, 6.0)


def test_readers_never_mix_versions_beside_a_publisher(
    scene: tuple[Replay, PolicyBoard, str],
) -> None:
    _, board, url = scene
    ended = threading.Event()
    loads = list[list[int]]()
    failures = list[Exception]()

    def read() -> None:
        try:
            module = policy(0.0)
            mine = list[int]()
            with connect(url) as far:
                while len(set(mine)) < 6:
                    mine.append(far.load_into(module))
                    assert value_of(module) == mine[-1] % 8
            loads.append(mine)
        except Exception as error:
            failures.append(error)

    modules = [policy(float(value)) for value in range(8)]
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        board.publish(modules[(board.version + 1) % 8])
        ended.wait(0.005)
    assert not failures, failures
    assert all(mine == sorted(mine) for mine in loads)


def test_a_download_continues_where_its_connection_was_cut(
    scene: tuple[Replay, PolicyBoard, str], chunks: list[int]
) -> None:
    _, board, url = scene
    num_bytes = board.tensors.num_bytes
    cuts = [int(part * num_bytes) for part in (0.3, 0.6, 0.9)]
    proxy = Proxy(int(url.rpartition(":")[2]), cuts)
    module = policy(0.0)
    try:
        with connect(f"grpc://127.0.0.1:{proxy.port}") as far:
            assert (far.load_into(module), value_of(module)) == (1, 1.0)
    finally:
        proxy.close()
    assert proxy.num_cuts == 3
    again = len(chunks) - len(set(chunks))
    assert again <= 3, chunks  # at most the chunk of each cut
    assert chunks == sorted(chunks)


def fail(*_: object, **__: object) -> None:
    raise LostNodeError("gateway", "must answer")


def test_a_download_continues_after_the_gateway_was_out_of_reach(
    scene: tuple[Replay, PolicyBoard, str], chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, board, url = scene
    after_chunk(3, fail, monkeypatch)
    module = policy(0.0)
    with connect(url) as far:
        with pytest.raises(LostNodeError):
            far.load_into(module)
        assert value_of(module) == 0.0
        board.publish(policy(2.0))
        assert (far.load_into(module), value_of(module)) == (1, 1.0)  # still held: completed
        assert chunks == list(range(len(chunks)))
        assert (far.load_into(module), value_of(module)) == (2, 2.0)


def test_a_download_begins_again_where_the_gateway_was_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = policy(0.0)
    with (
        Replay(section(), schemas={"main": SCHEMA}) as replay,
        PolicyBoard.create(policy(1.0), replay) as board,
    ):
        with serving(section()) as gateway:
            far = connect(gateway.url)
            after_chunk(3, fail, monkeypatch)
            with pytest.raises(LostNodeError):
                far.load_into(module)
        board.publish(policy(2.0))
        with serving(section(), port=gateway.port), far:
            assert value_of(module) == 0.0
            assert (far.load_into(module), value_of(module)) == (2, 2.0)


def test_a_module_of_other_parameters_is_refused_before_anything_comes(
    scene: tuple[Replay, PolicyBoard, str], chunks: list[int]
) -> None:
    _, _, url = scene
    renamed = nn.Sequential(policy(0.0))
    fewer = nn.Sequential(*list(policy(0.0).children())[:2])
    with connect(url) as far:
        for module in (policy(0.0, width=999), renamed, fewer):
            with pytest.raises(DataError, match="must have the parameters that the board was made"):
                far.load_into(module)
            assert value_of(module) == 0.0
        assert chunks == []
        with pytest.raises(DataError, match=r"without .*'2.weight'"):
            far.load_into(fewer)


def test_a_chunk_with_another_checksum_is_fetched_again(
    scene: tuple[Replay, PolicyBoard, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, board, url = scene
    whole = VersionCopy.chunk
    faults = list(range(2))

    def damaged(self: VersionCopy, index: int) -> tuple[str, memoryview]:
        digest, part = whole(self, index)
        if index == 2 and faults:
            faults.pop()
            return digest, memoryview(bytes(len(part)))
        return digest, part

    monkeypatch.setattr(VersionCopy, "chunk", damaged)
    module = policy(0.0)
    with connect(url) as far:
        assert (far.load_into(module), value_of(module)) == (1, 1.0)
        board.publish(policy(2.0))
        faults += range(3)
        rule = "chunk 2 of version 2 must arrive with its checksum within 3 calls"
        with pytest.raises(StoreError, match=rule):
            far.load_into(module)
        assert value_of(module) == 1.0
        assert (far.load_into(module), value_of(module)) == (2, 2.0)


def test_a_version_with_another_checksum_than_its_publishers_is_an_error(
    scene: tuple[Replay, PolicyBoard, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, url = scene
    whole = VersionCopy.chunk

    def damaged(self: VersionCopy, index: int) -> tuple[str, memoryview]:
        self._values[0] = 99  # after the copy was checked
        return whole(self, index)

    monkeypatch.setattr(VersionCopy, "chunk", damaged)
    module = policy(0.0)
    with connect(url) as far:
        with pytest.raises(StoreError, match="must have the checksum of its publisher"):
            far.load_into(module)
        assert value_of(module) == 0.0


def test_refusals_of_a_connection(scene: tuple[Replay, PolicyBoard, str]) -> None:
    _, board, url = scene
    with pytest.raises(StoreError, match="must match the gateway's token"):
        connect(url, token=WRONG)
    board.close()
    with pytest.raises(StoreError, match=r"must have a policy board within 0.3 s; call Policy"):
        connect(url, timeout_s=0.3)
    with pytest.raises(LostNodeError, match=r"must answer within 0.2 s"):
        connect("grpc://127.0.0.1:1", timeout_s=0.2)
    line = Connection(url, TOKEN)
    for action, header, text in (
        ("board", {"version": VERSION - 1}, "must have protocol version"),
        ("weights", {"client": "c" * 65}, "must have a name of at most 64 characters"),
        ("chunk", {"client": "c", "chunk": -1}, "must be an integer of at least 0"),
        ("chunk", {"client": "c", "chunk": "0"}, "must be an integer of at least 0"),
    ):
        with pytest.raises((StoreError, ValueError), match=text):
            line.call_again(action, header, 5.0)
    strange = {"client": "c", "chunk": 0, "board": ["x"], "of": {}}
    assert line.call_again("chunk", strange, 5.0)["gone"]
    assert line.call_again("weights", {"client": "c", "known": 3}, 5.0)["board"] is None
    line.hang_up()


def test_a_worker_waits_for_a_board_and_follows_the_next_one() -> None:
    """A board that is created later; its end; and another one of the same run."""
    with served(section()) as (replay, gateway):
        boards = list[PolicyBoard]()
        late = threading.Timer(0.3, lambda: boards.append(PolicyBoard.create(policy(1.0), replay)))
        late.start()
        module = policy(0.0)
        with connect(gateway.url) as far, PolicyBoard.attach(section()) as near:
            late.join()
            assert (far.load_into(module), value_of(module)) == (1, 1.0)
            boards[0].publish(policy(5.0))
            boards[0].close()
            assert not far.is_published
            assert not near.is_published
            assert (far.load_into(module), value_of(module)) == (2, 5.0)
            with PolicyBoard.create(policy(3.0), replay, version=2):
                wait_until(lambda: far.load_into(module) and value_of(module) == 3.0, "the board")
                assert (far.loaded, far.is_published) == (2, True)
                assert (near.load_into(module), value_of(module)) == (2, 3.0)


def test_without_a_newer_version_a_worker_does_not_call_at_every_step(
    scene: tuple[Replay, PolicyBoard, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, board, url = scene
    module = policy(0.0)
    with connect(url, poll_s=3600.0) as far:
        assert far.load_into(module) == 1
        assert far.load_into(module) == 1  # a call: nothing is newer
        board.publish(policy(2.0))
        monkeypatch.setattr(Connection, "call", fail)
        assert far.load_into(module) == 1
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3601.0)
        monkeypatch.setattr(remote_policy_board, "time", later)
        with pytest.raises(LostNodeError):
            far.load_into(module)


class Clients:
    """Clients of BoardDownloads without a network."""

    def __init__(self, downloads: BoardDownloads) -> None:
        self._downloads = downloads
        self._board: Any = None

    def begin(self, client: str, loaded: int = 0, partial: int | None = None) -> int | None:
        """Begin a download; return the version, None: nothing is newer."""
        header = {"client": client, "known": self._board, "loaded": loaded, "partial": partial}
        answer = self._downloads.begin(header, None)
        self._board = answer["board"]
        return answer.get("version")

    def chunk(self, client: str, version: int, chunk: int) -> bool:
        """Fetch a chunk; False: the version is gone."""
        header = {"client": client, "board": self._board, "of": version, "chunk": chunk}
        return "content" in self._downloads.chunk(header, None)


@pytest.fixture
def downloads() -> Iterator[tuple[PolicyBoard, BoardDownloads, Clients]]:
    with (
        Replay(section(), schemas={"main": SCHEMA}) as replay,
        PolicyBoard.create(policy(1.0), replay) as board,
    ):
        made = BoardDownloads(replay.run, lambda: None)
        clients = Clients(made)
        clients.begin("first")
        yield board, made, clients
        made.close()


def test_a_gateway_holds_two_versions_at_most(
    downloads: tuple[PolicyBoard, BoardDownloads, Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, made, clients = downloads
    last = board.tensors.num_bytes // CHUNK
    board.publish(policy(2.0))
    assert clients.begin("second") == 2
    board.publish(policy(3.0))
    assert clients.begin("third") == 2  # both are downloaded: the newer one of them
    assert clients.begin("third", loaded=2) is None  # which a client gets once
    assert [copy.version for copy in made.copies] == [1, 2]
    assert clients.chunk("first", 1, last)  # it has all, so its place is free
    assert clients.begin("third", loaded=2) == 3
    assert [copy.version for copy in made.copies] == [2, 3]
    assert not clients.chunk("first", 1, 0)
    assert clients.chunk("second", 2, 0)
    board.publish(policy(4.0))
    assert clients.begin("fourth", loaded=3) is None
    monkeypatch.setattr(board_downloads, "HOLD_S", -1.0)  # the slow ones have had their time
    assert clients.begin("fourth", loaded=3) == 4
    assert not clients.chunk("second", 2, 1)
    assert clients.begin("second", partial=2) == 4


def test_a_worker_that_was_killed_occupies_nothing(
    downloads: tuple[PolicyBoard, BoardDownloads, Clients], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, made, clients = downloads
    made.expire()
    assert len(made.copies) == 1
    monkeypatch.setattr(board_downloads, "READER_S", -1.0)
    made.expire()
    assert made.copies == []
    assert clients.begin("first") == 1  # it was only slow
    monkeypatch.setattr(board_downloads, "_MOST_READERS", 1)
    monkeypatch.setattr(board_downloads, "READER_S", 30.0)
    with pytest.raises(StoreError, match="must be downloaded by at most 1 processes at once"):
        clients.begin("second")
    assert clients.begin("first") == 1
    assert board.version == 1


def test_a_version_that_the_gateway_gives_up_again_and_again_is_an_error(
    scene: tuple[Replay, PolicyBoard, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, url = scene
    module = policy(0.0)
    with connect(url) as far:
        monkeypatch.setattr(BoardDownloads, "chunk", lambda *_: {"gone": True})
        with pytest.raises(NotReadyError, match="must arrive while the gateway has it"):
            far.load_into(module)
        assert value_of(module) == 0.0


def test_a_sent_chunk_frees_its_place() -> None:
    with (
        served(section()) as (replay, gateway),
        PolicyBoard.create(policy(1.0), replay),
        connect(gateway.url) as far,
    ):
        num_chunks = 0
        module = policy(0.0)
        while num_chunks < 40:  # more than there are places
            far.loaded = 0
            assert far.load_into(module) == 1
            num_chunks += 8
        wait_until(lambda: not gateway.unsent.num_calls, "the last chunk")


@contextmanager
def served_by_others() -> Iterator[PolicyBoard]:
    """Run a table and its board, without a gateway."""
    with (
        Replay(section(), schemas={"main": SCHEMA}) as replay,
        PolicyBoard.create(policy(1.0), replay) as board,
    ):
        yield board


def test_gear_serve_serves_the_board_of_its_run(tmp_path: Path) -> None:
    """Through the command; it is killed in between."""
    config, token = write_run(tmp_path, section())
    with served_by_others() as board:
        process, url = serve(config, token)
        module = policy(0.0)
        with connect(url, token=token, timeout_s=0.5) as far:
            assert (far.load_into(module), value_of(module)) == (1, 1.0)
            process.kill()
            process.wait()
            board.publish(policy(2.0))
            with pytest.raises(LostNodeError, match=r"must answer within 0.5 s"):
                far.load_into(module)
            assert value_of(module) == 1.0
            far._timeout_s = 60.0
            process, _ = serve(config, token, "--port", url.rpartition(":")[2])
            assert (far.load_into(module), value_of(module)) == (2, 2.0)
        process.terminate()
        process.wait()
