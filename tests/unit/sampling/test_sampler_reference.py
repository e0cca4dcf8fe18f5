"""Each sampler's `sample` is the reference of its native draw: the same global batches, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gear_support import trajectory
from replay_support import online, take

from deepspeed_gear.config import parse
from deepspeed_gear.sampling.samplers import SAMPLERS
from deepspeed_gear.sampling.samplers.base import SamplerScope, SamplerSpec

KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "stratified": {"kind": "uniform", "stratified": True},
    "steps": {"kind": "uniform", "unit": "step"},
    "length": {"kind": "length"},
    "weighted": {"kind": "weighted", "weight": "task"},
    "recent": {"kind": "recent", "newest": 20},
    "prioritized": {"kind": "prioritized"},
    "prioritized steps": {"kind": "prioritized", "unit": "step", "stratified": True},
}


@pytest.mark.parametrize("name", KINDS)
def test_sample_gives_the_bits_of_the_native_draw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"sampler": KINDS[name], "seed": 3}
    sampler = SAMPLERS[type(parse({"tables": {"main": {"capacity_steps": 9}}, **options}).item_sampler)]
    own_spec, asked, sample = sampler.spec, [], sampler.sample

    def without_native(self: Any, scope: SamplerScope) -> SamplerSpec:
        spec = own_spec(self, scope)
        assert spec.native is not None
        return replace(spec, native=None)

    def noted(self: Any, draw: Any) -> Any:
        asked.append(draw.count)
        return sample(self, draw)

    native = _batches(options)
    monkeypatch.setattr(sampler, "spec", without_native)
    monkeypatch.setattr(sampler, "sample", noted)
    assert _batches(options) == native
    assert asked == [8] * 20


def _batches(options: dict[str, Any]) -> list[tuple[list[Any], ...]]:
    with online(**options) as replay:
        for number in range(40):
            replay.add(trajectory(number, 1 + 7 * number % 11))
        return [
            (batch.trajectory_id.tolist(), batch.anchor.tolist(), batch.is_weight.tolist())
            for batch in take(replay, 20)
        ]
