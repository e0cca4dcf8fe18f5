"""The `gear` section: what is admitted, what it becomes, and the text of every refusal."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from refusal_table import refusals

from deepspeed_gear.config import GearConfig, batch_sizes, gear_config, parse, refuse_batch_sizes
from deepspeed_gear.config.options import FieldConfig
from deepspeed_gear.config.resume_options import difference, resume_digest, shared_options
from deepspeed_gear.config.sampler_options import AnchorsConfig
from deepspeed_gear.config.schedules import value_at
from deepspeed_gear.errors import ConfigError, GearError
from deepspeed_gear.schema import Column

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("**/*.json"))
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
            "schema": {
                "columns": {"observation": {"dtype": "float32", "shape": [3], "rows": "T+1"}}
            },
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


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(_with("seed", list(range(1000))))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "section", [OFFLINE, ONLINE, {"data": "d"}], ids=["offline", "online", "shortest"]
)
def test_json_round_trip(section: dict[str, Any]) -> None:
    config = parse(section)
    dumped = config.to_json()
    again = parse(json.loads(json.dumps(dumped, allow_nan=False)))
    assert again == config
    assert again.to_json() == dumped
    assert shared_options(again) == shared_options(config)
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
    assert online.sampler.anchors == AnchorsConfig(every=4)
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
    assert parse({"tables": {"main": {"capacity_steps": 1}}}).sampled_tables == ("main",)


def test_config_is_frozen_and_defaults_are_not_shared() -> None:
    config = parse(OFFLINE)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValueError, match="frozen"):
        config.sampler.kind = "epoch"
    assert parse({"data": "d"}).sampler == parse({"data": "e"}).sampler
    parse({"data": "d"}).fields["x"] = FieldConfig()
    assert parse({"data": "d"}).fields == {}


EVERY_OPTION = """
seed backend prefetch exchange batch_size micro_batch_size gradient_accumulation_steps timeout_s
threads metrics
data data.path data.split data.split.eval data.load tables shared_memory shared_memory.prefix
shared_memory.huge_pages n_step n_step.n n_step.gamma fields fields.action fields.action.column
fields.action.derived fields.action.offset fields.action.length fields.action.align fields.action.pad
fields.action.normalize fields.action.scale fields.action.as sampler sampler.kind sampler.unit sampler.table
sampler.anchors sampler.anchors.every sampler.anchors.pad_before sampler.anchors.pad_after
sampler.where sampler.where.return sampler.where.return.min
sampler.where.return.in
"""


def _same(given: Any, kept: Any) -> bool:
    """Tell whether a value was kept: an integer may become the equal float, defaults may join an
    object.
    """
    if isinstance(given, dict) and isinstance(kept, dict):
        return all(key in kept and _same(value, kept[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(kept, list):
        return len(given) == len(kept) and all(map(_same, given, kept))
    if isinstance(given, int) and not isinstance(given, bool) and isinstance(kept, float):
        return float(given) == kept
    return type(given) is type(kept) and bool(given == kept)


def check_kept_or_refused(option: str, value: Any) -> None:
    """Set an option to a value: it is kept as it is, or refused by name; nothing else
    may happen.
    """
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


NUMBERS = [0, 1, -1, 2**63, 1.0, 0.5, math.nan, math.inf]
AWKWARD = [None, True, False, *NUMBERS, "1", "auto", "", "edge", b"a", [], [1.0], {}]


@pytest.mark.parametrize("option", EVERY_OPTION.split())
def test_awkward_values_are_kept_or_refused(option: str) -> None:
    for value in AWKWARD:
        check_kept_or_refused(option, value)
    for value in (AWKWARD[:2], [[]], {"": 0}, [{"a": None}], {"x": {"y": [0.5]}}):
        check_kept_or_refused(option, value)


def test_digests_are_of_what_ranks_share_and_of_what_the_samples_are() -> None:
    base = parse(OFFLINE)
    of_a_rank = [
        _with("threads", 4),
        _with("backend", "cpu"),
        _with("timeout_s", 1),
        _with("metrics", False),
        _with("data", "path", "/local/copy"),
        _with("data", "load", "memory"),
        _with("shared_memory", "huge_pages", False),
        {
            **{k: v for k, v in OFFLINE.items() if k != "data"},
            "tables": {"main": {"data": OFFLINE["data"]}},
        },
    ]
    of_a_run = [
        _with("prefetch", 1),
        _with("batch_size", 64),
        _with("gradient_accumulation_steps", 4),
        _with("data", "replicate", True),
        _with("shared_memory", "prefix", "other"),
    ]
    of_samples = [
        _with("seed", 1),
        _with("data", "split", {"eval": 0.1}),
        _with("sampler", "unit", "trajectory"),
        _with("fields", "action", "offset", -18),
    ]
    for section in [*of_a_rank, *of_a_run, *of_samples]:
        config = parse(section)
        assert len(difference(shared_options(base), shared_options(config))) == (
            section not in of_a_rank
        )
        assert (resume_digest(config) == resume_digest(base)) == (section not in of_samples)


def test_difference_names_options_and_values() -> None:
    a = parse(OFFLINE)
    b = parse({**_with("fields", "reward", {"pad": 1}), "seed": 1})
    lines = difference(shared_options(a), shared_options(b))
    assert lines[0] == "gear.seed: 0 and 1"
    assert lines[1].startswith("gear.fields.reward: absent and {")
    assert '"pad": 1' in lines[1]
    assert difference(shared_options(b), shared_options(a))[1].endswith(" and absent")
    bounded = parse(_with("sampler", "where", {"return": {"min": 1}}))
    assert difference(shared_options(a), shared_options(bounded)) == [
        'gear.sampler.where.return: absent and {"in": null, "max": null, "min": 1}',
    ]


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"gear": {"data": "d", "fields": {"a": {}, "b": {}, "a": {"length": 2}}}}')
    with pytest.raises(
        ConfigError, match=r"config.json must be JSON, got .*'a' is given twice in one object"
    ):
        gear_config.read(path)


def test_batch_sizes_without_an_engine() -> None:
    for sizes, micro in (
        ({"batch_size": 64}, 16),
        ({"batch_size": 64, "gradient_accumulation_steps": 2}, 8),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 2}, 8),
        ({"micro_batch_size": 16, "batch_size": 64}, 16),
    ):
        assert batch_sizes(parse({"data": "d", **sizes}), {}, 4) == (micro, 64 // 4 // micro)
    text = r"gear.batch_size must be given where there is no engine; or gear.micro_batch_size"
    with pytest.raises(ConfigError, match=text):
        batch_sizes(parse({"data": "d"}), {}, 1)
    with pytest.raises(ConfigError) as caught:
        batch_sizes(parse({"data": "d", "batch_size": 64, "micro_batch_size": 16}), {}, 3)
    assert str(caught.value) == (
        "gear.batch_size must be gear.micro_batch_size * gear.gradient_accumulation_steps * "
        "replicas (16 * 1 * 3), got 64; change one of them, or the number of ranks"
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_configs_that_users_start_from(path: Path) -> None:
    config = parse(json.loads(path.read_text(encoding="utf-8"))["gear"])
    refuse_batch_sizes(config)
    assert parse(config.to_json()) == config


# ---- refusals ------------------------------------------------------------------------------------

WRONG = refusals(
    r"""
