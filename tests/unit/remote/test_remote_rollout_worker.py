"""Rollout workers on machines without a store: leases, connections that are lost, ends
of sessions.
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import wait_until
from ledger_support import (
    check_books,
    ledger_section,
    recipe_responses,
    recipe_section,
    responses,
    write_prompts,
)
from media_tables import image, with_media
from process_support import environment, free_port
from remote_support import (
    SCHEMA,
    STARTED,
    TOKEN,
    Proxy,
    connect,
    section,
    serve,
    served,
    serving,
    trajectory,
    write_run,
)
from warm_python import PIPE, WarmProcess

from deepspeed_gear import (
    Column,
    ConfigError,
    DataError,
    DatasetWriter,
    GearError,
    LeaseExpiredError,
    LostNodeError,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    Schema,
    StoreError,
    TrajectoryWriter,
)
from deepspeed_gear.remote.connection import Connection, ConnectionLost
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.remote.gateway_sessions import LeaseSessions
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.shared_memory import remove_garbage


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts", 7)


def attach(url: str, **options: Any) -> RemoteRolloutWorker:
    return RemoteRolloutWorker.connect(url, **{"token": TOKEN, "timeout_s": 20.0, **options})


def sessions_of(gateway: Any) -> LeaseSessions:
    assert isinstance(gateway.sessions, LeaseSessions)
    return gateway.sessions


def test_workers_of_the_node_and_of_others_share_a_ledger(data: Path) -> None:
    config = ledger_section(data, {"max_lag": 0})
    with (
        served(config, schema=None) as (replay, gateway),
        RolloutWorker.attach(config) as local,
        attach(gateway.url) as worker,
    ):
        mine, failed = worker.lease(2)
        failed.fail()
        again, more = local.lease(9)
        assert (again.number, again.attempt, more.number) == (1, 2, 2)
        ids = [lease.commit(responses(lease)) for lease in (again, mine, more)]
        assert ids == [[0, 1], [2, 3], [4, 5]]
        replay.fill(2, reward=2.0)  # a late column may be left out
        with pytest.raises(DataError, match="reward must be written once"):
            replay.fill(2, reward=2.0)
        assert replay.rollout().values("prompt").tolist() == [0, 0, 1, 1, 2, 2]


def test_what_a_lease_keeps_goes_to_a_worker_of_the_node_and_back(data: Path) -> None:
    """As much as a message holds."""
    config = ledger_section(data, {"keep_bytes": 1 << 20, "max_lag": 0})
    most = 1 << 20
    with (
        served(config, schema=None, max_message_bytes=most) as (_, gateway),
        RolloutWorker.attach(config) as local,
    ):
        with attach(gateway.url) as worker:
            lease = worker.lease()[0]
            lease.keep(turn=np.arange(130_000))
            with pytest.raises(DataError, match=r"at most prompts\.keep_bytes = 1048576"):
                lease.keep(turn=np.zeros(140_000))
        again = local.lease()[0]
        assert again.kept["turn"].tolist() == [*range(130_000)]
        again.keep(turn=np.arange(130_001))
        again.fail()
        with attach(gateway.url) as worker:
            again = worker.lease()[0]
            assert len(again.kept["turn"]) == 130_001
            again.keep()
            again.fail()
            assert worker.lease()[0].kept == {}
    config = ledger_section(data, {"keep_bytes": 1 + most, "max_lag": 0})
    wanted = pytest.raises(
        ConfigError, match=r"--max-message must hold prompts\.keep_bytes = 1048577"
    )
    with Replay(config), TrajectoryWriter.attach(config) as writer, wanted:
        Gateway(writer, TOKEN, max_message_bytes=most)


def test_every_group_arrives_once_through_a_connection_that_is_cut(data: Path) -> None:
    """Eight lost connections: half of them between a call that is done and its answer."""
    config = ledger_section(data, {"max_lag": 20}, writers=2)
    with served(config, schema=None) as (replay, gateway):
        proxy = Proxy(gateway.port, sorted(random.Random(0).sample(range(2_000, 60_000), 8)))
        ids = list[int]()
        try:
            with attach(f"grpc://127.0.0.1:{proxy.port}") as worker:
                while len(ids) < 120:
                    for lease in worker.lease(4, timeout_s=5)[: (120 - len(ids)) // 2]:
                        lease.heartbeat()
                        ids += lease.commit(responses(lease))
            assert proxy.num_cuts == 8
        finally:
            proxy.close()
        books = check_books(replay)
        assert ids == list(range(120))
        assert (books["issued"], books["waiting"], books["expired_refused"]) == (60, 60, 0)
        assert (books["leased"], books["leases_returned"]) == (0, 0)


def test_a_call_that_is_made_twice_is_done_once(data: Path) -> None:
    with served(ledger_section(data), schema=None) as (replay, gateway):
        sessions = sessions_of(gateway)
        sessions.open("a")
        take = {"number": 3, "do": "lease", "count": 1, "wait_s": 0.0}
        first, again = (sessions.work("a", take, []) for _ in range(2))
        assert first["leases"] == again["leases"] == [(0, 1, 0, 0, 1, "", 6)]
        assert first["content"].equals(again["content"])
        group = list(
            enumerate({"tokens": np.ones(2, np.int32), "prompt": 0, "sample": 1} for _ in range(2))
        )
        lease = [*first["leases"][0][:5], None, sessions.hello["run"]]
        commit = {"number": 5, "do": "commit", "lease": lease, "absent": [["reward"]] * 2}
        for _ in range(2):
            with pytest.raises(DataError, match="column weight must be in every trajectory"):
                sessions.work("a", commit, group)
        commit["number"] = 6
        group = [(at, {**rows, "weight": 1.0, "reward": 0.0}) for at, rows in group]
        assert [sessions.work("a", commit, group)["ids"] for _ in range(2)] == [[0, 1]] * 2
        sessions.work("a", take, [])  # late, and given up
        assert check_books(replay)["issued"] == 1
        with pytest.raises(LeaseExpiredError, match="the lease of prompt 0 must be held by"):
            sessions.work("a", {**commit, "number": 7}, group)
        assert check_books(replay)["expired_refused"] == 1
        assert sessions.work("b", take, []) == {"unknown": True}
        sessions.forget("a")


def long(lease: Any) -> list[dict[str, Any]]:
    """Return a group of which the table of the next test has room for three, and one
    member more.
    """
    return [{**one, "tokens": np.full(20, lease.number, np.int32)} for one in responses(lease)]


def test_a_commit_that_waits_for_rows_holds_up_no_other(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one commit, however often its worker asks for it, and ends as one of the node does."""
    monkeypatch.setattr("deepspeed_gear.remote.gateway_sessions.ANSWER_S", 0.1)
    monkeypatch.setattr("deepspeed_gear.remote.connection._LEAST_S", 0.5)
    config = ledger_section(data, timeout_s=20.0, capacity_steps=140, capacity_trajectories=24)
    found = list[Any]()

    def commit() -> None:
        try:
            found.append(leases[3].commit(long(leases[3])))
        except GearError as error:
            found.append(error)

    with (
        served(config, schema=None) as (replay, gateway),
        attach(gateway.url, timeout_s=0.3) as worker,
        attach(gateway.url) as other,
    ):
        leases = worker.lease(4)
        for lease in leases[:3]:
            lease.commit(long(lease))
        rollout = replay.rollout()
        thread = threading.Thread(target=commit)
        thread.start()
        time.sleep(2.0)
        (more,) = other.lease()
        more.heartbeat()
        assert (found, check_books(replay)["leased"]) == ([], 2)
        list(rollout)
        thread.join()
        assert found == [[6, 7]]
        more.commit(long(more))
        assert check_books(replay)["expired_refused"] == 0


