"""Fields against a schema: what they become, and the text of every refusal."""

from dataclasses import replace
from typing import Any

import pytest
from refusal_table import refusals

from deepspeed_gear.config import ResolvedField, check_against, parse
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import SOURCE, Column, Schema

OBSERVATION = Column("observation", "float32", (11,), "observation", "T+1")
PIXELS = Column("pixels", "uint8", (3, 8, 8), "observation", "T+1")
ACTION = Column("action", "float64", (3,), "action")
TOKEN = Column("token", "int64", (), "action")
REWARD = Column("reward", "float32", (), "reward")
TERMINATED = Column("terminated", "bool", (), "terminated")
RETURN = Column("return", "float64", (), "return", "1")
TASK = Column("task", "int64", (), "other", "1")
EXPERT = Column("expert", "bool", (), "other", "1")
GOAL = Column("goal", "float32", (2,), "other", "1")
SCHEMA = Schema(
    [OBSERVATION, PIXELS, ACTION, TOKEN, REWARD, TERMINATED, RETURN, TASK, EXPERT, GOAL]
)


def resolve(schema: Schema = SCHEMA, **section: Any) -> dict[str, ResolvedField]:
    config = parse({"data": "d", **section})
    return {field.name: field for field in check_against(config, {"main": schema})}


def one(**options: Any) -> ResolvedField:
    column = options.pop("column", "observation")
    return resolve(fields={"x": {"column": column, **options}})["x"]


def test_no_fields_are_all_columns_at_their_anchors() -> None:
    fields = resolve()
    assert list(fields) == list(SCHEMA.names)
    assert fields["action"] == ResolvedField(name="action", column=ACTION, dtype="float32")
    assert fields["return"].column == RETURN


def test_derived_fields() -> None:
    fields = resolve(
        fields={
            "return_to_go": {"length": 3},
            "timestep": {},
            "rtg": {"derived": "return_to_go"},
            "position": {"length": 4, "offset": -2},
            "place": {"derived": "position", "length": 2, "align": "right"},
        }
    )
    assert fields["return_to_go"] == ResolvedField("return_to_go", None, "return_to_go", length=3)
    assert fields["timestep"] == ResolvedField("timestep", None, "timestep", dtype="int64")
    assert fields["rtg"].derived == "return_to_go"
    assert fields["position"] == ResolvedField("position", None, "position", -2, 4, dtype="int64")
    assert fields["place"].derived == "position"
    for name in ("timestep", "position"):
        stored = Column(name, "int32")
        assert resolve(Schema([stored]), fields={name: {}})[name].column == stored


def test_parts_of_a_window() -> None:
    whole = one(length=6)
    assert (whole.part_first, whole.part_length, whole.gathered_length) == (0, None, 6)
    part = replace(whole, part_first=2, part_length=3)
    assert (part.length, part.gathered_length) == (6, 3)
    assert one().gathered_length is None


def test_dtypes() -> None:
    assert one().dtype == "float32"
    assert one(**{"as": "engine"}).dtype == "engine"
    assert one(column="action", normalize="mean_std").dtype == "float32"
    assert one(column="action", normalize="mean_std", **{"as": "float64"}).dtype == "float64"
    assert one(column="pixels").dtype == "uint8"
    assert one(column="pixels", scale=0.5).dtype == "float32"
    assert one(column="pixels", normalize="min_max").dtype == "float32"
    assert one(column="pixels", **{"as": "engine"}).dtype == "engine"
    assert one(column="pixels", **{"as": "int32"}).dtype == "int32"
    assert one(column="token", normalize="mean_std", **{"as": "engine"}).dtype == "engine"
    assert one(column="terminated", **{"as": "float32"}).dtype == "float32"
    for half in ("float16", "bfloat16"):  # which hold 0 and 1; docs/how-to/batches.md says so
        assert one(column="terminated", **{"as": half}).dtype == half
        with pytest.raises(
            ConfigError, match="must keep the precision of the float32 column reward"
        ):
            one(column="reward", **{"as": half})
    assert one(column="return", **{"as": "float32"}).dtype == "float32"
    assert one(derived="timestep", column=None, **{"as": "int64"}).dtype == "int64"
    assert one(derived="position", column=None, length=2, **{"as": "int64"}).dtype == "int64"
    assert not one().is_converted
    assert one(scale=2).is_converted


