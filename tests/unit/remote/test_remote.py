"""Writers on machines without a store: gateway, connections that are lost, refusals, security, ends."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gear_support import shared_files, wait_until
from group_support import section as group_section
from process_support import environment
from remote_support import (
    SCHEMA,
    TOKEN,
    Proxy,
    assert_same,
    openssl_certificate,
    random_cuts,
    section,
    served,
    stored,
    trajectory,
    write_token,
)

from deepspeed_gear import Column, RemoteWriter, Replay, Schema, SendOptions, TrajectoryWriter
from deepspeed_gear.cli import main
from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    LostNodeError,
    NotReadyError,
    SchemaError,
    StoreError,
    StoreFullError,
)
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.authentication import parse_url, read_token
from deepspeed_gear.remote.connection import Connection
from deepspeed_gear.remote.gateway import Certificate, Gateway
from deepspeed_gear.remote.sessions import ANSWER_S, Sessions

STARTED: list[subprocess.Popen[str]] = []  # which do not outlive their test
WRONG = "another-token-of-32-characters!!"


def connect(url: str, **options: Any) -> RemoteWriter:
    return RemoteWriter.connect(url, **{"token": TOKEN, "timeout_s": 20.0, **options})


def add_many(writer: RemoteWriter, count: int) -> None:
    for number in range(count):
        writer.add(trajectory(number))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
    assert shared_files(section()["shared_memory"]["prefix"]) == []


# ---- exactly once --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_every_trajectory_arrives_once_through_a_connection_that_is_cut(seed: int) -> None:
    """100,000 steps, five lost connections: three within batches, two between batches and their answers."""
    with served(section()) as (replay, gateway):
        proxy = Proxy(gateway.port, random_cuts(seed, 5, 2_500_000))
        try:
            url = f"grpc://127.0.0.1:{proxy.port}"
            with connect(url, sending=SendOptions(batch_bytes=32 << 10, buffer_bytes=256 << 10)) as writer:
                assert [writer.add(trajectory(number)) for number in range(400)] == list(range(400))
                writer.flush()
                assert len(writer.unacknowledged) == 0
                assert writer.num_lost > 0  # gRPC makes up for some by itself
            assert proxy.num_cuts == 5
        finally:
            proxy.close()
        assert replay.tables["main"].num_steps == 100_000
        assert_same(stored(replay), range(400))


def test_members_of_groups_come_from_several_writers() -> None:
    """Two writers add members of the same 30 groups, one of them by a connection that is cut twice."""
    group = {"column": "prompt", "size": 4}
    limiter = {"queue": 10, "timeout_s": 20.0}
    config = group_section(group, batch={"groups": 10}, writers=1, rate_limiter=limiter)

    def write(port: int, samples: tuple[int, ...]) -> None:
        with connect(f"grpc://127.0.0.1:{port}", sending=SendOptions(batch_bytes=512)) as writer:
            for prompt in range(30):
                for sample in samples:
                    row = {"prompt": np.int64(prompt), "sample": np.int32(sample)}
                    row |= {"weight": np.float32(1), "reward": np.float32(0)}
                    writer.add({"tokens": np.full(2 + sample, prompt, np.int32), **row})
            writer.flush()

    with served(config, schema=None) as (replay, gateway):
        proxy = Proxy(gateway.port, [2_000, 4_000])
        try:
            places = ((proxy.port, (0, 3)), (gateway.port, (1, 2)))
            writers = [threading.Thread(target=write, args=place) for place in places]
            for writer in writers:
                writer.start()
            seen: list[int] = []
            while len(seen) < 30:
                rollout = replay.rollout()  # waits for groups, and lets the writers go on
                prompts, samples = rollout.values("prompt").numpy(), rollout.values("sample").numpy()
                for item in range(rollout.num_items):
                    own = (rollout.group == item).numpy()
                    assert sorted(samples[own].tolist()) == [0, 1, 2, 3]
                    assert (rollout.lengths.numpy()[own] == 2 + samples[own]).all()
                    assert len(set(prompts[own].tolist())) == 1
                    seen.append(int(prompts[own][0]))
                list(rollout)
            for writer in writers:
                writer.join()
            assert sorted(seen) == list(range(30))  # each group once, none in part
            assert proxy.num_cuts == 2
            assert replay.statistics()["groups"]["main"]["late"] == 0
        finally:
            proxy.close()


def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    added: list[int] = []
    sessions = Sessions(lambda found: added.append(int(found["n"])) or 0)
    batch = [(number, {"n": np.array(number)}) for number in range(5)]
    sessions.open("a")
    assert sessions.put("a", -1, batch[:3])["upto"] == 2
    assert sessions.put("a", -1, batch[:3])["upto"] == 2
    assert sessions.put("a", -1, batch[1:])["upto"] == 4
    assert added == list(range(5))
    with pytest.raises(DataError, match="continue after 4"):
        sessions.put("a", -1, [(6, {})])
    with pytest.raises(StoreError, match="must have called within"):
        sessions.put("b", -1, batch)
    sessions.end(StoreError("x", "y"))
    sessions.close()


def test_sessions_expire_unless_their_writers_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_messages, "IDLE_S", 0.05)
    with served(section()) as (replay, gateway):
        with connect(gateway.url) as writer:
            writer.add(trajectory(0))
            writer.flush()
            gateway.sessions.open("gone")
            (name,) = (client for client in gateway.sessions._sessions if client != "gone")
            begin = gateway.sessions._sessions[name].called_at
            wait_until(lambda: gateway.sessions._sessions[name].called_at > begin + 0.5, "idle calls", 20)
            assert gateway.sessions.expire(0.5) == 1
            assert list(gateway.sessions._sessions) == [name]
            writer.add(trajectory(1))
            writer.flush()
            monkeypatch.setattr(gateway_messages, "IDLE_S", 600.0)
            gateway.sessions.forget(name)
            writer.add(trajectory(2))
            with pytest.raises(StoreError, match=r"must have called within 3600 s.*trajectories 2 to 2 "):
                writer.flush()
            with pytest.raises(StoreError):
                writer.close()
        assert_same(stored(replay), range(2))


def test_a_session_that_adds_does_not_expire() -> None:
    goes_on = threading.Event()
    sessions = Sessions(lambda _: goes_on.wait(20.0) and 0)
    sessions.open("a")
    assert sessions.put("a", -1, [(0, {})])["busy"]
    assert sessions.expire(0.0) == 0
    goes_on.set()
    wait_until(lambda: sessions.ask("a", -1)["upto"] == 0, "adding")
    assert sessions.expire(0.0) == 1
    sessions.close()


def test_writers_side_by_side_and_step_by_step() -> None:
    with served(section()) as (replay, gateway), connect(gateway.url) as one, connect(gateway.url) as two:
        with one.trajectory(weight=1.0) as opened:
            for step in range(3):
                row = {name: rows[step] for name, rows in trajectory(0, 3).items() if name != "weight"}
                opened.append(**row)
            opened.append(observation=trajectory(0, 3)["observation"][3])
        assert opened.trajectory_id == 0
        envs = two.vector_writer(2, "next_step")
        envs.reset(observation=np.zeros((2, 3), np.float32), weight=np.ones(2))
        for step in range(4):
            rows = {"half": np.zeros((2, 2), np.uint16), "number": np.full(2, step), "checksum": np.zeros(2)}
            rows["observation"] = np.full((2, 3), step, np.float32)
            rows["checksum"] = rows["checksum"].astype(np.uint8)
            envs.step(**rows, terminated=np.array([step == 2, step == 3]))
        one.flush()
        two.flush()
        found = stored(replay)
    assert_same(found[:1], range(1))
    assert sorted(len(columns["number"]) for columns in found) == [3, 3, 4]


BARE = """
import sys
sys.modules["deepspeed"] = None  # as if it was not installed
import numpy as np
from deepspeed_gear import RemoteWriter
with RemoteWriter.connect(sys.argv[1], token=sys.argv[2]) as writer:
    envs = writer.vector_writer(2, "next_step")
    now = dict(observation=np.zeros((2, 3), np.float32), weight=np.ones(2))
    envs.reset(**now)
    for step in range(3):
        done = dict(half=np.zeros((2, 2), np.uint16), number=np.full(2, step), checksum=np.zeros(2, np.uint8))
        envs.step(**now, **done, terminated=np.full(2, step == 2))