def lost(line: Connection, action: str, *more: Any) -> Any:
    raise ConnectionLost("as if the machine was gone")


def test_leases_come_back_with_the_end_of_their_session(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(ledger_section(data, {"attempts": 9}), schema=None) as (replay, gateway):
        with attach(gateway.url) as other, attach(gateway.url) as worker:
            other.lease()
            worker.lease(2)
            other.close()  # of its own leases
            books = check_books(replay)
            assert (books["leased"], books["returned"]) == (2, 1)
        assert check_books(replay)["returned"] == 3
        worker = attach(gateway.url, timeout_s=2.0)
        first, second = worker.lease(2)
        time.sleep(2.5)  # a thread calls
        first.commit(responses(first))
        monkeypatch.setattr(Connection, "call", lost)  # as if the worker was stopped
        wait_until(lambda: check_books(replay)["leased"] == 0, "the end of the session")
        monkeypatch.undo()
        for lease, text in (
            (first, "it was committed"),
            (second, "it was given back, by .* the end of its"),
        ):
            with pytest.raises(LeaseExpiredError, match=f"must be held by this worker: {text}"):
                lease.commit(responses(lease))
        (again,) = worker.lease()  # in another session
        assert (again.number, again.attempt) == (1, 3)
        books = check_books(replay)
        assert (books["leased"], books["waiting"], books["expired_refused"]) == (1, 1, 2)
        worker.close()
        worker.close()
        assert check_books(replay)["leased"] == 0


@pytest.mark.parametrize("num_sessions", [0, 60])
def test_workers_that_wait_for_leases_hold_up_no_other(num_sessions: int, data: Path) -> None:
    """Where many wait, the gateway answers at once."""
    config = ledger_section(data, {"max_lag": 0})
    with served(config, schema=None) as (replay, gateway), attach(gateway.url) as worker:
        for number in range(num_sessions):
            gateway.sessions.open(str(number))
        leases = worker.lease(3)
        waits = [attach(gateway.url) for _ in range(3)]
        found: list[Any] = []
        take = [lambda w=w: found.append(w.lease(1, timeout_s=200)) for w in waits]
        threads = [threading.Thread(target=one) for one in take]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        for lease in leases:
            lease.heartbeat()
            lease.commit(responses(lease))
        assert found == [], "none of them had to end first"
        list(replay.rollout())
        for thread in threads:
            thread.join()
        assert sorted(lease.number for one in found for lease in one) == [3, 4, 5]
        for one in waits:
            one.close()
        for number in range(num_sessions):
            gateway.sessions.forget(str(number))


def test_what_a_remote_worker_refuses(data: Path) -> None:
    with served(ledger_section(data), schema=None, max_message_bytes=1 << 20) as (replay, gateway):
        with pytest.raises(
            ConfigError, match=r"prompts must be given for rollout workers only; .*Remote"
        ):
            connect(gateway.url)
        with attach(gateway.url) as worker:
            (lease,) = worker.lease()
            one, two = responses(lease)
            large = {**two, "tokens": np.zeros(1 << 18, np.int32)}
            with pytest.raises(DataError, match="at most 1 MiB, the gateway's --max"):
                lease.commit([one, large])
            assert (len(replay), check_books(replay)["leased"]) == (0, 1)
            lease.commit([one, {**two, "reward": 1.0}])
            gateway.sessions.end(
                StoreError("the gateway", "must run", None, "its end was requested")
            )
            with pytest.raises(StoreError, match="its end was requested"):
                worker.lease()
    with (
        served(section()) as (_, gateway),
        pytest.raises(ConfigError, match="connect a RemoteRolloutWorker"),
    ):
        attach(gateway.url)
    with pytest.raises(LostNodeError, match=r"must answer within 0.2 s"):
        attach("grpc://127.0.0.1:9", timeout_s=0.2)


def faulty_leases(line: Connection, hello: dict[str, Any]) -> list[list[Any]]:
    """Lease two prompts by a call of a session; return the words of the leases in further calls."""
    take = {**hello["who"], "number": 1, "do": "lease", "count": 2, "wait_s": 0.0}
    leases = line.call("put", take, 5.0)["leases"]
    return [[*words[:5], None, hello["run"]] for words in leases]


@pytest.mark.parametrize("keep", [False, True])
def test_calls_that_no_worker_makes_are_refused_and_harm_no_other(keep: bool, data: Path) -> None:
    """Of a faulty worker, or one of another ledger: an error of that call."""
    config = ledger_section(data)
    config["shared_memory"]["keep"] = keep
    with served(config, schema=None) as (replay, gateway), attach(gateway.url) as worker:
        line = Connection(gateway.url, TOKEN, None, False)
        hello = line.begin_session(5.0, grace_s=20.0)
        known, other = faulty_leases(line, hello)
        (mine,) = worker.lease(1)
        leases: list[Any] = [None, 7, "lease", {}, [], known[:4], [*known, 1], [known] * 7]
        wrong = [
            (0, (None, "0", 0.5, True, [0], -1, 1 << 70, 1 << 40, 99)),
            (1, (known[1] + 1, "x", -1)),
        ]
        wrong += [(1, (1 << 63,)), (2, (1, -1, None, 1 << 70)), (3, (1, -1, "x")), (4, ("x",))]
        leases += [[*known[:at], word, *known[at + 1 :]] for at, words in wrong for word in words]
        leases += [[*other[:2], *known[2:]]]
        calls: list[dict[str, Any]] = [
            {"lease": known},
            {"do": "renew"},
            {"number": "x"},
            {"number": None},
        ]
        calls += [
            {"do": do, "lease": one} for one in leases for do in ("renew", "keep", "commit", "fail")
        ]
        calls += [{"do": do, "lease": known} for do in (None, "bogus", [], "commit")]
        reasons = (None, [1], ["x" * 33], ["a", True, "b"])
        calls += [{"do": "fail", "lease": known, "more": more} for more in reasons]
        calls += [{"do": "lease", "count": count, "wait_s": 0} for count in (None, "x", -1)]
        for number, call in enumerate(calls, 10):
            header = {
                **hello["who"],
                "number": number,
                "more": [],
                "absent": [],
                **call,
            }
            kind = line.call("put", header, 5.0)["error"]["kind"]
            assert kind in ("LeaseExpiredError", "ConfigError", "DataError", "StoreError"), call
        table = replay.tables["main"]
        books = check_books(replay)
        assert (books["leased"], books["returned"], books["dropped"], len(replay)) == (3, 0, {}, 0)
        assert table.control[Control.RECOVERIES] == 0, (
            "nothing has failed while the store was locked"
        )
        mine.commit(responses(mine))
        assert check_books(replay)["waiting"] == 1
        assert table.ledger is not None
        with table.lock:  # its lease is lost
            table.ledger.fail(LeaseRecord(*known[:5], b""), "lost", retry=False)
        renew = {**hello["who"], "number": 1000, "do": "renew", "lease": known, "more": []}
        assert line.call("put", renew, 5.0)["error"]["kind"] == "LeaseExpiredError"
        line.end_session(hello["who"])
        books = check_books(replay)
        assert (books["leased"], books["returned"], books["dropped"]) == (0, 1, {"lost": 1})
    remove_garbage(config["shared_memory"]["prefix"], kept=True)


def test_the_next_gateway_may_be_of_another_run(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of as many bytes has another dtype there."""
    monkeypatch.setattr("deepspeed_gear.remote.gateway._END_S", 0.1)
    config = json.loads(json.dumps(ledger_section(data)))
    port = free_port()
    with ExitStack() as stack:
        with served(config, schema=None, port=port) as (_, gateway):
            worker = stack.enter_context(attach(gateway.url))
        config["tables"]["main"]["schema"]["columns"]["weight"]["dtype"] = "int32"
        with served(config, schema=None, port=port) as (replay, _):
            (lease,) = worker.lease()
            ids = lease.commit(responses(lease))
            assert [one["weight"] for one in replay.read(ids)] == [1, 1]
            worker.close()


def test_prompts_arrive_as_they_are_and_as_many_as_a_message_holds(tmp_path: Path) -> None:
    kinds = [Column("note", "json", rows="1", max_bytes=300_000), Column("half", "bfloat16", (2,))]
    schema = Schema([Column("tokens", "int32", role="token"), *kinds])
    with DatasetWriter(tmp_path / "prompts", schema) as writer:
        for index in range(5):
            writer.add({"tokens": [index], "note": {"index": [index]}, "half": [[index, 2]]})
    options = {"schema": None, "max_message_bytes": 1 << 20}
    of_gateway = served(ledger_section(tmp_path / "prompts"), **options)
    with of_gateway as (_, gateway), attach(gateway.url) as worker:
        leases = worker.lease(9)
        assert len(leases) == 3
        for lease in (*leases, *worker.lease(9)):
            prompt = lease.prompt
            assert prompt["note"] == {"index": prompt["tokens"].tolist()}
            assert prompt["half"].dtype == np.uint16


LEASES = """
import sys, time
from pathlib import Path
from deepspeed_gear import RemoteRolloutWorker
worker = RemoteRolloutWorker.connect(sys.argv[1], token=Path(sys.argv[2]), timeout_s=1.0)
print(*[lease.number for lease in worker.lease(2)], flush=True)
time.sleep(600)
"""


def test_kills_of_a_remote_worker_and_of_the_gateway(data: Path, tmp_path: Path) -> None:
    """Leases of the killed come back; a worker of a killed gateway goes on with the next one."""
    config, token = write_run(tmp_path, ledger_section(data, {"max_lag": 0}))
    with Replay(str(config)) as replay:
        gateway, url = serve(config, token)
        killed = WarmProcess(["-c", LEASES, url, str(token)], environment(), PIPE)
        STARTED.append(killed)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "0 1\n"
        killed.kill()
        with attach(url) as worker:
            (third,) = worker.lease()
            assert (third.number, check_books(replay)["leased"]) == (2, 3)
            wait_until(lambda: check_books(replay)["returned"] == 2, "the end of the session")
            (first,) = worker.lease()
            first.commit(responses(first))
            gateway.kill()
            gateway.wait()
            wait_until(lambda: replay.statistics()["prompts"]["main"]["leased"] == 0, "its leases")
            with serving(str(config), port=int(url.rpartition(":")[2])):
                with pytest.raises(LeaseExpiredError, match="the lease of prompt 2 must be held"):
                    third.commit(responses(third))
                leases = worker.lease(9)
                assert [(lease.number, lease.attempt) for lease in leases] == [(1, 2), (2, 2)]
                for lease in leases:
                    lease.commit(responses(lease))
                worker.close()
        assert replay.rollout().values("prompt").tolist() == [0, 0, 1, 1, 2, 2]
        books = check_books(replay)
        assert (books["issued"], books["leases_returned"], books["expired_refused"]) == (3, 3, 1)


def test_leases_of_a_kept_store_outlive_gateways_and_jobs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is taken until its prompt is leased again, and once, also where its
    answer was lost.
    """
    section = ledger_section(data, {"max_lag": 1})
    section["shared_memory"]["keep"] = True
    config, token = write_run(tmp_path, section)
    port = str(free_port())
    running = list[WarmProcess]()

    def kill() -> None:
        running[-1].kill()
        running[-1].wait()

    def start() -> None:
        running.append(serve(config, token, "--port", port)[0])

    def lose(line: Connection, action: str, header: Any, *more: Any) -> None:
        assert (call(line, action, header, *more)["ids"], header["do"]) == ([0, 1], "commit")
        monkeypatch.undo()
        kill()
        start()
        raise ConnectionLost("of the answer")

    with Replay(str(config)) as replay:
        start()
        worker = attach(f"grpc://127.0.0.1:{port}", timeout_s=200.0)  # its thread does not call
        call = Connection.call
        leases = worker.lease(6)
        monkeypatch.setattr(Connection, "call", lose)
        with pytest.raises(LeaseExpiredError):  # it is made again
            leases[0].commit(responses(leases[0]))
        books = check_books(replay)
        assert (
            books["waiting"],
            books["leased"] + books["returned"],
            books["expired_refused"],
        ) == (1, 5, 1)
        assert replay.statistics()["prompts"]["main"]["returned"] == 5
        leases[1].heartbeat()
        leases[1].commit(responses(leases[1]))
        with RolloutWorker.attach(str(config)) as local:
            (again,) = local.lease()
            assert (again.number, again.attempt, check_books(replay)["waiting"]) == (2, 2, 2)
            for change in (leases[2].heartbeat, lambda: leases[2].commit(responses(leases[2]))):
                with pytest.raises(
                    LeaseExpiredError, match="the lease of prompt 2 must be held by"
                ):
                    change()
            again.commit(responses(again))
        (third,) = worker.lease()
        assert (third.number, third.attempt) == (3, 2)
        with pytest.raises(LeaseExpiredError):
            leases[3].commit(responses(leases[3]))
    kill()
    with Replay(str(config)) as replay:
        start()
        third.commit(responses(third))
        for lease in (third, leases[0]):  # has a group
            with pytest.raises(LeaseExpiredError):
                lease.commit(responses(lease))
        assert replay.rollout().values("prompt").tolist() == [0, 0, 1, 1, 2, 2]
        leases[4].commit(responses(leases[4]))
        (again,) = worker.lease()
        assert (again.number, check_books(replay)["waiting"]) == (5, 2)
        with pytest.raises(LeaseExpiredError):
            leases[5].commit(responses(leases[5]))
    kill()
    section["shared_memory"]["run"] = "another"
    config.write_text(json.dumps({"gear": section}))
    with Replay(str(config)) as replay:
        start()
        with pytest.raises(LeaseExpiredError):
            again.commit(responses(again))
        worker.close()
    kill()
    remove_garbage(section["shared_memory"]["prefix"], kept=True)


def test_media_come_once_with_a_group(data: Path) -> None:
    config = with_media(ledger_section(data, {"max_lag": 2}))
    with served(config, schema=None) as (replay, gateway), attach(gateway.url) as worker:
        leases = worker.lease(9)
        ids = []
        for lease in leases[:2]:
            shared = {0: image(7)}
            own = image(20 + lease.number)
            group = responses(lease)
            group = [
                {**one, "image": {**shared, **({0: own} if m else {})}}
                for m, one in enumerate(group)
            ]
            ids += lease.commit(group)
        found = [one["image"] for one in replay.read(ids)]
        assert found == [{0: image(7)}, {0: image(20)}, {0: image(7)}, {0: image(21)}]
        assert replay.statistics()["media"]["main"]["items"] == 3
        with pytest.raises(DataError, match="image: step 0 must be a Media"):
            leases[2].commit([{**one, "image": {0: 5}} for one in responses(leases[2])])
        with pytest.raises(DataError, match="give the Media in place of its number"):
            leases[2].commit([{**one, "image": [5]} for one in responses(leases[2])])
        check_books(replay)
    config = with_media(section())
    columns = {c.name: c for c in SCHEMA}
    schema = Schema([*columns.values(), Column("image", "int64", role="media")])
    with served(config, schema=schema) as (replay, gateway), connect(gateway.url) as writer:
        for number in range(3):
            writer.add({**trajectory(number, 5), "image": {number: image(number % 2)}})
        writer.flush()
        assert [one["image"] for one in replay.read(range(3))] == [
            {0: image(0)},
            {1: image(1)},
            {2: image(0)},
        ]


def test_gear_serve_takes_the_file_with_the_recipe_of_the_ranks(data: Path, tmp_path: Path) -> None:
    path, token = write_run(tmp_path, recipe_section(data))
    with Replay(path) as replay:
        gateway, url = serve(path, token, "--wait", "5")
        with attach(url) as worker:
            (lease,) = worker.lease()
            lease.commit(recipe_responses(lease))
        assert replay.rollout().num_items == 1
        gateway.terminate()
        assert gateway.wait(20) == 0
