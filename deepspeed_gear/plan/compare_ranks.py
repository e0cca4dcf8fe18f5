"""Comparison of ranks: their config, the backend and loading of a node's ranks, their data sets."""

from __future__ import annotations

from typing import Any

from deepspeed_gear.config import GearConfig, gear_config, parse
from deepspeed_gear.config.resume_options import difference, shared_options
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError, DataError


def read_config(control_plane: ControlPlane, given: Any) -> tuple[GearConfig, dict[str, Any]]:
    """Parse the config on every rank and compare.

    Returns:
        The config, and the batch sizes of the ds_config around it.
    """
    section, sizes = control_plane.attempt("reading the config", lambda: gear_config.read(given))
    config = control_plane.attempt("the gear section", lambda: parse(section))
    others = control_plane.all_gather((shared_options(config), sizes))
    first, first_sizes = others[0]
    for rank, (other, other_sizes) in enumerate(others):
        differences = difference(first, other) if other != first else []
        if other_sizes != first_sizes:
            differences.append(f"batch sizes of the ds_config: {first_sizes} and {other_sizes}")
        if differences:
            given = f"rank 0 and rank {rank}: {'; '.join(differences)}"
            raise ConfigError(
                "the gear section",
                "must be the same on all ranks",
                given,
                "give all ranks one config file",
            )
    return config, sizes


def compare_node(control_plane: ControlPlane, topology: Topology, config: GearConfig) -> None:
    """Check that the ranks of a node have the same backend and `load`. Collective.

    They share a store.
    """
    tables = config.resolved_tables.items()
    mine: dict[str, str] = {"gear.backend": "cpu" if config.backend == "auto" else config.backend}
    mine |= {
        f"gear.tables.{name}.data.load": t.data.load for name, t in tables if t.data is not None
    }
    for rank, other in enumerate(control_plane.all_gather(mine)):
        for option, value in mine.items():
            if topology.nodes[rank] == topology.node and other.get(option) != value:
                given = f"rank {control_plane.rank}: {value}, rank {rank}: {other.get(option)}"
                raise ConfigError(
                    option,
                    "must be the same on all ranks of a node",
                    given,
                    "give the ranks of a node one config",
                )


def open_data(control_plane: ControlPlane, config: GearConfig) -> dict[str, Dataset]:
    """Open and compare the data sets on every rank. Collective.

    Nodes may have parts of one whole.

    Raises:
        DataError: A data set is missing or broken, or not of the same whole on all ranks.
    """
    tables = config.resolved_tables.items()
    data = control_plane.attempt(
        "opening the data sets",
        lambda: {name: Dataset.open(t.data.path) for name, t in tables if t.data is not None},
    )
    prints = {name: dataset.whole_fingerprint for name, dataset in data.items()}
    for rank, other in enumerate(control_plane.all_gather(prints)):
        for name, fingerprint in prints.items():
            if other[name] != fingerprint:
                rule = "must be the same data set on all ranks"
                given = (
                    f"rank {control_plane.rank}: {fingerprint[:12]}, "
                    f"rank {rank}: {other[name][:12]}"
                )
                remedy = "copy it again; nodes may have parts of one whole, of one `gear split`"
                raise DataError(f"table {name}: {data[name].path}", rule, given, remedy)
    return data
