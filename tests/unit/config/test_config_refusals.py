"""Every kind of wrong `gear` section, each with the whole text of its error."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError

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


def _with(*path_and_value: Any) -> dict[str, Any]:
    """Return the offline config with one option set."""
    *path, last, value = path_and_value
    section = copy.deepcopy(OFFLINE)
    inner = section
    for key in path:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return section


_TWO = {"tables": {"a": {"data": "d"}, "b": {"data": "e"}}}


def _table(**options: Any) -> dict[str, Any]:
    return {"tables": {"main": options}}


def _field(name: str = "action", **options: Any) -> dict[str, Any]:
    return {"data": "d", "fields": {name: options}}


COLUMNS = {"r": {"dtype": "float32", "shape": [2], "role": "reward"}}
NAMES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "engine",
)
DTYPES = ", ".join(f'"{name}"' for name in NAMES) + " or null"
WRONG: list[tuple[Any, str]] = [
    # Not a section at all.
    ([], 'gear must be a JSON object, got []; write "gear": {"data": "path/of/the/data/set"}'),
    ({}, "gear.data or gear.tables must be given; name the folder that `gear ingest` wrote"),
    # Keys that are no options.
    (_with("sed", 1), "gear.sed is not an option; did you mean 'seed'?"),
    (_with("sampler", "kid", "epoch"), "gear.sampler.kid is not an option; did you mean 'kind'?"),
    (_field(dtype="float32"), "gear.fields.action.dtype is not an option; did you mean 'as'?"),
    (
        _field("observation.name", lenght=3),
        "gear.fields['observation.name'].lenght is not an option; did you mean 'length'?",
    ),
    (
        {"data": {"pth": "d"}},
        "gear.data.pth is not an option; did you mean 'path'? (also: gear.data.path must be given; "
        "it is a non-empty string)",
    ),
    (
        _with("shared_memory", "strict", True),
        "gear.shared_memory.strict is not an option; known are prefix, huge_pages, run",
    ),
    # Wrong types: nothing is converted.
    (_with("seed", "3"), "gear.seed must be an integer in [0, 2^63), got '3'; write it without quotes"),
    (_with("seed", True), "gear.seed must be an integer in [0, 2^63), got True"),
    (_with("seed", 1.0), "gear.seed must be an integer in [0, 2^63), got 1.0"),
    (
        _with("seed", None),
        "gear.seed must be an integer in [0, 2^63), got null; leave it out for its default",
    ),
    (_with("metrics", 1), "gear.metrics must be true or false, got 1"),
    (_with("timeout_s", True), "gear.timeout_s must be a finite number in (0, 604800], got True"),
    (
        _with("fields", "action", "length", 20.0),
        "gear.fields.action.length must be an integer in [1, 2^31) or null, got 20.0",
    ),
    (
        _with("fields", "action", "pad", True),
        'gear.fields.action.pad must be "zero", "edge" or a finite number, got True',
    ),
    (_with("fields", "action", 3), "gear.fields.action must be an object, got 3"),
    (_with("data", 3), "gear.data must be a path, an object or null, got 3"),
    # "auto", which DeepSpeed's models drop.
    (
        _with("prefetch", "auto"),
        "gear.prefetch must be an integer in [0, 64], got 'auto'; 'auto' is not defined for it: "
        "give a value, "
        "or leave the option out for its default",
    ),
    (
        _with("sampler", "table", "auto"),
        "gear.sampler.table must be a name or null, got 'auto'; 'auto' is not defined for it: give a value, "
        "or leave the option out for its default",
    ),
    # Impossible values.
    (_with("seed", -1), "gear.seed must be an integer in [0, 2^63), got -1"),
    (_with("seed", 2**63), "gear.seed must be an integer in [0, 2^63), got 9223372036854775808"),
    (_with("prefetch", 65), "gear.prefetch must be an integer in [0, 64], got 65"),
    (
        {**_with("prefetch", 2), "exchange": "device"},
        'gear.prefetch must be 0 where gear.exchange is "device", got 2; '
        "collectives of a device belong to the main thread, at one place among those of training",
    ),
    (_with("timeout_s", 604_801), "gear.timeout_s must be a finite number in (0, 604800], got 604801"),
    (_with("timeout_s", 1e300), "gear.timeout_s must be a finite number in (0, 604800], got 1e+300"),
    (_with("timeout_s", math.inf), "gear.timeout_s must be a finite number in (0, 604800], got inf"),
    (
        _with("fields", "action", "scale", math.nan),
        "gear.fields.action.scale must be a finite number, got nan",
    ),
    (
        _with("fields", "action", "scale", 0),
        "gear.fields.action.scale must not be 0, got 0.0; the field would hold zeros; leave it out",
    ),
    (
        _with("fields", "action", "pad", math.nan),
        'gear.fields.action.pad must be "zero", "edge" or a finite number, got nan',
    ),
    (
        _with("fields", "action", "length", 0),
        "gear.fields.action.length must be an integer in [1, 2^31) or null, got 0",
    ),
    (
        _with("fields", "action", "as", "float"),
        f"gear.fields.action.as must be {DTYPES}, got 'float'; "
        "did you mean 'float64' or 'float32' or 'float16'?",
    ),
    (
        _with("fields", "action", "offset", "n_stp"),
        "gear.fields.action.offset must be an integer in (-2^31, 2^31), \"n_step\" or null, got 'n_stp'; "
        "did you mean 'n_step'?",
    ),
    (_with("backend", "gpu"), 'gear.backend must be "auto", "cpu" or "cuda", got \'gpu\''),
    (
        _with("sampler", "kind", "prioritised"),
        'gear.sampler.kind must be "uniform", "length", "weighted", "custom", "prioritized", "top_k", '
        '"epoch", "fifo", "lifo", "recent", "module:Class" or "mixture", got \'prioritised\'; '
        "did you mean 'prioritized'?",
    ),
    (
        _with("sampler", "alpha", 0.6),
        "gear.sampler.alpha is not an option of this kind; it belongs to kind 'prioritized'",
    ),
    (
        {"data": "d", "sampler": {"kind": "prioritized", "beta": {"linear": [0.4, 1.2, 10]}}},
        'gear.sampler.beta must be {"linear": [from, to, steps]} with from and to in [0, 1] and steps >= 1, '
        "got {'linear': [0.4, 1.2, 10]}",
    ),
    *(
        (
            {"tables": {name: {"data": "d"}}},
            "gear.tables must not have a table whose name ends with .partial, .old, .older, position.json, "
            f"got {name!r}; give the table another name",
        )
        for name in ("a.partial", "a.old", "position.json")
    ),
    (
        {**_TWO, "sampler": {"kind": "mixture", "shares": {"a": 0.5, "b": 0.6}}},
        "gear.sampler.shares must sum to 1, got {'a': 0.5, 'b': 0.6}",
    ),
    (
        {**_TWO, "sampler": {"kind": "mixture", "shares": {"a": 0.5, "c": 0.5}}},
        "gear.sampler.shares.c must be of a table; known are a, b",
    ),
    (
        {**_TWO, "sampler": {"kind": "mixture", "shares": {"a": 1.0}, "of": {"table": "a"}}},
        "gear.sampler.of.table must not be given: shares name the tables, got 'a'",
    ),
    (
        {
            **_TWO,
            "sampler": {"kind": "mixture", "shares": {"a": 1}, "of": {"kind": "length", "unit": "step"}},
        },
        'gear.sampler.of.unit must be "trajectory" or "group" where gear.sampler.of.kind is "length", '
        "got 'step'; "
        'uniform steps have the same effect: "kind": "uniform", "unit": "step"',
    ),
    (
        {"data": "d", "sampler": {"kind": "recent"}},
        'gear.sampler.newest or gear.sampler.within must be given; without a window use "kind": "uniform"',
    ),
    (
        _with("sampler", "anchors", "middle"),
        'gear.sampler.anchors must be "all", "fits", "start", "end" or {"every": k}, got \'middle\'',
    ),
    (
        _with("sampler", "anchors", {"every": 0}),
        "gear.sampler.anchors.every must be an integer in [1, 2^31), got 0",
    ),
    (
        _with("sampler", "anchors", {"evry": 2}),
        "gear.sampler.anchors.evry is not an option; did you mean 'every'? "
        "(also: gear.sampler.anchors.every must be given; it is an integer in [1, 2^31))",
    ),
    (_with("n_step", {"n": 3}), "gear.n_step.gamma must be given; it is a finite number in [0, 1]"),
    (_with("n_step", {"n": 3, "gamma": 1.5}), "gear.n_step.gamma must be a finite number in [0, 1], got 1.5"),
    (_with("data", "path", ""), "gear.data.path must not be empty, got ''"),
    (
        _with("data", "split", {"eval": 1.0}),
        "gear.data.split.eval must be a finite number in (0, 1), got 1.0",
    ),
    (
        _with("shared_memory", "prefix", "a/b"),
        "gear.shared_memory.prefix must consist of letters, digits, '_', '-' and '.', and"
        " not start with '.', got 'a/b'",
    ),
    (
        _with("shared_memory", "prefix", "g" * 33),
        "gear.shared_memory.prefix must be a name of at most 32 letters, digits, '_' and '-', "
        f"got '{'g' * 33}'",
    ),
    (
        _with("fields", "my field", {}),
        "gear.fields['my field'] must consist of letters, digits, '_', '-' and '.', and "
        "not start with '.', got 'my field'",
    ),
    # Several at once: unknown keys first, then the others.
    (
        {**_with("seed", -1), "backnd": "cpu"},
        "gear.backnd is not an option; did you mean 'backend'? (also: gear.seed must be "
        "an integer in [0, 2^63), got -1)",
    ),
    # Data and tables.
    (
        {"data": "d", "tables": {"a": {"data": "d"}}},
        "gear.data and gear.tables must not be given together; write the data set as an entry of "
        "gear.tables: "
        '{"main": {"data": ...}}',
    ),
    (
        _table(),
        "gear.tables.main must have one of data, capacity_steps and capacity_bytes; give the one that the "
        "table is made of",
    ),
    (
        _table(data="d", capacity_steps=5),
        "gear.tables.main.capacity_steps must not be given together with "
        "gear.tables.main.data, got 5; drop one",
    ),
    (
        _table(capacity_steps=5, max_length=6),
        "gear.tables.main.max_length must be at most gear.tables.main.capacity_steps (5), got 6; "
        "a trajectory has at least one step, and must fit into the table",
    ),
    (
        _table(capacity_steps=5, schema={"columns": {}}),
        "gear.tables.main.schema.columns must be a non-empty object of objects, got {}",
    ),
    (
        _table(capacity_steps=5, schema={"columns": COLUMNS}),
        "gear.tables.main.schema: column r has role reward and must be a scalar with rows 'T'",
    ),
    (
        _with("data", "split", {"train": 0.9}),
        "gear.data.split.train must not be given, got 0.9; what the other splits leave is for training",
    ),
    (
        _with("data", "split", {"a": 0.5, "b": 0.5}),
        "gear.data.split must sum to less than 1, got {'a': 0.5, 'b': 0.5}; nothing is left for training",
    ),
    # The sampler.
    (
        {"tables": {"a": {"data": "d"}, "b": {"data": "e"}}},
        "gear.sampler.table must be given where there are several tables; one of a, b",
    ),
    (_with("sampler", "table", "demo"), "gear.sampler.table must be a table, got 'demo'; known are main"),
    (
        _with("sampler", "kind", "length"),
        'gear.sampler.unit must be "trajectory" or "group" where gear.sampler.kind is "length", '
        "got 'step'; "
        'uniform steps have the same effect: "kind": "uniform", "unit": "step"',
    ),
    (
        {"data": "d", "sampler": {"anchors": "fits"}, "fields": {"action": {}}},
        "gear.sampler.anchors must not be \"fits\" where no field has a length or an offset, got 'fits'; "
        'every step fits: use "all", or give a field a length',
    ),
    (
        _with("sampler", "where", {"return": {}}),
        "gear.sampler.where.return must have min, max or in; an empty condition admits everything; drop it",
    ),
    (
        _with("sampler", "where", {"return": {"min": 2, "max": 1}}),
        "gear.sampler.where.return.min must be at most gear.sampler.where.return.max (1), got 2; swap them",
    ),
    (
        _with("sampler", "where", {"task": {"in": []}}),
        "gear.sampler.where.task.in must be a non-empty list (a finite number, true or "
        "false each) or null, got []",
    ),
    (
        _with("sampler", "where", {"task": {"in": [1], "max": 3}}),
        "gear.sampler.where.task must have min and max, or in, not both; drop one",
    ),
    # Fields.
    (
        _field("mask"),
        "gear.fields.mask must not be named like a part of every batch, got 'mask'; "
        'give it another name: {"my_mask": {"column": "mask"}}',
    ),
    (
        {**_field("discount"), "n_step": {"n": 1, "gamma": 1}},
        "gear.fields.discount must not be named like what gear.n_step adds to the batch, got 'discount'; "
        'give it another name: {"my_discount": {"column": "discount"}}',
    ),
    (
        {"data": "d", "fields": {"a": {}, "a.b": {}}},
        "gear.fields.a must not be a field and a group (of a.b); rename one",
    ),
    (
        _field(column="reward", derived="timestep"),
        "gear.fields.action.derived must not be given together with gear.fields.action.column ('reward'), "
        "got 'timestep'; drop one",
    ),
    (
        _field("timestep", derived="return_to_go"),
        "gear.fields.timestep.derived must be 'timestep' in a field of that name, got "
        "'return_to_go'; rename the field",
    ),
    (
        _field("position", derived="timestep", length=2),
        "gear.fields.position.derived must be 'position' in a field of that name, got 'timestep'; "
        "rename the field",
    ),
    (
        _field(derived="return_to_go", normalize="mean_std"),
        "gear.fields.action.normalize must not be given for a derived field, got 'mean_std'; "
        "there are no statistics; use scale",
    ),
    (
        _field(offset="n_step"),
        "gear.fields.action.offset must not be \"n_step\" without gear.n_step, got 'n_step'; "
        "give gear.n_step or a number",
    ),
    (
        _field(align="right"),
        "gear.fields.action.align must not be given without gear.fields.action.length, got 'right'; "
        "drop it or give a length",
    ),
    # Sizes.
    (
        {"data": "d", "batch_size": 100, "micro_batch_size": 16, "gradient_accumulation_steps": 2},
        "gear.batch_size must be a multiple of micro_batch_size * gradient_accumulation_steps (16 * "
        "2), got 100; "
        "it is their product times the number of ranks",
    ),
]


@pytest.mark.parametrize(("section", "text"), WRONG, ids=[text[:60] for _, text in WRONG])
def test_wrong_config_is_refused(section: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(section)
    assert str(caught.value) == text
    assert "\n" not in text
