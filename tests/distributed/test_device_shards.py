"""Tables in the memory of the replicas' devices, from which all draw together."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gear_support import lengths_of, write_dataset
from process_support import Ranks, run_ranks
from shard_cases import PRIORITIZED, SAMPLERS, shard_case


@pytest.mark.parametrize(("ranks", "tensor", "sizes"), [(2, 1, (24, 1)), (3, 1, (36, 2)), (4, 2, (24, 2))])
def test_replicas_draw_what_one_process_draws(
    tmp_path: Path, ranks: int, tensor: int, sizes: tuple[int, int]
) -> None:
    data = write_dataset(tmp_path / "set", lengths_of(30, most=12))
    samplers = SAMPLERS if ranks == 2 or os.environ.get("GEAR_LONG_TESTS") == "1" else SAMPLERS[2::2]
    cases = [shard_case(sampler, ranks // tensor, tensor, sizes) for sampler in samplers]
    with_priorities = [sampler for sampler in samplers if sampler["kind"] != "uniform"]
    cases += [shard_case(sampler, ranks // tensor, tensor, sizes, data) for sampler in with_priorities]
    for output in run_ranks("device_shards.py", ranks, json.dumps(cases), str(tmp_path / "saved")):
        assert output.endswith("done\n")


def test_what_goes_wrong_has_a_name_on_every_rank() -> None:
    section = shard_case(PRIORITIZED | {"unit": "step"}, 2, 1, (8, 1))["section"]
    section = {**section, "fields": {"code": {}}, "timeout_s": 8.0, "n_step": None}
    (status, output), _ = Ranks("device_faults.py", 2, json.dumps(section)).wait()
    assert status == 0, output
    assert output.endswith("done\n")