def test_padding() -> None:
    assert (one().pad_kind, one().pad_value) == ("zero", 0)
    assert one(pad="edge").pad_kind == "edge"
    padded = one(column="token", pad=-100)
    assert (padded.pad_kind, padded.pad_value) == ("value", -100)
    assert one(column="token", pad=2**62 + 1).pad_value == 2**62 + 1
    assert one(column="pixels", pad=0.5, scale=0.5).pad_value == 0.5
    assert one(column="pixels", pad=-1.0, **{"as": "engine"}).pad_value == -1.0


def test_offset_of_n_step() -> None:
    fields = resolve(
        n_step={"n": 3, "gamma": 0.99},
        fields={
            "observation": {},
            "next_observation": {"column": "observation", "offset": "n_step"},
        },
    )
    assert fields["next_observation"].offset == "n_step"
    at_end = {"action": {}, "following": {"column": "action", "offset": "n_step"}}
    text = r"following.column must have a row after the last .*'action of T rows'; store"
    with pytest.raises(ConfigError, match=text):
        resolve(n_step={"n": 1, "gamma": 0.99}, fields=at_end)
    resolve(
        n_step={"n": 1, "gamma": 0.99}, fields=at_end, sampler={"unit": "step", "anchors": "fits"}
    )


def test_statistics() -> None:
    section: dict[str, Any] = {"fields": {"observation": {"normalize": "mean_std"}}}
    from_data = parse({"data": "d", **section})
    online = parse({"tables": {"main": {"capacity_steps": 10}}, **section})
    schemas = {"main": SCHEMA}
    assert check_against(from_data, schemas) == check_against(online, schemas, SCHEMA.names)
    assert check_against(online, schemas, ["observation"]) == check_against(online, schemas)
    for config, available in ((online, []), (from_data, []), (from_data, ["action"])):
        with pytest.raises(ConfigError) as caught:
            check_against(config, schemas, available)
        assert str(caught.value) == (
            "gear.fields.observation.normalize must not be given as column observation has no "
            "statistics, got 'mean_std'; data sets have them, and columns that are added with "
            "their rows; use scale"
        )


def test_sampled_table_counts() -> None:
    config = parse(
        {
            "tables": {"a": {"data": "d"}, "b": {"capacity_steps": 9}},
            "sampler": {"table": "b"},
            "fields": {"state": {}},
        }
    )
    state = Schema([Column("state", "float32", (2,))])
    assert check_against(config, {"a": SCHEMA, "b": state})[0].column == state["state"]
    with pytest.raises(
        ConfigError, match=r"^gear.tables.b must have a schema; give it here or to Replay"
    ):
        check_against(config, {"a": SCHEMA})