# Not a section at all.
[]
    gear must be a JSON object, got []; write "gear": {"data": "path/of/the/data/set"}
{}
    gear.data or gear.tables must be given; name the folder that `gear ingest` wrote
# Keys that are no options.
{"sed": 1}
    gear.sed is not an option; did you mean 'seed'?
{"sampler": {"kid": "epoch"}}
    gear.sampler.kid is not an option; did you mean 'kind'?
{"fields": {"action": {"dtype": "float32"}}}
    gear.fields.action.dtype is not an option; did you mean 'as'?
{"fields": {"observation.name": {"lenght": 3}}}
    gear.fields['observation.name'].lenght is not an option; did you mean 'length'?
{"data": {"pth": "d"}}
    gear.data.pth is not an option; did you mean 'path'? (also: gear.data.path must be given; it is a
    non-empty string)
{"shared_memory": {"strict": true}}
    gear.shared_memory.strict is not an option; known are prefix, huge_pages, run, keep
# Wrong types: nothing is converted.
{"seed": "3"}
    gear.seed must be an integer in [0, 2^63), got '3'; write it without quotes
{"seed": null}
    gear.seed must be an integer in [0, 2^63), got null; leave it out for its default
{"metrics": 1}
    gear.metrics must be true or false, got 1;
    correct it, or leave it out for its default, true
{"fields": {"action": {"pad": true}}}
    gear.fields.action.pad must be "zero", "edge" or a finite number, got True;
    correct it
{"fields": {"action": 3}}
    gear.fields.action must be an object, got 3;
    correct it
{"data": 3}
    gear.data must be a path, an object or null, got 3;
    correct it, or leave it out for its default, null
