"""Writers on machines without a store: gateway, connections that are lost, ends."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gear_support import wait_until
from group_support import section as group_section
from process_support import environment
from remote_support import (
    SCHEMA,
    STARTED,
    TOKEN,
    Proxy,
    assert_same,
    connect,
    section,
    serve,
    served,
    stored,
    trajectory,
    write_run,
    write_token,
)
from warm_python import PIPE, WarmProcess

from deepspeed_gear import Replay, SendOptions, TrajectoryWriter
from deepspeed_gear.cli import main
from deepspeed_gear.errors import ConfigError, DataError, LostNodeError, StoreError
from deepspeed_gear.remote import remote_writer
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.remote.gateway_sessions import ANSWER_S, WriterSessions

# ---- exactly once --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_every_trajectory_arrives_once_through_a_connection_that_is_cut(seed: int) -> None:
    """100,000 steps, five lost connections: three within batches, two between batches and their
    answers.
    """
    with served(section()) as (replay, gateway):
        proxy = Proxy(gateway.port, sorted(random.Random(seed).sample(range(2_000, 2_500_000), 5)))
        try:
            url = f"grpc://127.0.0.1:{proxy.port}"
            with connect(
                url, sending=SendOptions(batch_bytes=32 << 10, buffer_bytes=256 << 10)
            ) as writer:
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
    """Two writers add members of the same 30 groups, one of them by a connection that
    is cut twice.
    """
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
                prompts = rollout.values("prompt").numpy()
                samples = rollout.values("sample").numpy()
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
    sessions = WriterSessions(lambda found: added.append(int(found["n"])) or 0)
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
    monkeypatch.setattr(remote_writer, "CALL_INTERVAL_S", 0.05)
    with served(section()) as (replay, gateway):
        with connect(gateway.url) as writer:
            writer.add(trajectory(0))
            writer.flush()
            gateway.sessions.open("gone")
            (name,) = (client for client in gateway.sessions.by_client if client != "gone")
            begin = gateway.sessions.by_client[name].called_at
            wait_until(
                lambda: gateway.sessions.by_client[name].called_at > begin + 0.5, "idle calls"
            )
            gateway.sessions.by_client["gone"].called_at -= 3600.0
            assert gateway.sessions.expire(1800.0) == 1
            assert list(gateway.sessions.by_client) == [name]
            writer.add(trajectory(1))
            writer.flush()
            monkeypatch.setattr(remote_writer, "CALL_INTERVAL_S", 600.0)
            gateway.sessions.forget(name)
            writer.add(trajectory(2))
            with pytest.raises(
                StoreError, match=r"must have called within 3600 s.*trajectories 2 to 2 "
            ):
                writer.flush()
            with pytest.raises(StoreError):
                writer.close()
        assert_same(stored(replay), range(2))


@pytest.mark.parametrize(("most_waiting", "wait_s"), [(32, 0.0), (0, ANSWER_S)])
def test_a_session_that_adds_does_not_expire(most_waiting: int, wait_s: float) -> None:
    """Requests that may not wait are answered at once."""
    goes_on = threading.Event()
    sessions = WriterSessions(lambda _: goes_on.wait(20.0) and 0, most_waiting)
    sessions.open("a")
    wanted = {"upto": -1, "busy": True, "refused": [], "wait_s": wait_s}
    assert sessions.put("a", -1, [(0, {})]) == sessions.put("a", -1, []) == wanted
    assert sessions.expire(0.0) == 0
    goes_on.set()
    wanted = {"upto": 0, "busy": False, "refused": [], "wait_s": 0.0}
    wait_until(lambda: sessions.put("a", -1, []) == wanted, "adding")
    assert sessions.expire(0.0) == 1
    sessions.close()


def test_writers_side_by_side_and_step_by_step() -> None:
    with (
        served(section()) as (replay, gateway),
        connect(gateway.url) as one,
        connect(gateway.url) as two,
    ):
        with one.trajectory(weight=1.0) as opened:
            for step in range(3):
                row = {
                    name: rows[step] for name, rows in trajectory(0, 3).items() if name != "weight"
                }
                opened.append(**row)
            opened.append(observation=trajectory(0, 3)["observation"][3])
        assert opened.trajectory_id == 0
        envs = two.vector_writer(2, "next_step")
        envs.reset(observation=np.zeros((2, 3), np.float32), weight=np.ones(2))
        for step in range(4):
            rows = {
                "half": np.zeros((2, 2), np.uint16),
                "number": np.full(2, step),
                "checksum": np.zeros(2),
            }
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
jit = sys.modules.get("deepspeed_gear.ops.jit")
assert jit is None or jit.loaded("gear") is None
"""