WRONG = refusals(
    """
{"fields": {"observations": {}}}
    gear.fields.observations must be a column of the table, got 'observations'; did you mean 'observation'?
{"fields": {"speed": {}}}
    gear.fields.speed must be a column of the table, got 'speed'; the table has observation, pixels, action,
    token, reward, terminated, return, task, expert, goal
{"fields": {"next": {"column": "next_observation"}}}
    gear.fields.next.column must be a column of the table, got 'next_observation'; did you mean 'observation'?
{"fields": {"timestep": {"normalize": "min_max"}}}
    gear.fields.timestep.normalize must not be given for a derived field, got 'min_max'; use scale
{"fields": {"timestep": {"scale": 0.001}}}
    gear.fields.timestep.scale must not be given for time steps, got 0.001; convert them in the model
{"fields": {"timestep": {"as": "float32"}}}
    gear.fields.timestep.as must be null or "int64" for time steps, got 'float32'; convert them in the model
{"fields": {"position": {"length": 3, "pad": "edge"}}}
    gear.fields.position.pad must not be given for positions, got 'edge'; drop it: a padded step has a
    position, too
{"fields": {"position": {"offset": -2}}}
    gear.fields.position.length must be given for positions; they count the steps of a window
{"fields": {"terminated": {"normalize": "mean_std"}}}
    gear.fields.terminated.normalize must not be given for a bool column, got 'mean_std'; drop it
{"fields": {"terminated": {"scale": 2}}}
    gear.fields.terminated.scale must not be given for a bool column, got 2.0; use "as": "float32"
{"fields": {"return": {"length": 3}}}
    gear.fields.return.length must not be given as return has one value per trajectory, got 3; drop it
{"fields": {"goal": {"offset": -1}}}
    gear.fields.goal.offset must be null or 0 as goal has one value per trajectory, got -1; drop it
{"fields": {"reward": {"as": "engine"}}}
    gear.fields.reward.as must not be "engine" for the float32 column reward, got 'engine'; rewards, returns,
    flags and derived fields keep their precision; convert them in the model
{"fields": {"return_to_go": {"as": "bfloat16"}}}
    gear.fields.return_to_go.as must keep the precision of a derived float32, got 'bfloat16'; use float32
{"fields": {"token": {"as": "engine"}}}
    gear.fields.token.as must not be "engine" for the int64 column token, got 'engine'; use int64:
    large integers would be rounded
{"fields": {"action": {"as": "int64"}}}
    gear.fields.action.as must hold every value of the float64 column action, got 'int64'; use float64 or a
    wider type
{"fields": {"token": {"as": "int32"}}}
    gear.fields.token.as must hold every value of the int64 column token, got 'int32'; use int64 or a wider
    type
{"fields": {"pixels": {"as": "int8"}}}
    gear.fields.pixels.as must hold every value of the uint8 column pixels, got 'int8'; use uint8 or a wider
    type
{"fields": {"pixels": {"as": "int16", "scale": 0.1}}}
    gear.fields.pixels.as must be a float type where the field is normalised or scaled, got 'int16'; use
    float32
{"fields": {"pixels": {"as": "int16"}}}
    gear.fields.pixels.as must be uint8, int32, int64 or a float type, got 'int16'; use int32
{"fields": {"terminated": {"pad": 2}}}
    gear.fields.terminated.pad must be 0 or 1 for a bool field, got 2; or convert the field with as
{"fields": {"pixels": {"pad": -1}}}
    gear.fields.pixels.pad must be an integer that uint8 can hold, got -1; or convert the field with "as"
{"fields": {"token": {"pad": 0.5}}}
    gear.fields.token.pad must be an integer that int64 can hold, got 0.5; or convert the field with "as"
{"fields": {"observation": {"as": "float16", "pad": 1e6}}}
    gear.fields.observation.pad must be representable in float16, got 1000000.0; choose a smaller number
{"fields": {"a": {"column": "action"}, "b": {"column": "action"}}}
    gear.fields.b must differ from gear.fields.a; both hold the same; drop one
{"sampler": {"where": {"score": {"min": 1}}}}
    gear.sampler.where.score must name a column with one number per trajectory, got 'score'; there are:
    return, task, expert
{"sampler": {"where": {"reward": {"min": 1}}}}
    gear.sampler.where.reward must name a column with one number per trajectory, got 'reward'; there are:
    return, task, expert
{"sampler": {"where": {"expert": {"min": 1}}}}
    gear.sampler.where.expert must use in, as the column is bool; write {"in": [true]}
{"sampler": {"where": {"task": {"in": [1, 2.5]}}}}
    gear.sampler.where.task.in must hold integers, as the column is int64, got 2.5; no row equals it
{"sampler": {"where": {"task": {"in": [true]}}}}
    gear.sampler.where.task.in must hold numbers, as the column is int64, got True; write 0 or 1
"""
)


@pytest.mark.parametrize(("section", "text"), WRONG)
def test_field_is_refused(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**section)
    assert str(caught.value) == text


def test_schema_without_rewards() -> None:
    bare = Schema([OBSERVATION, ACTION])
    n_step: dict[str, Any] = {"n_step": {"n": 3, "gamma": 0.99}}
    for section, rule in (
        (n_step, "gear.n_step must have a reward column in the sampled table"),
        (
            {"fields": {"return_to_go": {}}},
            "gear.fields.return_to_go must have a reward column to sum",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(bare, **section)
        assert str(caught.value) == f"{rule}; the table has observation, action"
    with pytest.raises(ConfigError, match="must have a terminated column"):
        resolve(Schema([OBSERVATION, REWARD]), **n_step)


def test_columns_with_reserved_names_need_a_field() -> None:
    schema = Schema([OBSERVATION, Column("mask", "bool")])
    with pytest.raises(
        ConfigError, match=r"gear.fields.mask must not be named like a part of every batch"
    ):
        resolve(schema)
    fields = resolve(schema, fields={"valid_actions": {"column": "mask"}})
    assert fields["valid_actions"].column == schema["mask"]


def test_no_fields_leave_out_the_source_that_ingest_adds() -> None:
    schema = Schema([OBSERVATION, SOURCE])
    assert list(resolve(schema)) == ["observation"]
    assert resolve(schema, fields={"origin": {"column": "source"}})["origin"].column == SOURCE


def test_where_on_suitable_columns() -> None:
    where = {
        "return": {"min": 1000, "max": 2000.5},
        "task": {"in": [1, 2.0]},
        "expert": {"in": [True]},
    }
    assert resolve(sampler={"where": where}, fields={"action": {}})