assert "deepspeed_gear.ops.load" not in sys.modules
"""


def test_an_actor_needs_neither_deepspeed_nor_the_native_module(run_python: Any) -> None:
    with served(section()) as (replay, gateway):
        done = run_python("-c", BARE, gateway.url, TOKEN, env={"CXX": "/nowhere", "CUDA_HOME": None})
        assert done.returncode == 0, done.stderr
        assert [columns["number"].tolist() for columns in stored(replay)] == [[0, 1, 2]] * 2


# ---- refusals ------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(section()) as (_, gateway):
        with pytest.raises(StoreError, match=r"token for .* must be the gateway's") as found:
            connect(gateway.url, token=WRONG)
        assert "wrong token" in caplog.text
        assert TOKEN not in caplog.text + str(found.value)
        assert WRONG not in caplog.text + str(found.value)
        connect(gateway.url, token=write_token(tmp_path / "token")).close()


def test_another_schema_is_refused() -> None:
    columns = [*SCHEMA.columns[:3], Column("number", "int32"), *SCHEMA.columns[5:], Column("more", "bool")]
    with served(section()) as (_, gateway):
        with pytest.raises(SchemaError) as found:
            connect(gateway.url, schema=Schema(columns))
        for text in ("column more is not", "checksum is missing", "number has dtype int32, the table int64"):
            assert text in str(found.value)
        connect(gateway.url, schema=SCHEMA).close()


def test_what_a_table_refuses_is_raised_later_and_the_rest_is_stored() -> None:
    with served(section(max_length=300)) as (replay, gateway), connect(gateway.url) as writer:
        writer.add(trajectory(0))
        writer.add({**trajectory(1), "weight": -1.0})
        writer.add(trajectory(1))
        with pytest.raises(DataError, match=r"trajectory 1: column weight: .* got -1"):
            writer.flush()
        writer.add(trajectory(9, 301))
        writer.add(trajectory(2))
        with pytest.raises(DataError, match=r"trajectory 3: .*max_length = 300"):
            writer.flush()
        with pytest.raises(DataError, match="column number"):
            writer.add({**trajectory(3), "number": np.zeros(3)})  # here, and at once
        with pytest.raises(DataError, match="column weight must be finite, got nan"):
            writer.add({**trajectory(3), "weight": np.nan})
        writer.flush()
        assert [number for number, _ in writer.refused] == [1, 3]
        assert_same(stored(replay), range(3))


def test_the_gateway_refuses_what_a_writer_has_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_gear.remote.remote_writer.check_finite", lambda *_: None)
    with served(section()) as (replay, gateway), connect(gateway.url) as writer:
        wrong = trajectory(0)
        wrong["half"][7, 1] = 0x7F80
        writer.add(wrong)
        with pytest.raises(DataError, match=r"trajectory 0: .*half must be finite, got 'inf at step 7'"):
            writer.flush()
        assert len(replay) == 0


def test_opaque_values_arrive_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    more = [Column("raw", "bytes", rows="1", max_bytes=6), Column("note", "json", rows="1", max_bytes=20)]
    schema = Schema([*SCHEMA, *more])
    other = Schema([*SCHEMA, Column("raw", "bytes", rows="1", max_bytes=7), more[1]])
    with served(section(), schema) as (replay, gateway):
        with pytest.raises(SchemaError, match="column raw has max_bytes 7, the table 6"):
            connect(gateway.url, schema=other)
        with connect(gateway.url) as writer:
            with pytest.raises(DataError, match="raw must have at most max_bytes = 6 bytes, got 7"):
                writer.add({**trajectory(0, 3), "raw": bytes(7), "note": None})
            writer.add({**trajectory(0, 3), "raw": b"\x00a", "note": {"a": [1]}})
            writer.flush()
            assert replay.read([0])[0]["raw"] == b"\x00a"
            assert replay.read([0])[0]["note"] == {"a": [1]}
            with monkeypatch.context() as patch:  # a writer that sends what is no row
                patch.setattr("deepspeed_gear.data.opaque_rows._checked", lambda row, *_: row)
                arrays, _ = check_trajectory(
                    "it", schema, {**trajectory(1, 3), "raw": np.full(10, 9, np.uint8), "note": 1}
                )
            writer._outbox.put(arrays, 1000)
            with pytest.raises(
                DataError, match=r"trajectory 1: .*raw must hold a value of at most max_bytes"
            ):
                writer.flush()
            assert len(replay) == 1


def test_columns_come_nested_and_late_ones_with_the_rest() -> None:
    """What a remote writer leaves out of a late column cannot be filled, and is not stored as zeros."""
    more = [Column("score.human", "float32", rows="1", late=True), Column("parts.left", "int64")]
    with served(section(), Schema([*SCHEMA, *more])) as (replay, gateway), connect(gateway.url) as writer:
        flat = {**trajectory(0, 3), "parts.left": np.arange(3), "score.human": 1.5}
        with pytest.raises(
            DataError, match=r"column score.human must be in every .*; a remote writer cannot"
        ):
            writer.add({name: value for name, value in flat.items() if name != "score.human"})
        writer.add(flat)
        writer.add({**trajectory(0, 3), "parts": {"left": np.arange(3)}, "score": {"human": 1.5}})
        writer.flush()
        one, other = stored(replay)
        assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}
        assert one["score.human"] == 1.5


def test_a_full_table_is_an_error_of_the_writer() -> None:
    config = section(capacity_trajectories=4, remove="none")
    with served(config) as (replay, gateway):
        writer = connect(gateway.url)
        for number in range(7):
            writer.add(trajectory(number))
        with pytest.raises(StoreFullError, match=r"trajectory 4: table main .*2 more were refused"):
            writer.close()
        assert_same(stored(replay), range(4))


@pytest.mark.parametrize("most_waiting", [32, 0])
def test_a_rate_holds_back_until_somebody_samples(most_waiting: int) -> None:
    rate = {"min_size": 2, "samples_per_insert": 1.0, "error_buffer": 2.0}
    with served(section(rate_limiter=rate)) as (replay, gateway):
        gateway.sessions._waiting = threading.Semaphore(most_waiting)
        one = gateway_messages.trajectory_bytes(
            {name: np.asarray(rows) for name, rows in trajectory(0).items()}
        )
        sending = SendOptions(buffer_bytes=4 * one, linger_s=0.0)
        writer = connect(gateway.url, timeout_s=2.0, sending=sending)
        with pytest.raises(NotReadyError, match="must take trajectories within 2 s"):
            add_many(writer, 40)
        taken = writer.num_added
        assert taken == len(replay) + 4 < 15
        while writer.unacknowledged:
            if replay.can_sample():
                replay.sample()
            time.sleep(0.01)
        writer.close()
        assert_same(stored(replay), range(taken))


def test_requests_that_may_not_wait_are_answered_at_once() -> None:
    goes_on = threading.Event()
    sessions = Sessions(lambda _: goes_on.wait(20.0) and 0, most_waiting=0)
    sessions.open("a")
    wanted = {"upto": -1, "busy": True, "refused": [], "wait_s": ANSWER_S}
    assert sessions.put("a", -1, [(0, {})]) == wanted
    assert sessions.ask("a", -1) == wanted
    goes_on.set()
    wait_until(lambda: sessions.ask("a", -1) == {**wanted, "upto": 0, "busy": False, "wait_s": 0.0}, "adding")
    sessions.close()


@pytest.mark.parametrize("token", [None, WRONG, TOKEN], ids=["no-token", "wrong-token", "token"])
def test_a_message_that_is_too_large_is_not_buffered(token: str | None, tmp_path: Path) -> None:
    """128 MiB three times, of which gRPC's flow control admits a few; the gateway goes on."""
    config, token_file = tmp_path / "ds_config.json", write_token(tmp_path / "token")
    config.write_text(json.dumps({"gear": section()}))
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        gateway, url = serve(config, token_file, "--max-message", "2")
        with connect(url) as writer:
            writer.add(trajectory(0))
            writer.flush()
            before = _peak_bytes(gateway.pid)
            wanted = "RESOURCE_EXHAUSTED" if token == TOKEN else "UNAUTHENTICATED"
            metadata = [("authorization", f"Bearer {token}")] if token else []
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match=wanted):
                    _raw(writer._sender._line, bytes(128 << 20), metadata)
            assert _peak_bytes(gateway.pid) - before < 64 << 20
            writer.add(trajectory(1))
        gateway.terminate()
        assert gateway.wait(20) == 0
        assert_same(stored(replay), range(2))


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def test_what_exceeds_the_gateways_limit_is_not_sent() -> None:
    with served(section(capacity_steps=200_000), max_message_bytes=1 << 20) as (replay, gateway):
        with pytest.raises(ConfigError, match=r"batch_bytes must be at most 1048576, .*got 1048577"):
            connect(gateway.url, sending=SendOptions(batch_bytes=(1 << 20) + 1))
        with connect(gateway.url, sending=SendOptions(batch_bytes=1 << 20)) as writer:
            writer.add(trajectory(0))
            with pytest.raises(DataError, match=r"trajectory must have at most 1048576 bytes.*--max-message"):
                writer.add(trajectory(9, 50_000))
            most = ((1 << 20) - 8 * 7 - 8 - 12) // 26  # a step has 26 bytes, the last observation 12
            writer.add(trajectory(1, most))
            with pytest.raises(DataError, match="trajectory must have at most"):
                writer.add(trajectory(9, most + 1))
            for number in range(2, 100):
                writer.add(trajectory(number))
        assert_same(stored(replay), range(100))
    for wrong in (0, (1 << 30) + 1):
        with pytest.raises(ConfigError, match=r"--max-message must be in \[1, 1024\] MiB"):
            Gateway.check("127.0.0.1", None, False, wrong)


