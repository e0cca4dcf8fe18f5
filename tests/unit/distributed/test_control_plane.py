"""Exchange without a process group; with one: tests/distributed/test_plain_group.py."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from thread_ranks import ThreadPlane, on_ranks

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.sequence_sum import check_process_group
from deepspeed_gear.distributed.topology import RankCoordinates, Topology, node_identity
from deepspeed_gear.errors import (
    ConfigError,
    GearError,
    NotReadyError,
    PeerError,
    StoreError,
    relayed,
)
from deepspeed_gear.sampling.batch_admission import ItemsHeld
from deepspeed_gear.sampling.rate_rounds import RateRounds


def test_one_process_agrees_with_itself() -> None:
    control_plane = ControlPlane()
    assert (control_plane.rank, control_plane.world_size) == (0, 1)
    assert control_plane.all_gather("x") == ["x"]
    assert control_plane.broadcast(7) == 7
    control_plane.barrier()
    assert control_plane.attempt("adding", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):  # its own error stays as it is
        control_plane.attempt("dividing", lambda: 1 / 0)
    control_plane.close()
    control_plane.close()


def test_place_of_one_process() -> None:
    topology = Topology.discover(ControlPlane(), RankCoordinates())
    assert topology == Topology(0, (RankCoordinates(),), (0,))
    assert topology.leads_node
    assert (topology.peer, topology.num_peers, topology.num_nodes) == (0, 1, 1)
    assert node_identity() == node_identity()


@pytest.mark.parametrize(("data_rank", "data_world"), [(1, 2), (0, 2), (1, 1)])
def test_a_place_that_is_no_grid_is_refused(data_rank: int, data_world: int) -> None:
    text = (
        f"must give the 1 ranks one place each in a grid, got 'rank 0: data {data_rank} of "
        f"{data_world}'"
    )
    with pytest.raises(ConfigError, match=text):
        Topology.discover(ControlPlane(), RankCoordinates(data_rank, data_world))


def test_a_relayed_error_begins_with_its_cause() -> None:
    """Over a rank, its node and the ranks of another node, however much of the text has come."""
    cause = StoreError("table main", "must have items", 0, "add some")
    there: GearError = relayed(StoreError, str(cause), "rank 3: a cut")
    assert isinstance(there, StoreError)
    assert str(there) == f"{cause} [raised on rank 3: a cut]"
    for where in ("node1 (b)", "rank 0"):
        there = relayed(PeerError, str(there), where)
    assert (
        str(there) == f"{cause} [raised on rank 3: a cut, relayed by node1 (b), relayed by rank 0]"
    )
    cut_short = relayed(PeerError, str(there)[:70], "rank 0")
    assert str(cut_short) == str(there)[:70] + " [raised on rank 0]"


@pytest.mark.parametrize(
    ("kind", "there"), [(NotReadyError, NotReadyError), (StoreError, PeerError)]
)
def test_a_rank_that_is_not_ready_is_no_peer_that_failed(
    kind: type[GearError], there: type
) -> None:
    """The others may try again, too."""

    def fail() -> None:
        raise kind("table main", "must be filled", 0)

    own, other = on_ranks(
        2, lambda plane: plane.attempt("a cut", fail if plane.rank == 0 else lambda: None)
    )
    assert type(own) is kind
    assert type(other) is there
    assert str(other) == f"{own} [raised on rank 0: a cut]"


def test_values_that_differ_are_an_error_on_every_rank() -> None:
    assert on_ranks(2, lambda plane: plane.compare("the columns", ("a",))) == [None, None]
    for error in on_ranks(2, lambda plane: plane.compare("the columns", "ab"[plane.rank])):
        assert isinstance(error, PeerError)
        assert str(error).startswith(
            "the columns must be the same on every rank, got 'a on rank 0, b on rank 1'"
        )


def test_a_leader_that_cannot_count_its_items_is_an_error_on_every_rank() -> None:
    def missing(plane: ThreadPlane) -> int:
        def held_items(key: int) -> ItemsHeld:
            if plane.rank == 1:
                raise StoreError("the lock of table main", "must be free within 20 s")
            return ItemsHeld(3, 0, 0)

        table = SimpleNamespace(lock=contextlib.nullcontext(), ledger=None)
        spec = SimpleNamespace(num_shards=2)
        stream: Any = SimpleNamespace(table=table, spec=spec, held_items=held_items)
        return RateRounds(plane, leads=True).missing_items(stream, 0)

    other, own = on_ranks(2, missing)
    assert type(own) is StoreError
    assert type(other) is PeerError
    assert str(other) == f"{own} [raised on rank 1: counting the items of its node]"


@pytest.mark.parametrize(
    ("sequence", "nodes", "world", "refused"),
    [
        (2, (0, 0, 1, 1), 8, True),
        (2, (0, 0, 1, 1), 4, False),
        (2, (0,) * 4, 8, False),
        (1, (0, 0, 1, 1), 8, False),
    ],
)
def test_a_part_of_the_world_has_no_sequences_over_nodes(
    sequence: int,
    nodes: tuple[int, ...],
    world: int,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    for rank in range(4):
        places = tuple(
            RankCoordinates(
                n // sequence, 4 // sequence, sequence_rank=n % sequence, sequence_world=sequence
            )
            for n in range(4)
        )
        topology = Topology(rank, places, nodes)
        check_process_group(topology, None)
        if not refused:
            check_process_group(topology, "a group")
            continue
        text = (
            "process_group must hold all ranks of the world where sequence ranks train on "
            "several nodes"
        )
        with pytest.raises(ConfigError, match=rf"{text}, got '4 of 8 ranks'; launch"):
            check_process_group(topology, "a group")
