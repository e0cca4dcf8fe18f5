"""A policy board gives whole versions to any number of readers, whatever its publisher does.

A run has one on each node, which processes find by its config.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gear_support import SHM, prefix, shared_files, wait_until
from process_support import exit_status, in_child, kill
from torch import nn

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.actors import policy_board as board_module
from deepspeed_gear.actors.policy_board import PolicyBoard
from deepspeed_gear.errors import ConfigError, DataError, StoreError
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.shared_memory import stores

PREFIX = prefix()


def policy(value: float = 0.0, width: int = 8) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    for tensor in made.state_dict().values():
        tensor.fill_(value)
    return made


def value_of(module: nn.Module) -> float:
    """Return the one value that all of a module's parameters and buffers have."""
    values = torch.cat(
        [t.flatten() for t in module.state_dict().values() if t.is_floating_point()]
    ).unique()
    assert len(values) == 1, f"torn: {len(values)} values"
    return float(values[0])


@pytest.fixture
def board() -> Iterator[PolicyBoard]:
    with PolicyBoard.create(policy(1.0), prefix=PREFIX) as made:
        yield made
    assert shared_files(PREFIX) == []


def test_versions(board: PolicyBoard) -> None:
    with PolicyBoard.attach(name=board.name) as reader:
        module = policy()
        assert (reader.load_into(module), value_of(module)) == (1, 1.0)
        assert board.publish(policy(2.0)) == 2
        assert board.publish(policy(7.0), version=70) == 70
        assert (reader.version, reader.load_into(module), value_of(module)) == (70, 70, 7.0)
        nn.init.zeros_(next(module.parameters()))
        assert reader.load_into(module) == 70  # nothing newer: nothing is copied
        assert not next(module.parameters()).any()
        board.publish(policy(1.5).bfloat16())
        module = policy().double()
        reader.load_into(module)
        assert value_of(module) == 1.5


def test_refusals(board: PolicyBoard) -> None:
    with pytest.raises(
        DataError, match=r"module must have the parameters .* got \('0.weight', \(9, 4\)\)"
    ):
        board.publish(policy(width=9))
    with pytest.raises(DataError, match="version must be more than 1, got 1"):
        board.publish(policy(), version=1)
    with PolicyBoard.attach(name=board.name) as reader:
        with pytest.raises(StoreError, match="must be published by the process that made it"):
            reader.publish(policy())
        with pytest.raises(DataError, match="module must have the parameters"):
            reader.load_into(policy(width=7))
    with pytest.raises(StoreError, match="must be an existing store"):
        PolicyBoard.attach(name=f"{PREFIX}-board.none")
    module = policy()
    weight = next(module.parameters())
    # type: ignore[attr-defined]
    weight.data = torch.empty(0)
    weight.ds_status = "not available"
    with pytest.raises(DataError, match=r"parameter 0.weight must be whole; .*GatheredParameters"):
        PolicyBoard.create(module, prefix=PREFIX)


def test_a_board_is_no_store(board: PolicyBoard) -> None:
    name = board.name
    inherited = {store.run.id for store in living_stores(os.getpid())}  # maps of earlier tests
    child = in_child(lambda: (PolicyBoard.attach(name=name), time.sleep(60)))
    try:
        wait_until(lambda: any(board.name in os.readlink(f) for f in files_of(child)), "attaching")
        assert [store for store in living_stores(child) if store.run.id not in inherited] == []
    finally:
        kill(child)


def files_of(process: int) -> list[str]:
    folder = f"/proc/{process}/fd"
    return [
        f"{folder}/{name}" for name in os.listdir(folder) if os.path.lexists(f"{folder}/{name}")
    ]