def test_garbage_is_refused_and_harms_nobody() -> None:
    with served(section()) as (replay, gateway), connect(gateway.url) as writer:
        line, who = writer._sender._line, writer._sender._who
        short = gateway_messages.pack(
            who, gateway_messages.encode(SCHEMA, [(0, trajectory(0))]).select([0, 1, 2])
        )
        for message in (
            b"",
            b"\xff\xff\xff\xff",
            b"\x02\0\0\0[]",
            bytes(gateway_messages.pack(who)),
            bytes(short),
        ):
            answer = _raw(line, message, line._metadata)
            assert answer["error"]["kind"] == "DataError", (message, answer)
        writer.add(trajectory(0))
        writer.flush()
        assert_same(stored(replay), range(1))


def test_a_call_beyond_the_most_at_once_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(section()) as (replay, gateway), connect(gateway.url) as writer:
        monkeypatch.setattr(gateway._server._state, "maximum_concurrent_rpcs", 0)
        writer.add(trajectory(0))
        wait_until(lambda: writer.num_lost > 0, "a call that is refused")
        with pytest.raises(LostNodeError, match=r"must answer within 0.2 s.*RESOURCE_EXHAUSTED"):
            connect(gateway.url, timeout_s=0.2)
        monkeypatch.undo()
        writer.flush()
        assert_same(stored(replay), range(1))


