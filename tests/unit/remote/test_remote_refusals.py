"""What gateways and remote writers refuse or wait for; TLS, and the files that tokens are read
from.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from gear_support import wait_until
from remote_support import (
    SCHEMA,
    TOKEN,
    WRONG,
    assert_same,
    connect,
    openssl_certificate,
    section,
    serve,
    served,
    stored,
    trajectory,
    write_token,
)

from deepspeed_gear import Column, Replay, Schema, SendOptions
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
from deepspeed_gear.remote.connection import Connection, read_token
from deepspeed_gear.remote.gateway import Gateway, read_certificate
from deepspeed_gear.remote.gateway_sessions import WriterSessions


def test_a_wrong_token_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(section()) as (_, gateway):
        with pytest.raises(
            StoreError, match=r"token for .* must match the gateway's token"
        ) as found:
            connect(gateway.url, token=WRONG)
        assert "wrong token" in caplog.text
        assert TOKEN not in caplog.text + str(found.value)
        assert WRONG not in caplog.text + str(found.value)
        connect(gateway.url, token=write_token(tmp_path / "token")).close()


def test_another_schema_is_refused() -> None:
    columns = [
        *SCHEMA.columns[:3],
        Column("number", "int32"),
        *SCHEMA.columns[5:],
        Column("more", "bool"),
    ]
    with served(section()) as (_, gateway):
        with pytest.raises(SchemaError) as found:
            connect(gateway.url, schema=Schema(columns))
        for text in (
            "column more is not",
            "checksum is missing",
            "number has dtype int32, the table int64",
        ):
            assert text in str(found.value)
        late = [*SCHEMA.columns[:5], Column("weight", "float64", rows="1", late=True)]
        with pytest.raises(SchemaError, match="column weight has late True, the table False"):
            connect(gateway.url, schema=Schema(late))
        connect(gateway.url, schema=SCHEMA).close()


def test_what_a_table_refuses_is_raised_later_and_the_rest_is_stored() -> None:
    with served(section(max_length=300)) as (replay, gateway), connect(gateway.url) as writer:
        writer.add(trajectory(0))
        writer.add({**trajectory(1), "weight": -1.0})
        writer.add(trajectory(1))
        with pytest.raises(DataError, match=r"trajectory 1: table main: column weight: .* got -1"):
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
        with pytest.raises(
            DataError, match=r"trajectory 0: .*half must be finite, got 'inf at step 7'"
        ):
            writer.flush()
        assert len(replay) == 0


def test_opaque_values_arrive_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    more = [
        Column("raw", "bytes", rows="1", max_bytes=6),
        Column("note", "json", rows="1", max_bytes=20),
    ]
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
                patch.setattr("deepspeed_gear.data.opaque_rows.decode", lambda *_: None)
                arrays, _ = check_trajectory(
                    "it", schema, {**trajectory(1, 3), "raw": np.full(10, 9, np.uint8), "note": 1}
                )
            writer._sender.put(arrays, 1000)
            with pytest.raises(
                DataError, match=r"trajectory 1: .*raw must hold a value of at most max_bytes"
            ):
                writer.flush()
            assert len(replay) == 1


def test_columns_come_nested_and_late_ones_with_the_rest() -> None:
    """What a remote writer leaves out of a late column cannot be filled, and is not stored as
    zeros.
    """
    more = [Column("score.human", "float32", rows="1", late=True), Column("parts.left", "int64")]
    with (
        served(section(), Schema([*SCHEMA, *more])) as (replay, gateway),
        connect(gateway.url) as writer,
    ):
        flat = {**trajectory(0, 3), "parts.left": np.arange(3), "score.human": 1.5}
        with pytest.raises(
            DataError, match=r"column score.human must be in every .*; a remote writer cannot"
        ):
            writer.add({name: value for name, value in flat.items() if name != "score.human"})
        writer.add(flat)
        writer.add({**trajectory(0, 3), "parts": {"left": np.arange(3)}, "score": {"human": 1.5}})
        writer.flush()
        one, other = stored(replay)
        assert {n: a.tobytes() for n, a in one.items()} == {
            n: a.tobytes() for n, a in other.items()
        }
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
            [writer.add(trajectory(number)) for number in range(40)]
        taken = writer.num_added
        assert taken == len(replay) + 4 < 15
        while writer.unacknowledged:
            if replay.can_sample():
                replay.sample()
            time.sleep(0.01)
        writer.close()
        assert_same(stored(replay), range(taken))


@pytest.mark.parametrize("token", [None, WRONG, TOKEN], ids=["no-token", "wrong-token", "token"])
def test_a_message_that_is_too_large_is_not_buffered(token: str | None, tmp_path: Path) -> None:
    """128 MiB three times, of which gRPC's flow control admits a few; the gateway goes on."""
    config = tmp_path / "ds_config.json"
    token_file = write_token(tmp_path / "token")
    config.write_text(json.dumps({"gear": section()}))
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        gateway, url = serve(config, token_file, "--max-message", "2")
        soft, hard = _open_files(gateway.pid)
        assert soft >= min(hard, 4352), "raised by `gear serve`"
        with connect(url) as writer:
            writer.add(trajectory(0))
            writer.flush()
            before = _peak_bytes(gateway.pid)
            wanted = "RESOURCE_EXHAUSTED" if token == TOKEN else "UNAUTHENTICATED"
            metadata = [("authorization", f"Bearer {token}")] if token else []
            for _ in range(3):
                with pytest.raises(grpc.RpcError, match=wanted):
                    _raw(url, bytes(128 << 20), metadata)
            assert _peak_bytes(gateway.pid) - before < 64 << 20
            writer.add(trajectory(1))
        gateway.terminate()
        assert gateway.wait() == 0
        assert_same(stored(replay), range(2))


