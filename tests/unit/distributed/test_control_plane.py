"""Exchange without a process group; with one: tests/distributed/test_plain_group.py."""

from __future__ import annotations

import pytest

from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import RankCoordinates, Topology, node_identity
from deepspeed_gear.errors import ConfigError, GearError, PeerError, StoreError, relayed


def test_one_process_agrees_with_itself() -> None:
    exchange = ControlPlane()
    assert (exchange.rank, exchange.world_size) == (0, 1)
    assert exchange.gather("x") == ["x"]
    assert exchange.broadcast(7) == 7
    exchange.barrier()
    assert exchange.agree("adding", lambda: 1 + 1) == 2
    exchange.close()
    exchange.close()


@pytest.mark.parametrize("error", [ValueError("mine"), ConfigError("gear.seed", "must be an integer", "x")])
def test_its_own_error_stays_as_it_is(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        ControlPlane().agree("failing", fail)
    assert caught.value is error


def test_place_of_one_process() -> None:
    topology = Topology.discover(ControlPlane(), RankCoordinates())
    assert topology == Topology(0, (RankCoordinates(),), (0,))
    assert topology.leads_node
    assert (topology.peer, topology.num_peers, topology.num_nodes) == (0, 1, 1)
    assert node_identity() == node_identity()


@pytest.mark.parametrize(("data_rank", "data_world"), [(1, 2), (0, 2), (1, 1)])
def test_a_place_that_is_no_grid_is_refused(data_rank: int, data_world: int) -> None:
    text = f"must give the 1 ranks one place each in a grid, got 'rank 0: data {data_rank} of {data_world}'"
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
    assert str(there) == f"{cause} [raised on rank 3: a cut, relayed by node1 (b), relayed by rank 0]"
    cut_short = relayed(PeerError, str(there)[:70], "rank 0")
    assert str(cut_short) == str(there)[:70] + " [raised on rank 0]"