# "auto", which DeepSpeed's models drop.
{"prefetch": "auto"}
    gear.prefetch must be an integer in [0, 64], got 'auto'; 'auto' is not defined for it: give a value, or
    leave the option out for its default
{"sampler": {"table": "auto"}}
    gear.sampler.table must be a name or null, got 'auto'; 'auto' is not defined for it: give a value, or
    leave the option out for its default
# Impossible values.
{"seed": -1}
    gear.seed must be an integer in [0, 2^63), got -1;
    correct it, or leave it out for its default, 0
{"prefetch": 2, "exchange": "device"}
    gear.prefetch must be 0 where gear.exchange is "device", got 2; collectives of a device belong to the
    main thread, at one place among those of training
{"timeout_s": 604801}
    gear.timeout_s must be a finite number in (0, 604800], got 604801;
    correct it, or leave it out for its default, 60.0
{"fields": {"action": {"scale": 0}}}
    gear.fields.action.scale must not be 0, got 0.0; the field would hold zeros; leave it out
{"fields": {"action": {"length": 0}}}
    gear.fields.action.length must be an integer in [1, 2^31) or null, got 0;
    correct it, or leave it out for its default, null
{"fields": {"action": {"as": "float"}}}
    gear.fields.action.as must be "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "engine" or null, got 'float'; did you mean 'float64' or 'float32' or 'float16'?
{"fields": {"action": {"offset": "n_stp"}}}
    gear.fields.action.offset must be an integer in (-2^31, 2^31), "n_step" or null, got 'n_stp'; did you
    mean 'n_step'?
{"backend": "gpu"}
    gear.backend must be "auto", "cpu" or "cuda", got 'gpu';
    correct it, or leave it out for its default, "auto"
{"sampler": {"kind": "prioritised"}}
    gear.sampler.kind must be "uniform", "length", "weighted", "custom", "prioritized", "top_k", "epoch",
    "fifo", "lifo", "recent", "module:Class" or "mixture", got 'prioritised'; did you mean 'prioritized'?
{"sampler": {"alpha": 0.6}}
    gear.sampler.alpha is not an option of this kind; it belongs to the kind 'prioritized'
{"sampler": {"kind": "prioritized", "beta": {"linear": [0.4, 1.2, 10]}}}
    gear.sampler.beta must be {"linear": [from, to, steps]} with from and to in [0, 1] and steps >= 1, got
    {'linear': [0.4, 1.2, 10]};
    correct it
{"tables": {"a.partial": {"data": "d"}}}
    gear.tables must not have a table whose name ends with .partial, .old, .older, position.json, got
    'a.partial'; give the table another name
{"tables": {"a": {"data": "d"}}, "sampler": {"kind": "mixture", "shares": {"a": 0.5, "b": 0.6}}}
    gear.sampler.shares must sum to 1, got {'a': 0.5, 'b': 0.6};
    correct them
{"tables": {"a": {"data": "d"}, "b": {"data": "e"}},
 "sampler": {"kind": "mixture", "shares": {"a": 0.5, "c": 0.5}}}
    gear.sampler.shares.c must name a table; known are a, b
{"tables": {"a": {"data": "d"}}, "sampler": {"kind": "mixture", "shares": {"a": 1.0}, "of": {"table": "a"}}}
    gear.sampler.of.table must not be given in a mixture, whose shares name the tables, got 'a';
    leave it out
{"tables": {"a": {"data": "d"}},
 "sampler": {"kind": "mixture", "shares": {"a": 1}, "of": {"kind": "length", "unit": "step"}}}
    gear.sampler.of.unit must be "trajectory" or "group" where gear.sampler.of.kind is "length", got 'step';
    uniform steps have the same effect: "kind": "uniform", "unit": "step"
{"sampler": {"kind": "recent"}}
    gear.sampler.newest or gear.sampler.within must be given; without a window use "kind": "uniform"
{"sampler": {"anchors": "middle"}}
    gear.sampler.anchors must be "all", "fits", "start", "end", {"every": k} or {"pad_after": n}, got 'middle';
    correct it
{"sampler": {"anchors": {"evry": 2}}}
    gear.sampler.anchors.evry is not an option; did you mean 'every'?
{"sampler": {"anchors": {}}}
    gear.sampler.anchors must be "all", "fits", "start", "end", {"every": k} or {"pad_after": n}, got {};
    correct it
{"sampler": {"anchors": {"pad_after": -1}}}
    gear.sampler.anchors.pad_after must be an integer >= 0 or null, got -1; correct it
{"sampler": {"anchors": {"pad_after": 7}}, "fields": {"action": {}}}
    gear.sampler.anchors must not bound padding where no field has a length or an offset; every step
    fits: use "all", or give a field a length
{"n_step": {"n": 3}}
    gear.n_step.gamma must be given; it is a finite number in [0, 1]
{"data": {"path": ""}}
    gear.data.path must not be empty, got '';
    correct it
{"shared_memory": {"prefix": "a/b"}}
    gear.shared_memory.prefix must consist of letters, digits, '_', '-' and '.', and not start with '.', got
    'a/b';
    rename it
{"shared_memory": {"prefix": "ggggggggggggggggggggggggggggggggg"}}
    gear.shared_memory.prefix must be a name of at most 32 letters, digits, '_' and '-', got
    'ggggggggggggggggggggggggggggggggg';
    choose another name
{"fields": {"my field": {}}}
    gear.fields['my field'] must consist of letters, digits, '_', '-' and '.', and not start with '.', got
    'my field';
    rename it