def test_an_actor_needs_neither_deepspeed_nor_the_native_module(run_python: Any) -> None:
    with served(section()) as (replay, gateway):
        done = run_python(
            "-c", BARE, gateway.url, TOKEN, env={"CXX": "/nowhere", "CUDA_HOME": None}
        )
        assert done.returncode == 0, done.stderr
        assert [columns["number"].tolist() for columns in stored(replay)] == [[0, 1, 2]] * 2


# ---- ends ----------------------------------------------------------------------------------------


def test_the_end_of_a_gateway_is_told() -> None:
    rate = {"min_size": 4, "samples_per_insert": 1.0, "error_buffer": 2.0}
    with served(section(rate_limiter=rate)) as (_, gateway):
        writer = connect(gateway.url)
        for number in range(20):
            writer.add(trajectory(number))
        wait_until(lambda: gateway.sessions.num_added >= 4, "what the rate admits")
        gateway.sessions.end(StoreError("the gateway", "must run", None, "it was told to end"))
        with pytest.raises(
            StoreError, match=r"told to end; trajectories \d to 19 .* are not acknowledged"
        ):
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
    wait_until(lambda: gateway.sessions.error is not None, "the end")
    writer.add(trajectory(1))
    with pytest.raises(StoreError, match="its ranks have ended; trajectories 1 to 1"):
        writer.flush()
    serving.join()
    with pytest.raises(StoreError, match="ranks have ended"):
        writer.close()


def test_another_gateway_at_the_same_place_is_not_the_same() -> None:
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        with _gateway() as first:
            writer = connect(first.url)
            writer.add(trajectory(0))
            writer.flush()
            port = first.port
        with _gateway(port=port):
            writer.add(trajectory(1))
            with pytest.raises(StoreError, match=r"restarted: .*; trajectories 1 to 1 "):
                writer.flush()
        with pytest.raises(StoreError):
            writer.close()
        assert_same(stored(replay), range(1))


def test_a_gateway_that_cannot_listen_says_why() -> None:
    with Replay(section(), schemas={"main": SCHEMA}) as replay:
        with _gateway(host="::1") as first:
            assert first.url == f"grpc://[::1]:{first.port}"
            with connect(first.url) as writer:
                writer.add(trajectory(0))
            address = rf"must be able to listen at \[::1\]:{first.port}"
            with (
                pytest.raises(ConfigError, match=address),
                _gateway(host="::1", port=first.port),
            ):
                pass
        wrong = _gateway(certificate=grpc.ssl_server_credentials([(b"PEM", b"no")]))
        with pytest.raises(ConfigError, match="must be able to listen"), wrong:
            pass
        assert_same(stored(replay), range(1))


@contextmanager
def _gateway(**options: Any) -> Iterator[Gateway]:
    """A gateway that dies without a word, as far as a gateway in this process can."""
    with TrajectoryWriter.attach(section()) as writer:
        made = Gateway(writer, TOKEN, **options)
        yield made
        made.shutdown()


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


def test_processes_that_are_killed(tmp_path: Path) -> None:
    """An actor: whole trajectories, in order. The gateway: a named error in time. SIGTERM: told."""
    gear = section(capacity_trajectories=6000, capacity_steps=1_500_000)
    config, token = write_run(tmp_path, gear)
    with Replay(gear, schemas={"main": SCHEMA}) as replay:
        gateway, url = serve(config, token)
        actor = WarmProcess(["-c", WRITES, url, str(token), "100000"], environment(), PIPE)
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
        writer.add(trajectory(1))
        with pytest.raises(LostNodeError, match=r"must answer within 3 s.*trajectories 1 to 1 "):
            writer.flush()
        with pytest.raises(LostNodeError):
            writer.close()
        gateway, url = serve(config, token)
        with connect(url) as writer:
            writer.add(trajectory(0))
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait() == 0
        assert "added 1 trajectories; ended: the gateway must run" in gateway.communicate()[0]


@pytest.mark.usefixtures("ctrl_c")
def test_a_command_that_cannot_serve_says_why(tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text("{}")
    token = write_token(tmp_path / "token")
    common = ["serve", "--config", str(config), "--token-file", str(token), "--wait", "0"]
    assert main.main([*common, "--host", "0.0.0.0"]) == 2
    assert main.main([*common, "--tls-cert", "x"]) == 2
    assert main.main([*common, "--max-message", "0"]) == 2
    assert main.main(common) == 2
    config.write_text(json.dumps({"gear": section()}))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert main.main([*common[:-1], "20"]) == 130  # Ctrl-C ends the wait for a store
