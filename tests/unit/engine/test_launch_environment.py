"""Variables of ranks where no launcher has set them. docs/how-to/notebooks.md runs
`initialize` so.
"""

import os
import socket

import pytest

from deepspeed_gear.engine import launch_environment
from deepspeed_gear.errors import ConfigError

RANKS = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
PORT = "GEAR_SINGLE_RANK_PORT"
COUNTS = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]


def prepared(monkeypatch: pytest.MonkeyPatch, **given: str) -> dict[str, str]:
    """Prepare an environment; return its variables of ranks."""
    for name in (*RANKS, PORT, *COUNTS):
        monkeypatch.setenv(
            name, given.get(name, "")
        )  # also what is set below is undone after the test
        if name not in given:
            monkeypatch.delenv(name)
    launch_environment.be_single_rank_unless_launched()
    return {name: os.environ[name] for name in RANKS if name in os.environ}


def test_a_process_without_a_launcher_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(monkeypatch)
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"]) == ("0", "0", "1")
    with socket.socket() as server:
        server.bind((first["MASTER_ADDR"], int(first["MASTER_PORT"])))  # the port is free
        server.listen()
        # A child, such as `!python train.py` in a notebook, inherits the variables: it gets its own
        # port.
        child = prepared(monkeypatch, **first, **{PORT: first["MASTER_PORT"]})
    assert child["MASTER_PORT"] != first["MASTER_PORT"]
    # A launcher that the notebook starts has set its own.
    assert prepared(monkeypatch, **RANKS, **{PORT: first["MASTER_PORT"]}) == RANKS
    assert prepared(monkeypatch, MASTER_PORT="29501")["MASTER_PORT"] == "29501"
    # One process of MPI, or a batch script, needs no MPI.
    assert prepared(monkeypatch, **dict.fromkeys(COUNTS, "1"))["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("name", COUNTS)
def test_mpi_and_srun_are_left_to_deepspeed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, **RANKS, **{name: "2"}) == RANKS
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=rf"mpi4py must be installed where {name} is set and RANK, .*not;"
    ):
        prepared(monkeypatch, **{name: "2"})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert prepared(monkeypatch, **{name: "2"}) == {}


@pytest.mark.parametrize(
    "absent", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_an_incomplete_launch_is_refused(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in RANKS.items() if name != absent}
    with pytest.raises(
        ConfigError, match=rf"{absent} must be set where .* are; start with deepspeed or"
    ):
        prepared(monkeypatch, **given)