def _open_files(pid: int) -> list[float]:
    """Return the soft and the hard limit of a process's open files."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    words = next(line.split() for line in lines if line.startswith("Max open files"))
    return [float("inf") if word == "unlimited" else float(word) for word in words[3:5]]


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def test_what_exceeds_the_gateways_limit_is_not_sent() -> None:
    with served(section(capacity_steps=200_000), max_message_bytes=1 << 20) as (replay, gateway):
        with pytest.raises(
            ConfigError, match=r"batch_bytes must be at most 1048576, .*got 1048577"
        ):
            connect(gateway.url, sending=SendOptions(batch_bytes=(1 << 20) + 1))
        with connect(gateway.url, sending=SendOptions(batch_bytes=1 << 20)) as writer:
            writer.add(trajectory(0))
            with pytest.raises(
                DataError, match=r"trajectory must have at most 1 MiB.*--max-message"
            ):
                writer.add(trajectory(9, 50_000))
            most = (
                (1 << 20) - 256 * 7 - 8 - 12
            ) // 26  # a step has 26 bytes, the last observation 12
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
        who = Connection(gateway.url, TOKEN, None, False).begin_session(5.0)["who"]
        short = gateway_messages.pack(
            who, gateway_messages.encode(SCHEMA, [(0, trajectory(0))]).select([0, 1, 2])
        )
        for message in (
            b"",
            b"\xff\xff\xff\xff",
            b"\x02\0\0\0[]",
            bytes(gateway_messages.pack(who)) + b"\0",
            bytes(short),
        ):
            answer = _raw(gateway.url, message, [("authorization", f"Bearer {TOKEN}")])
            assert answer["error"]["kind"] == "DataError", (message, answer)
        writer.add(trajectory(0))
        writer.flush()
        assert_same(stored(replay), range(1))


def _stream(batch: pa.RecordBatch, **options: Any) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize("version", [pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5])
@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_a_compressed_batch_is_refused_before_it_takes_memory(
    codec: str | None, version: Any
) -> None:
    sent = [
        {n: np.asarray(v, SCHEMA[n].numpy_dtype) for n, v in trajectory(at, 4000).items()}
        for at in (0, 1)
    ]
    batch = gateway_messages.encode(SCHEMA, [*enumerate(sent)])
    content = _stream(batch, compression=codec, metadata_version=version)
    if codec is None:
        for number, rows in gateway_messages.decode(SCHEMA, content):
            assert all((rows[name] == sent[number][name]).all() for name in SCHEMA.names)
        return
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="batch must not be compressed; write"):
        list(gateway_messages.decode(SCHEMA, content))
    assert pa.total_allocated_bytes() == before


def test_what_a_call_takes_is_bounded_whatever_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many empty trajectories, a long header or name, refusals that are never received."""
    tiny = Schema([Column("x", "uint8")])
    many = gateway_messages.encode(tiny, [(n, {"x": np.zeros(1, np.uint8)}) for n in range(5000)])
    with pytest.raises(
        DataError, match=r"batch of 5000 trajectories must take at most 1 MiB, got '2.44 MiB"
    ):
        list(gateway_messages.decode(tiny, _stream(many), 1 << 20))
    assert gateway_messages.trajectory_bytes({"x": np.zeros(1, np.uint8)}) * 5000 > 1 << 20, (
        "a writer splits it"
    )
    dictionary = pa.record_batch(
        [pa.array([0]), pa.array(["a"]).dictionary_encode()], names=[".number", "x"]
    )
    with pytest.raises(DataError, match="must have the columns"):
        list(gateway_messages.decode(tiny, _stream(dictionary)))
    for header, text in (
        (b"[" * 100_000, "JSON object"),
        (b" " * (1 << 20), "header of at most 524288 bytes"),
    ):
        with pytest.raises(DataError, match=text):
            gateway_messages.unpack(pa.py_buffer(len(header).to_bytes(4, "little") + header))
    with served(section()) as (_, gateway):
        header = {"version": gateway_messages.VERSION, "client": "c" * 65}
        answer = Connection(gateway.url, TOKEN, None, False).call("hello", header, 5.0)
        assert "name of at most 64 characters" in str(answer["error"])

    def refuse(_: Any) -> int:
        raise DataError("it", "must be right")

    sessions = WriterSessions(refuse)
    sessions.open("a")
    for first in (0, 10, 10, 10):
        answer = sessions.put("a", -1, [(number, {}) for number in range(first, first + 10)])
    assert (answer["upto"], len(answer["refused"])) == (9, 10), (
        "the second batch waits for the acknowledgement"
    )
    assert sessions.put("a", 9, [(10, {})])["upto"] == 10
    sessions.close()


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


