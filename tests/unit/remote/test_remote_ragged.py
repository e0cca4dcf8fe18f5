"""Ragged columns through a gateway: added by remote writers, and by leases of other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_support import check_books, ledger_section, responses, write_prompts
from ragged_tables import MEMORY, RAGGED, ragged_section, support, supported
from remote_support import TOKEN, connect, served

from deepspeed_gear import DataError, RemoteRolloutWorker
from deepspeed_gear.data.media_digests import encoded_item

NAMES = ("ids", "logs")


def check(found: list[dict[str, Any]], given: list[dict[str, Any]]) -> None:
    for one, other in zip(found, given, strict=True):
        for name in NAMES:
            assert one[name].values.double().equal(other[name].values.double())
            assert one[name].offsets.equal(other[name].offsets)


def test_a_remote_writer_adds_ragged_columns() -> None:
    config = ragged_section(table={"writers": 1})
    with served(config, schema=None) as (replay, gateway), connect(gateway.url) as writer:
        given = supported(9)
        for one in given:
            writer.add(one)
        writer.flush()
        check(replay.read(range(9)), given)
        with pytest.raises(DataError, match="ids must have values for each step; give Ragged"):
            writer.add({**given[0], "ids": 5})
        with pytest.raises(DataError, match=r"ids must have values for each of the \d+ steps"):
            writer.add({**given[0], "ids": [[1]]})


def test_a_group_of_another_machine_has_ragged_columns(tmp_path: Path) -> None:
    config = ledger_section(write_prompts(tmp_path / "prompts", 7), {"max_lag": 2})
    main = config["tables"]["main"]
    main["schema"] = {"columns": {**main["schema"]["columns"], **RAGGED}}
    main["ragged"] = dict(MEMORY)
    with served(config, schema=None) as (replay, gateway):
        options: dict[str, Any] = {"token": TOKEN, "timeout_s": 20.0}
        with RemoteRolloutWorker.connect(gateway.url, **options) as worker:
            given = []
            ids = []
            for lease in worker.lease(3):
                members = [
                    {**one, **support(len(one["tokens"]), 10 * lease.number + m % 2)}
                    for m, one in enumerate(responses(lease))
                ]
                given += members
                ids += lease.commit(members)
            check(replay.read(ids), given)
            check_books(replay)


def test_items_of_another_machine_are_checked() -> None:
    with served(ragged_section(table={"writers": 1}), schema=None) as (replay, _):
        table = replay.tables["main"]
        spec = table.spec.media
        assert spec is not None
        one = supported(1)[0]
        steps = len(one["tokens"])
        counts = np.ones(steps, np.uint8)
        values = np.zeros(steps, np.int32)
        # By the columns of items: counts and values of ids, counts and values of logs.
        wrong: list[list[Any]] = [
            [counts[:-1], values[:-1], (), ()],  # too few steps
            [counts, values[:-1], (), ()],  # too few values
            [(), (), counts, np.zeros(steps, np.uint16)],  # of the other column
            [counts, values, counts, np.zeros(steps, np.uint16)],
            [counts * 0 + 200, np.zeros(200 * steps, np.int32), (), ()],  # more than max_values
        ]
        for parts in wrong:
            item = encoded_item(parts)
            items = {item.number: item}
            with pytest.raises(DataError, match=r"column ids must have the counts of \d+ steps"):
                spec.take("x", table.schema, {**one, "ids": np.int64(item.number)}, items)
        good = encoded_item([counts, values, (), ()])
        taken = spec.take(
            "x", table.schema, {**one, "ids": np.int64(good.number)}, {good.number: good}
        )
        assert taken["ids"] == good.number
        with pytest.raises(DataError, match="ids must have values for each step"):
            spec.take("x", table.schema, {**one, "ids": np.int64(good.number)}, {})
