"""The `gear` section: what is admitted, what it becomes, and the text of every refusal."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.config import (
    EveryConfig,
    FieldConfig,
    GearConfig,
    batch_sizes,
    difference,
    parse,
    refuse_batch_sizes,
)
from deepspeed_gear.errors import ConfigError, GearError
from deepspeed_gear.schema import Column

OFFLINE: dict[str, Any] = {
    "seed": 0,
    "data": {"path": "data/hopper", "split": {"eval": 0.05}},
    "sampler": {"kind": "uniform", "unit": "step"},
    "fields": {
        "observation": {"offset": -19, "length": 20, "normalize": "mean_std"},
        "action": {"offset": -19, "length": 20},
        "return_to_go": {"offset": -19, "length": 20, "scale": 0.001},
        "timestep": {"offset": -19, "length": 20},
    },
}
ONLINE: dict[str, Any] = {
    "tables": {
        "online": {
            "capacity_steps": 1000,
            "max_length": 100,
            "schema": {"columns": {"observation": {"dtype": "float32", "shape": [3], "rows": "T+1"}}},
        },
        "demo": {"data": "data/hopper"},
    },
    "sampler": {
        "kind": "length",
        "table": "demo",
        "anchors": {"every": 4},
        "where": {"return": {"min": 1000}},
    },
    "n_step": {"n": 3, "gamma": 0.99},
}


def _with(*path_and_value: Any) -> dict[str, Any]:
    """Return the offline config with one option set."""
    *path, last, value = path_and_value
    section = copy.deepcopy(OFFLINE)
    inner = section
    for key in path:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return section


def _table(**options: Any) -> dict[str, Any]:
    return {"tables": {"main": options}}


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(_with("seed", list(range(1000))))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("section", [OFFLINE, ONLINE, {"data": "d"}], ids=["offline", "online", "shortest"])
def test_json_round_trip(section: dict[str, Any]) -> None:
    config = parse(section)
    dumped = config.to_json()
    again = parse(json.loads(json.dumps(dumped, allow_nan=False)))
    assert again == config
    assert again.to_json() == dumped
    assert again.digest == config.digest
    assert set(section) <= set(dumped)
    assert parse(config) is config


def test_values_are_as_given() -> None:
    config = parse(
        {**OFFLINE, "timeout_s": 5, "fields": {"action": {"pad": -1, "as": "float32", "length": 3}}}
    )
    assert type(config.timeout_s) is float
    assert type(config.fields["action"].pad) is int
    assert config.fields["action"].dtype == "float32"
    assert config.data is not None
    assert (config.data.path, config.data.load) == ("data/hopper", "mmap")
    online = parse(ONLINE)
    assert online.sampler.anchors == EveryConfig(every=4)
    assert online.sampler.where["return"].min == 1000
    assert online.sampler.where["return"].in_ is None
    schema = online.tables["online"].schema
    assert schema is not None
    assert schema["observation"] == Column("observation", "float32", (3,), rows="T+1")


def test_tables() -> None:
    assert list(parse(OFFLINE).resolved_tables) == ["main"]
    assert parse(OFFLINE).sampled_tables == ("main",)
    assert parse(OFFLINE).resolved_tables["main"].data == parse(OFFLINE).data
    assert list(parse(ONLINE).resolved_tables) == ["online", "demo"]
    assert parse(ONLINE).sampled_tables == ("demo",)
    assert parse(_table(capacity_steps=1)).sampled_tables == ("main",)


def test_config_is_frozen() -> None:
    config = parse(OFFLINE)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValueError, match="frozen"):
        config.sampler.kind = "epoch"
    assert parse({"data": "d"}).sampler == parse({"data": "e"}).sampler


def test_defaults_are_not_shared() -> None:
    parse({"data": "d"}).fields["x"] = FieldConfig()
    assert parse({"data": "d"}).fields == {}


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["auto", "1", "", "edge", "n_step"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
EVERY_OPTION = """
seed backend prefetch exchange batch_size micro_batch_size gradient_accumulation_steps timeout_s
threads metrics
data data.path data.split data.split.eval data.load tables shared_memory shared_memory.prefix
shared_memory.huge_pages n_step n_step.n n_step.gamma fields fields.action fields.action.column
fields.action.derived fields.action.offset fields.action.length fields.action.align fields.action.pad
fields.action.normalize fields.action.scale fields.action.as sampler sampler.kind sampler.unit sampler.table
sampler.anchors sampler.anchors.every sampler.where sampler.where.return sampler.where.return.min
sampler.where.return.in
"""


def _same(given: Any, kept: Any) -> bool:
    """Tell whether a value was kept: an integer may become the equal float, defaults may join an object."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return all(key in kept and _same(value, kept[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(kept, list):
        return len(given) == len(kept) and all(map(_same, given, kept))
    if isinstance(given, int) and not isinstance(given, bool) and isinstance(kept, float):
        return float(given) == kept
    return type(given) is type(kept) and bool(given == kept)