# Several at once: unknown keys first, then the others.
{"seed": -1, "backnd": "cpu"}
    gear.backnd is not an option; did you mean 'backend'? (also: gear.seed must be an integer in [0, 2^63),
    got -1; correct it, or leave it out for its default, 0)
# Data and tables.
{"data": "d", "tables": {"a": {"data": "d"}}}
    gear.data must not be given together with gear.tables; write the data set as an entry of gear.tables:
    {"main": {"data": ...}}
{"tables": {"main": {}}}
    gear.tables.main must have one of data, capacity_steps and capacity_bytes; give the one that the table is
    made of
{"tables": {"main": {"data": "d", "capacity_steps": 5}}}
    gear.tables.main.capacity_steps must not be given together with gear.tables.main.data, got 5; drop one
{"tables": {"main": {"capacity_steps": 5, "max_length": 6}}}
    gear.tables.main.max_length must be at most gear.tables.main.capacity_steps (5), got 6; a trajectory has
    at least one step, and must fit into the table
{"tables": {"main": {"capacity_steps": 5, "schema": {"columns": {}}}}}
    gear.tables.main.schema.columns must be a non-empty object of objects, got {};
    correct it
{"tables": {"main": {"capacity_steps": 5, "schema": {"columns":
 {"r": {"dtype": "float32", "shape": [2], "role": "reward"}}}}}}
    gear.tables.main.schema: column r has role reward and must be a scalar with rows 'T';
    store one value for each step, or give it the role "other"
{"data": {"path": "d", "split": {"train": 0.9}}}
    gear.data.split.train must not be given, got 0.9; what the other splits leave is for training
{"data": {"path": "d", "split": {"a": 0.5, "b": 0.5}}}
    gear.data.split must sum to less than 1, got {'a': 0.5, 'b': 0.5}; lower them: the rest is for training
# The sampler.
{"tables": {"a": {"data": "d"}, "b": {"data": "e"}}}
    gear.sampler.table must be given where there are several tables; one of a, b
{"sampler": {"table": "demo"}}
    gear.sampler.table must be a table, got 'demo'; known are main
{"sampler": {"anchors": "fits"}, "fields": {"action": {}}}
    gear.sampler.anchors must not be "fits" where no field has a length or an offset, got 'fits'; every step
    fits: use "all", or give a field a length
{"sampler": {"where": {"return": {}}}}
    gear.sampler.where.return must have min, max or in; an empty condition admits everything; drop it
{"sampler": {"where": {"return": {"min": 2, "max": 1}}}}
    gear.sampler.where.return.min must be at most gear.sampler.where.return.max (1), got 2; swap them
{"sampler": {"where": {"task": {"in": []}}}}
    gear.sampler.where.task.in must be a non-empty list (a finite number, true or false each) or null, got [];
    correct it, or leave it out for its default, null
{"sampler": {"where": {"task": {"in": [1], "max": 3}}}}
    gear.sampler.where.task must have min and max, or in, not both; drop one