def test_a_call_of_another_version_is_refused() -> None:
    with served(section()) as (_, gateway):
        line = Connection(gateway.url, TOKEN, None, False)
        with pytest.raises(StoreError, match=r"gateway .* must have this call; install the same"):
            line.call("do", {}, 5.0)


def _raw(line: Any, message: bytes, metadata: Any) -> Any:
    with grpc.insecure_channel(line._target, [("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(gateway_messages.method("put"))
        return json.loads(call(message, timeout=20, metadata=metadata))


# ---- security ------------------------------------------------------------------------------------


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    chain, key = openssl_certificate(tmp_path)
    with served(section(), certificate=Certificate.read(chain, key)) as (replay, gateway):
        assert gateway.url.startswith("grpc+tls://")
        url = f"grpc+tls://localhost:{gateway.port}"
        with connect(url, ca=chain) as writer:
            writer.add(trajectory(0))
        monkeypatch.setenv("SSL_CERT_FILE", str(chain))  # the roots of this machine, if `ca` is not given
        with connect(url) as writer:
            writer.add(trajectory(1))
        assert_same(stored(replay), range(2))
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("SSL_CERT_FILE", str(openssl_certificate(tmp_path / "other")[0]))
        with pytest.raises(LostNodeError, match="must answer within 1 s"):
            connect(url, timeout_s=1.0)
        with pytest.raises(LostNodeError):
            connect(f"grpc://127.0.0.1:{gateway.port}", timeout_s=1.0)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    chain, key = openssl_certificate(tmp_path, days=-1)
    with served(section(), certificate=Certificate.read(chain, key)) as (replay, gateway):
        with pytest.raises(LostNodeError, match=r"must answer within 1 s.*(?i:certificate|handshake|ssl)"):
            connect(f"grpc+tls://localhost:{gateway.port}", ca=chain, timeout_s=1.0)
        assert len(replay) == 0


def test_the_network_wants_tls(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"host must be a loopback address without TLS, got '0.0.0.0'; give"
    ):
        Gateway.check("0.0.0.0", None, insecure=False)
    Gateway.check("0.0.0.0", None, insecure=True)
    with pytest.raises(ConfigError, match="url must be a loopback address without TLS"):
        connect("grpc://10.0.0.1:77")
    with pytest.raises(ConfigError, match="readable PEM"):
        Certificate.read(tmp_path / "none", tmp_path / "none")
    for url in ("http://a:1", "grpc://a", "grpc://a:b", "grpc://a:1/x", "a:1"):
        with pytest.raises(ConfigError, match="must be grpc://HOST:PORT"):
            parse_url(url)


def test_tokens_are_read_from_private_files(tmp_path: Path) -> None:
    path = write_token(tmp_path / "token")
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0600, got '0o640'"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 16 printable") as found:
        read_token(path)
    assert "short" not in str(found.value)
    with pytest.raises(ConfigError, match="openssl rand"):
        read_token(tmp_path / "none")


# ---- ends ----------------------------------------------------------------------------------------


def test_the_end_of_a_gateway_is_told() -> None:
    rate = {"min_size": 4, "samples_per_insert": 1.0, "error_buffer": 2.0}
    with served(section(rate_limiter=rate)) as (_, gateway):
        writer = connect(gateway.url)
        for number in range(20):
            writer.add(trajectory(number))
        wait_until(lambda: gateway.sessions.num_added >= 4, "what the rate admits")
        gateway.sessions.end(StoreError("the gateway", "must run", None, "it was told to end"))
        with pytest.raises(StoreError, match=r"told to end; trajectories \d to 19 .* are not acknowledged"):
            writer.flush()
        with pytest.raises(StoreError, match="told to end"):
            writer.add(trajectory(7))
        with pytest.raises(StoreError, match="told to end"):
            writer.close()


def test_the_end_of_the_run_ends_the_gateway() -> None:
    replay = Replay(section(), schemas={"main": SCHEMA})
    gateway = Gateway(TrajectoryWriter.attach(section()), TOKEN)
    serving = threading.Thread(target=gateway.run)
    serving.start()
    writer = connect(gateway.url, timeout_s=3.0)
    writer.add(trajectory(0))
    writer.flush()
    replay.close()
    wait_until(lambda: gateway.sessions.error is not None, "the end", 10)
    writer.add(trajectory(1))
    with pytest.raises(StoreError, match="its ranks have ended; trajectories 1 to 1"):
        writer.flush()
    serving.join(10)
    assert not serving.is_alive()
    with pytest.raises(StoreError, match="ranks have ended"):
        writer.close()


def test_another_gateway_at_the_same_place_is_not_the_same() -> None:
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        with _gateway(replay) as first:
            writer = connect(first.url)
            writer.add(trajectory(0))
            writer.flush()
            port = first.port
        with _gateway(replay, port=port):
            writer.add(trajectory(1))
            with pytest.raises(StoreError, match=r"restarted: .*; trajectories 1 to 1 "):
                writer.flush()
        with pytest.raises(StoreError):
            writer.close()
        assert_same(stored(replay), range(1))


def test_a_gateway_that_cannot_listen_says_why() -> None:
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        with _gateway(replay, host="::1") as first:
            assert first.url == f"grpc://[::1]:{first.port}"
            with connect(first.url) as writer:
                writer.add(trajectory(0))
            with pytest.raises(ConfigError, match=rf"must be able to listen at \[::1\]:{first.port}"):
                _gateway(replay, host="::1", port=first.port)
        with pytest.raises(ConfigError, match="must be able to listen"):
            _gateway(replay, certificate=Certificate(b"no", b"PEM"))
        assert_same(stored(replay), range(1))


class _gateway:
    """A gateway that dies without a word, as far as a gateway in this process can."""

    def __init__(self, replay: Replay, **options: Any) -> None:
        self._writer = TrajectoryWriter.attach(section())
        try:
            self._made = Gateway(self._writer, TOKEN, **options)
        except ConfigError:
            self._writer.close()
            raise

    def __enter__(self) -> Gateway:
        return self._made

    def __exit__(self, *_: object) -> None:
        self._made.shutdown()
        self._made.sessions.close()
        self._writer.close()


WRITES = """
import sys
from pathlib import Path
from deepspeed_gear import RemoteWriter, SendOptions
from remote_support import trajectory
sending = SendOptions(batch_bytes=1 << 16)
writer = RemoteWriter.connect(sys.argv[1], token=Path(sys.argv[2]), sending=sending)
for number in range(int(sys.argv[3])):
    writer.add(trajectory(number))
    if number == 100:
        print("under way", flush=True)
writer.close()
"""


def serve(config: Path, token: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start `gear serve`; return it and its url."""
    command = [sys.executable, "-m", "deepspeed_gear.cli.main", "serve"]
    process = subprocess.Popen(
        [*command, "--config", str(config), "--token-file", str(token), *options],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("serving table main at grpc://127.0.0.1:"), line
    return process, line.split()[-1]


def test_processes_that_are_killed(tmp_path: Path) -> None:
    """An actor: whole trajectories, in order. The gateway: a named error in time. SIGTERM: told."""
    config, token = tmp_path / "ds_config.json", write_token(tmp_path / "token")
    config.write_text(json.dumps({"gear": section(capacity_trajectories=6000, capacity_steps=1_500_000)}))
    with Replay(json.loads(config.read_text())["gear"], schemas={"main": SCHEMA}) as replay:
        gateway, url = serve(config, token)
        arguments = [sys.executable, "-c", WRITES, url, str(token), "100000"]
        actor = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, text=True)
        STARTED.append(actor)
        assert actor.stdout is not None
        assert actor.stdout.readline() == "under way\n"
        wait_until(lambda: len(replay) > 30, "the first batches")
        actor.kill()
        actor.wait()
        time.sleep(0.3)  # what the gateway has of it is added, or most of it
        found = stored(replay)
        assert_same(found, range(len(found)))
        writer = connect(url, timeout_s=3.0)
        writer.add(trajectory(0))
        writer.flush()
        gateway.kill()
        gateway.wait()
        begin = time.monotonic()
        writer.add(trajectory(1))
        with pytest.raises(LostNodeError, match=r"must answer within 3 s.*trajectories 1 to 1 "):
            writer.flush()
        assert time.monotonic() - begin < 15
        with pytest.raises(LostNodeError):
            writer.close()
        gateway, url = serve(config, token)
        with connect(url) as writer:
            writer.add(trajectory(0))
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(20) == 0
        assert "added 1 trajectories; ended: the gateway must run" in gateway.communicate()[0]


def test_a_command_that_cannot_serve_says_why(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text("{}")
    token = write_token(tmp_path / "token")
    common = ["serve", "--config", str(config), "--token-file", str(token), "--wait", "0"]
    assert main.main([*common, "--host", "0.0.0.0"]) == 2
    assert main.main([*common, "--tls-cert", "x"]) == 2
    assert main.main([*common, "--max-message", "0"]) == 2
    assert main.main(common) == 2