@pytest.mark.parametrize(("slots", "pause_s"), [(3, 0.0), (1, 0.001)])
def test_never_torn_under_a_hammering_publisher(
    slots: int, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every value that a reader gets is that of the version that it was told.

    With one slot the publisher writes where readers read, so only number and checksum keep them
    apart.
    """
    monkeypatch.setattr(board_module, "_SLOTS", slots)

    def publish() -> None:
        with PolicyBoard.create(policy(1.0, 20_000), prefix=PREFIX) as board:
            modules = [policy(float(value), 20_000) for value in range(8)]
            while True:
                board.publish(modules[(board.version + 1) % 8])
                time.sleep(pause_s)

    child = in_child(publish)
    try:
        wait_until(lambda: stores(PREFIX), "publishing")
        with PolicyBoard.attach(name=stores(PREFIX)[0].name) as reader:
            module = policy(width=20_000)
            seen = set()
            num_reads = 0
            while num_reads < 100 or len(seen) < 20:
                version = reader.load_into(module)
                assert value_of(module) == version % 8
                seen.add(version)
                num_reads += 1
            assert reader.is_published
            kill(child)
            child = 0
            assert not reader.is_published
            if slots > 1:
                reader.load_into(module)  # the last whole version stays
                assert value_of(module) == reader.version % 8
    finally:
        if child:
            kill(child)
        wait_until(lambda: shared_files(PREFIX) == [], "the reaper")


def test_a_publisher_that_dies_between_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed in the middle of each of the steps of a publication."""
    for stage in range(2):

        def die(*_: object, stage: int = stage) -> int:
            os.kill(os.getpid(), 9)
            return stage

        def publish(stage: int = stage, die: object = die) -> None:
            board = PolicyBoard.create(policy(1.0), prefix=PREFIX)
            board.publish(policy(2.0))
            if stage == 0:
                monkeypatch.setattr(board_module, "copy_tensors", die)
            else:
                monkeypatch.setattr(board_module.zlib, "crc32", die)
            wait_until(lambda: (SHM / f"{PREFIX}-go").exists(), "the reader")
            board.publish(policy(3.0))

        child = in_child(publish)
        wait_until(lambda: stores(PREFIX), "the board")
        with PolicyBoard.attach(name=stores(PREFIX)[0].name) as reader:
            (SHM / f"{PREFIX}-go").touch()
            assert exit_status(child) == -9
            module = policy()
            assert (reader.load_into(module), value_of(module)) == (2, 2.0)
        (SHM / f"{PREFIX}-go").unlink()
        assert shared_files(PREFIX) == []


def test_a_damaged_board_is_an_error(board: PolicyBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_PATIENCE_S", 0.05)
    with PolicyBoard.attach(name=board.name) as reader:
        board._views["values"][:, 3] += 1
        with pytest.raises(StoreError, match=r"must hold a whole version within 0.05 s, got 1"):
            reader.load_into(policy())


SCHEMA = Schema([Column("action", "float32")])


def section(run: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the config of a run whose table takes writers."""
    table = {"capacity_steps": 100, "writers": 1, **options}
    memory = {"prefix": PREFIX} | ({} if run is None else {"run": run})
    tables = {"main": table}
    return {"tables": tables, "batch_size": 1, "timeout_s": 0.5, "shared_memory": memory}


def replay(run: str | None = None, **options: Any) -> Replay:
    return Replay(section(run, **options), schemas={"main": SCHEMA})


def test_workers_find_the_board_of_their_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the config, its options, the name of the run, or the environment."""
    monkeypatch.delenv("GEAR_RUN", raising=False)
    with replay() as first, replay("second") as second, replay(capacity_steps=50) as third:
        boards = [PolicyBoard.create(policy(1.0), one) for one in (first, second, third)]
        apart = PolicyBoard.create(policy(9.0), prefix=PREFIX)  # of no run: found by its name alone
        with PolicyBoard.attach(section("second")) as reader:
            assert reader.name == boards[1].name
        with PolicyBoard.attach(section(capacity_steps=50)) as reader:
            assert reader.name == boards[2].name
        with PolicyBoard.attach(section(), run=first.run) as reader:
            assert reader.name == boards[0].name
        monkeypatch.setenv("GEAR_RUN", "second")
        with PolicyBoard.attach() as reader:
            assert reader.name == boards[1].name
        monkeypatch.delenv("GEAR_RUN")
        with pytest.raises(StoreError, match=r"must be named where there are several.*give run or"):
            PolicyBoard.attach(section(), wait_s=0.0)
        rule = r"board of a run, of this config, of run other, within 0 s; call PolicyBoard.create"
        with pytest.raises(StoreError, match=rule):
            PolicyBoard.attach(section(), run="other", wait_s=0.0)
        with pytest.raises(
            StoreError, match=r"gear.tables.main.capacity_steps: 60 here, 100 there"
        ):
            PolicyBoard.attach(section(capacity_steps=60), wait_s=0.0)
        with pytest.raises(ConfigError, match="name must be the only argument"):
            PolicyBoard.attach(section(), name=apart.name)
        for one in (*boards, apart):
            one.close()
        with pytest.raises(StoreError, match="must be the board of a run, of this config"):
            PolicyBoard.attach(section(), wait_s=0.0)
    assert shared_files(PREFIX) == []


def test_ranks_of_a_node_share_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader writes; the others check and count."""
    with replay() as own:
        with monkeypatch.context() as other:
            other.setattr(Replay, "is_node_leader", False)
            with pytest.raises(
                StoreError, match=r"must be created by the node leader within 0.5 s"
            ):
                PolicyBoard.create(policy(1.0), own)
        with PolicyBoard.create(policy(1.0), own, version=5) as leader:
            assert leader.version == 5
            with pytest.raises(StoreError, match="must be created once on a node"):
                PolicyBoard.create(policy(1.0), own)
            monkeypatch.setattr(Replay, "is_node_leader", False)
            with PolicyBoard.create(policy(2.0), own, version=5) as rank:
                assert rank.name == leader.name
                for number in (None, None, 9):
                    version = rank.publish(policy(3.0), number)
                    assert leader.publish(policy(4.0), number) == version
                assert version == 9
                module = policy()
                assert (rank.load_into(module), value_of(module)) == (9, 4.0)
                with pytest.raises(DataError, match="version must be more than 9, got 9"):
                    rank.publish(policy(), version=9)
                with pytest.raises(DataError, match="must have the parameters"):
                    rank.publish(policy(width=9))
            with pytest.raises(DataError, match="must have the parameters"):
                PolicyBoard.create(policy(width=9), own)
    assert shared_files(PREFIX) == []


def test_a_board_has_the_dtypes_of_its_module() -> None:
    """Their bits arrive in a module of these dtypes; nothing is rounded by a publication."""
    torch.manual_seed(0)
    own = nn.ParameterDict(
        {
            name: nn.Parameter(torch.randn(7).to(dtype))
            for name, dtype in (
                ("a", torch.bfloat16),
                ("b", torch.float64),
                ("c", torch.float16),
                ("d", torch.float8_e4m3fn),
                ("e", torch.float32),
            )
        }
    )
    with PolicyBoard.create(own, prefix=PREFIX) as board:
        assert board.tensors.num_bytes == sum((16, 64, 16, 16, 32))
        with PolicyBoard.attach(name=board.name) as reader:
            found = nn.ParameterDict({n: nn.Parameter(torch.zeros_like(p)) for n, p in own.items()})
            reader.load_into(found)
            for name, wanted in own.items():
                assert torch.equal(found[name].view(torch.uint8), wanted.view(torch.uint8)), name
            for name, dtype in (
                ("a", torch.float32),
                ("a", torch.float16),
                ("c", torch.bfloat16),
                ("d", torch.bfloat16),
                ("e", torch.float64),
            ):
                other = nn.ParameterDict(own)
                other[name] = nn.Parameter(own[name].to(dtype))
                rule = f"parameter {name} must fit into .*, the board's dtype, without rounding"
                with pytest.raises(DataError, match=rule):
                    board.publish(other)
            wider = nn.ParameterDict(own)
            wider["e"] = nn.Parameter(own["e"].bfloat16())
            assert board.publish(wider) == 2
            reader.load_into(found)
            assert torch.equal(found["e"], own["e"].bfloat16().float())


def test_a_closed_board_is_an_error() -> None:
    board = PolicyBoard.create(policy(1.0), prefix=PREFIX)
    board.close()
    for call in (board.publish, board.load_into):
        with pytest.raises(StoreError, match="must be open; it was closed"):
            call(policy())