def _raw(url: str, message: bytes, metadata: Any) -> Any:
    target = url.removeprefix("grpc://")
    with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(f"/{gateway_messages.SERVICE}/put")
        return gateway_messages.unpack(pa.py_buffer(call(message, timeout=20, metadata=metadata)))[
            0
        ]


# ---- TLS and tokens ------------------------------------------------------------------------------


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate of this test")
    chain, key = openssl_certificate(tmp_path)
    with served(section(), certificate=read_certificate(chain, key)) as (replay, gateway):
        assert gateway.url.startswith("grpc+tls://")
        url = f"grpc+tls://localhost:{gateway.port}"
        with connect(url, ca=chain) as writer:
            writer.add(trajectory(0))
        monkeypatch.setenv(
            "SSL_CERT_FILE", str(chain)
        )  # the roots of this machine, if `ca` is not given
        with connect(url) as writer:
            writer.add(trajectory(1))
        assert_same(stored(replay), range(2))
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("SSL_CERT_FILE", str(openssl_certificate(tmp_path / "other")[0]))
        with pytest.raises(LostNodeError, match=r"must answer within 0\.4 s"):
            connect(url, timeout_s=0.4)
        with pytest.raises(LostNodeError):
            connect(f"grpc://127.0.0.1:{gateway.port}", timeout_s=0.4)
    expired, key = openssl_certificate(tmp_path / "other", days=-1)
    wanted = pytest.raises(
        LostNodeError, match=r"must answer within 0.4 s.*(?i:certificate|handshake|ssl)"
    )
    with served(section(), certificate=read_certificate(expired, key)) as (_, gateway), wanted:
        connect(f"grpc+tls://localhost:{gateway.port}", ca=expired, timeout_s=0.4)


def test_the_network_wants_tls(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"host must be a loopback address without TLS, got '0.0.0.0'; give"
    ):
        Gateway.check("0.0.0.0", None, insecure=False)
    Gateway.check("0.0.0.0", None, insecure=True)
    with pytest.raises(ConfigError, match="url must be a loopback address without TLS"):
        connect("grpc://10.0.0.1:77")
    with pytest.raises(ConfigError, match="readable PEM"):
        read_certificate(tmp_path / "none", tmp_path / "none")
    for url in ("http://a:1", "grpc://a", "grpc://a:b", "grpc://a:1/x", "a:1", "grpc://[a:1"):
        with pytest.raises(ConfigError, match="must be grpc://HOST:PORT"):
            connect(url)


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