def check_kept_or_refused(option: str, value: Any) -> None:
    """Set an option to a value: it is kept as it is, or refused by name; nothing else may happen."""
    path = option.split(".")
    base = _with("sampler", "anchors", {"every": 2})
    base["n_step"] = {"n": 1, "gamma": 0.5}
    base["sampler"]["where"] = {"return": {"max": 1e300}}
    inner = base
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
    try:
        kept: Any = parse(base).to_json()
    except ConfigError as error:
        text = str(error)
        assert text.startswith("gear"), text
        assert "\n" not in text
        return
    for key in path:
        kept = kept[key]
    short_form = option == "data" and isinstance(value, str)
    assert _same({"path": value} if short_form else value, kept)


AWKWARD = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**63,
    1.0,
    0.5,
    math.nan,
    math.inf,
    "1",
    "auto",
    "",
    "edge",
    b"a",
    [],
    [1.0],
    {},
]


@pytest.mark.parametrize("option", EVERY_OPTION.split())
def test_awkward_values_are_kept_or_refused(option: str) -> None:
    for value in AWKWARD:
        check_kept_or_refused(option, value)
    check_kept_or_refused(option, AWKWARD[:2])


@given(option=st.sampled_from(EVERY_OPTION.split()), value=JSON_VALUES)
def test_any_value_is_kept_or_refused(option: str, value: Any) -> None:
    check_kept_or_refused(option, value)


def test_digest_is_of_what_ranks_share() -> None:
    base = parse(OFFLINE)
    for section in (
        _with("threads", 4),
        _with("backend", "cpu"),
        _with("timeout_s", 1),
        _with("metrics", False),
        _with("data", "path", "/local/copy"),
        _with("data", "load", "memory"),
        _with("shared_memory", "huge_pages", False),
        {**{k: v for k, v in OFFLINE.items() if k != "data"}, "tables": {"main": {"data": OFFLINE["data"]}}},
    ):
        assert parse(section).digest == base.digest
        assert difference(base, parse(section)) == []
    for section in (
        _with("seed", 1),
        _with("data", "split", {"eval": 0.1}),
        _with("data", "replicate", True),
        _with("sampler", "unit", "trajectory"),
        _with("fields", "action", "offset", -18),
        _with("prefetch", 1),
        _with("shared_memory", "prefix", "other"),
        _with("batch_size", 64),
    ):
        assert parse(section).digest != base.digest
        assert len(difference(base, parse(section))) == 1


def test_resume_digest_is_of_what_the_samples_are() -> None:
    base = parse(OFFLINE)
    for section in (
        _with("prefetch", 1),
        _with("batch_size", 64),
        _with("gradient_accumulation_steps", 4),
        _with("data", "replicate", True),
    ):
        assert parse(section).resume_digest == base.resume_digest
    for section in (_with("seed", 1), _with("sampler", "unit", "trajectory"), _with("fields", "reward", {})):
        assert parse(section).resume_digest != base.resume_digest


def test_difference_names_options_and_values() -> None:
    a, b = parse(OFFLINE), parse({**_with("fields", "reward", {"pad": 1}), "seed": 1})
    lines = difference(a, b)
    assert lines[0] == "gear.seed: 0 and 1"
    assert "gear.fields.reward.pad: absent and 1" in lines
    assert "gear.fields.reward.pad: 1 and absent" in difference(b, a)
    assert difference(a, parse(_with("sampler", "where", {"return": {"min": 1}}))) == [
        "gear.sampler.where: {} and absent",
        "gear.sampler.where.return.min: absent and 1",
        "gear.sampler.where.return.max: absent and null",
        "gear.sampler.where.return.in: absent and null",
    ]


def test_batch_sizes_without_an_engine() -> None:
    assert batch_sizes(parse({"data": "d", "batch_size": 64}), 4) == (16, 64)
    assert batch_sizes(parse({"data": "d", "batch_size": 64, "gradient_accumulation_steps": 2}), 4) == (8, 64)
    assert batch_sizes(parse({"data": "d", "micro_batch_size": 8, "gradient_accumulation_steps": 2}), 4) == (
        8,
        64,
    )
    assert batch_sizes(parse({"data": "d", "micro_batch_size": 16, "batch_size": 64}), 4) == (16, 64)
    with pytest.raises(
        ConfigError, match=r"gear.batch_size must be given where there is no engine; or micro_batch_size"
    ):
        batch_sizes(parse({"data": "d"}), 1)
    with pytest.raises(ConfigError) as caught:
        batch_sizes(parse({"data": "d", "batch_size": 64, "micro_batch_size": 16}), 3)
    assert str(caught.value) == (
        "gear.batch_size must be micro_batch_size * gradient_accumulation_steps * ranks (16 * 1 * "
        "3), got 64; "
        "change one of them, or the number of ranks"
    )


def test_batch_sizes_with_an_engine_are_refused() -> None:
    refuse_batch_sizes(parse(OFFLINE))
    with pytest.raises(ConfigError) as caught:
        refuse_batch_sizes(parse(_with("batch_size", 64)))
    assert str(caught.value) == (
        "gear.batch_size must not be given with an engine or a ds_config, got 64; "
        "use train_batch_size of ds_config.json"
    )


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(ValueError, match="must not be given together"):
        GearConfig(data={"path": "d"}, tables={"a": {"capacity_steps": 1}})
    assert issubclass(ConfigError, GearError)