# Fields.
{"fields": {"mask": {}}}
    gear.fields.mask must not be named like a part of every batch, got 'mask'; give it another name:
    {"my_mask": {"column": "mask"}}
{"fields": {"discount": {}}, "n_step": {"n": 1, "gamma": 1}}
    gear.fields.discount must not be named like what gear.n_step adds to the batch, got 'discount'; give it
    another name: {"my_discount": {"column": "discount"}}
{"fields": {"a": {}, "a.b": {}}}
    gear.fields.a must not be a field and a group (of a.b); rename one
{"fields": {"action": {"column": "reward", "derived": "timestep"}}}
    gear.fields.action.derived must not be given together with gear.fields.action.column ('reward'), got
    'timestep'; drop one
{"fields": {"timestep": {"derived": "return_to_go"}}}
    gear.fields.timestep.derived must be "timestep" or null in a field of that name, got 'return_to_go';
    rename the field
{"fields": {"action": {"derived": "return_to_go", "normalize": "mean_std"}}}
    gear.fields.action.normalize must not be given for a derived field, got 'mean_std'; there are no
    statistics; use scale
{"fields": {"action": {"offset": "n_step"}}}
    gear.fields.action.offset must not be "n_step" without gear.n_step, got 'n_step'; give gear.n_step or a
    number
{"fields": {"action": {"align": "right"}}}
    gear.fields.action.align must not be given without gear.fields.action.length, got 'right'; drop it or
    give a length
# Sizes.
{"batch_size": 100, "micro_batch_size": 16, "gradient_accumulation_steps": 2}
    gear.batch_size must be a multiple of micro_batch_size * gradient_accumulation_steps (16 * 2), got 100;
    it is their product times the number of ranks
"""
)


@pytest.mark.parametrize(("section", "text"), WRONG)
def test_wrong_config_is_refused(section: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"data": "d", **section} if section and "tables" not in section else section)
    assert str(caught.value) == text


# ---- schedules: values by global batch, what is refused, and functions ---------------------------


def beta_of(schedule: Any) -> Any:
    sampler = {"kind": "prioritized", "beta": schedule}
    return parse({"data": "d", "sampler": sampler}).sampler.beta  # type: ignore[union-attr]


def falling(step: int) -> float:
    return 1 / (1 + step)


def too_large(step: int) -> float:
    return 0.5 + step


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (0.3, {0: 0.3, 10**12: 0.3}),
        (1, {0: 1.0}),
        ({"linear": [0.4, 1.0, 100]}, {0: 0.4, 50: 0.7, 99: 0.994, 100: 1.0, 10**9: 1.0}),
        ({"linear": [1, 0, 4]}, {0: 1.0, 1: 0.75, 4: 0.0, 5: 0.0}),
        (falling, {0: 1.0, 3: 0.25}),
        ({"callable": "math:cos"}, {0: 1.0, 1: math.cos(1)}),
    ],
)
def test_values(schedule: Any, values: dict[int, float]) -> None:
    given = beta_of(schedule)
    for step, value in values.items():
        found = value_at(given, step, "gear.sampler.beta")
        assert type(found) is float
        assert found == pytest.approx(value, abs=1e-15)


NOT_LINEAR = [[0, 1], [0, 1, 0], [0, 1, 2.5], [0, 2, 10], 3, [0, 1, True]]
OTHERS = [{"callable": "math"}, {"callable": 3}, {"linear": [0, 1, 5], "callable": "math:cos"}]


@pytest.mark.parametrize(
    "schedule",
    [
        *(
            -0.1,
            1.5,
            True,
            float("nan"),
            "0.5",
            None,
            {},
            {"cosine": [0, 1, 5]},
            {"step": [0, 1, 5]},
        ),
        *({"linear": value} for value in NOT_LINEAR),
        *OTHERS,
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"gear\.sampler\.beta"):
        beta_of(schedule)


def test_functions_are_checked_when_they_are_called() -> None:
    with pytest.raises(
        ConfigError, match=r"beta at global batch 2 must be a number in \[0, 1\], got 2.5"
    ):
        value_at(beta_of(too_large), 2, "beta")
    assert value_at(beta_of(too_large), 0, "beta") == 0.5
    for path in ("nothing_of_this_name:f", "math:nothing"):
        with pytest.raises(ConfigError, match=r"beta must name .*can be imported"):
            value_at(beta_of({"callable": path}), 0, "beta")
