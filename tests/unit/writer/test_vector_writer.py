"""A VectorWriter refuses names that it does not take, and stores a long episode in parts or not at
all.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gear_support import prefix

from deepspeed_gear import (
    Column,
    DataError,
    Replay,
    Schema,
    SchemaError,
    StoreError,
    TrajectoryWriter,
    VectorWriter,
)

COLUMNS = {
    "observation.a": {"dtype": "float32", "role": "observation", "rows": "T+1"},
    "observation.b": {"dtype": "float32", "shape": [2], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "role": "action"},
    "task.id": {"dtype": "int64", "rows": "1"},
    "advantage": {"dtype": "float32", "late": True},
}
STATE = "observation.a, observation.b"
STEP = f"it takes action, {STATE}, task.id, terminated, truncated"


@pytest.fixture
def replay() -> Iterator[Replay]:
    table = {"capacity_steps": 100, "schema": {"columns": COLUMNS}}
    options = {"shared_memory": {"prefix": prefix()}}
    with Replay({"batch_size": 2, "tables": {"main": table}, **options}) as made:
        yield made


def state(**parts: Any) -> dict[str, Any]:
    return {
        "observation": {"a": np.zeros(2, np.float32), "b": np.zeros((2, 2), np.float32), **parts}
    }


def flat() -> dict[str, Any]:
    """Return a step that a native call takes."""
    return {
        "observation.a": np.zeros(2, np.float32),
        "observation.b": np.zeros((2, 2), np.float32),
        "action": np.ones(2, np.float32),
        "terminated": np.zeros(2, bool),
    }


def begun(replay: Replay, autoreset: Any = "disabled") -> VectorWriter:
    steps = replay.vector_writer(2, autoreset)
    steps.reset(**state(), task={"id": [4, 5]})
    return steps


@pytest.mark.parametrize(
    ("more", "name", "remedy"),
    [
        ({"speed": np.zeros(2, np.float32)}, "speed", STEP),
        ({"task": {"id": [1, 2], "name": [0, 0]}}, "task.name", STEP),
        ({"task": 3}, "task", STEP),
        (state(c=[0, 0]), "observation.c", STEP),
        (
            {"advantage": [0, 0]},
            "advantage",
            "the column is late: write it by fill, when the trajectory was",
        ),
    ],
)
def test_a_step_with_another_name(
    replay: Replay, more: dict[str, Any], name: str, remedy: str
) -> None:
    steps = begun(replay)
    plain = flat()
    if "observation" in more:
        plain = {key: value for key, value in plain.items() if "." not in key}
    for given in (plain, {key: np.asarray(value).tolist() for key, value in plain.items()}):
        with pytest.raises(
            DataError, match=f"step: column {name} must be a column that step takes; {remedy}"
        ):
            steps.step(**given, **more)
    misspelt = {"actoin" if key == "action" else key: value for key, value in flat().items()}
    with pytest.raises(DataError, match="step: column actoin must be a column that step takes"):
        steps.step(**misspelt)
    assert (steps.num_steps, len(replay)) == (0, 0)
    steps.step(**flat())
    steps.step(**{**flat(), "terminated": np.ones(2, bool)}, truncated=np.zeros(2, bool))
    assert (steps.num_steps, len(replay), replay.num_steps) == (4, 2, 4)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"speed": [0, 0]}, "speed"),
        ({"action": [0, 0]}, "action"),
        ({"terminated": [0, 0]}, "terminated"),
    ],
)
def test_a_reset_with_another_name(replay: Replay, more: dict[str, Any], name: str) -> None:
    steps = begun(replay)
    steps.step(**flat())
    rule = f"reset: column {name} must be a column that reset takes; it takes {STATE}, task.id"
    with pytest.raises(DataError, match=rule):
        steps.reset(**state(), **more)
    with pytest.raises(
        DataError, match=r"reset: column observation.c must be a column that reset takes"
    ):
        steps.reset(**state(c=[0, 0]))
    steps.step(**{**flat(), "terminated": np.ones(2, bool)})
    assert replay.num_steps == 4, "nothing has changed"


def test_a_last_state_with_another_name(replay: Replay) -> None:
    steps = begun(replay, "same_step")
    last = {**flat(), "terminated": np.ones(2, bool)}
    rule = f"final: column action must be a column that final takes; it takes {STATE}"
    with pytest.raises(DataError, match=rule):
        steps.step(**last, final={**state(), "action": [0, 0]})
    assert [done.num_steps for done in steps.step(**last, final=state())] == [1, 1]


# ---- episodes longer than max_length -------------------------------------------------------------

EPISODE = Schema(
    [
        Column("observation", "float32", (), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
LONGEST = 5


def limited(fields: dict[str, Any], **table: Any) -> Replay:
    options = {"capacity_steps": 100, "max_length": LONGEST, **table}
    section = {
        "tables": {"main": options},
        "sampler": {"unit": "step"},
        "fields": {"observation": {}, **fields},
        "batch_size": 64,
    }
    return Replay(section, schemas={"main": EPISODE})


def step(writer: Any, at: int, ended: bool = False, publish: bool = False) -> Any:
    """Take a step of two environments; the second one is reset before the limit."""
    if at % 4 == 0:
        writer.reset(np.array([at == 0, True]), observation=np.full(2, at, np.float32))
    no = np.zeros(2, bool)
    observation = np.full(2, at + 1, np.float32)
    reward = np.ones(2, np.float32)
    columns = {
        "observation": observation,
        "reward": reward,
        "terminated": no | ended,
        "truncated": no,
    }
    return writer.step(publish=publish, **columns)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{"return_to_go": {}}, {"timestep": {}}, {"time": {"derived": "timestep", "length": 2}}],
    ids=str,
)
def test_a_field_that_needs_whole_episodes(
    fields: dict[str, Any], publish: bool, attached: bool
) -> None:
    if publish and "return_to_go" in fields:
        pytest.skip("returns-to-go cannot be published")
    with limited(fields, writers=1) as found:
        name = found.tables["main"].memory.path.name
        source = TrajectoryWriter.attach(name=name) if attached else found.writer()
        writer = source.vector_writer(2, "disabled")
        for at in range(LONGEST):
            step(writer, at, publish=publish)
        for _ in range(2):
            with pytest.raises(
                DataError, match=f"environment 0 must have at most max_length = {LONGEST}"
            ):
                step(writer, LONGEST, publish=publish)
        writer.reset(np.array([True, False]), observation=np.zeros(2, np.float32))
        assert [done.num_steps for done in step(writer, LONGEST, True, publish)] == [1, 2]
        source.close()


def test_an_episode_of_the_limit_is_whole_and_other_fields_admit_parts() -> None:
    with limited({"return_to_go": {}, "timestep": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST):
            step(writer, at, at == LONGEST - 1)
        batch = found.sample()
        first = batch["return_to_go"] + batch["timestep"]
        assert set(first.tolist()) <= {float(LONGEST), 1.0}
    with limited({"reward": {}}) as found:
        writer = found.vector_writer(2, "disabled")
        for at in range(LONGEST + 2):
            step(writer, at)
        assert found.read([0])[0]["truncated"].tolist() == [False] * (LONGEST - 1) + [True]


# ---- pieces: an episode longer than max_length goes on -------------------------------------------

PIECES = Schema(
    [
        *EPISODE,
        Column("step", "int32", (), "timestep"),
        Column("to_go", "float32", (), "return_to_go", late=True),
    ]
)
FIELDS = {"time": {"derived": "timestep"}, "return_to_go": {}}
NO = np.zeros(2, bool)


def pieces(schema: Schema = PIECES, fields: Any = FIELDS, **table: Any) -> Replay:
    options = {"capacity_steps": 400, "max_length": LONGEST, "writers": 1, **table}
    section = {
        "tables": {"main": options},
        "sampler": {"kind": "epoch", "unit": "step"},
        "fields": fields,
    }
    return Replay({**section, "batch_size": 1, "timeout_s": 5.0}, schemas={"main": schema})


def rewards_of(length: int, seed: int) -> np.ndarray:
    """Return rewards whose sums depend on the order of addition."""
    random = np.random.default_rng(seed)
    return (random.normal(size=length) * 10.0 ** random.integers(-3, 4, length)).astype(np.float32)


def play(writer: Any, lengths: list[int], autoreset: Any, publish: bool) -> None:
    """Take episodes of these lengths in environment 0; environment 1 has only steps that do not
    end.
    """
    state = np.zeros(2, np.float32)
    writer.reset(observation=state)
    for number, length in enumerate(lengths):
        for at, reward in enumerate(rewards_of(length, number)):
            last = np.array([at == length - 1, False])
            flags = {"terminated": last, "truncated": NO}
            more = {"final": {"observation": state}} if autoreset == "same_step" and last[0] else {}
            columns = {"observation": state, "reward": np.array([reward, 0], np.float32), **flags}
            writer.step(**more, publish=publish, **columns)
        if autoreset == "disabled":
            writer.reset(np.array([True, False]), observation=state)
        elif autoreset == "next_step":
            columns = {"observation": state, "reward": np.zeros(2, np.float32)}
            writer.step(publish=publish, **columns, terminated=NO, truncated=NO)


LENGTHS = [3, 17, LONGEST, LONGEST + 1, 10, 2]


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize("role", ["timestep", "both"])
def test_pieces_have_the_time_steps_and_returns_of_their_episode(
    autoreset: Any, publish: bool, role: str
) -> None:
    kept = [c for c in PIECES if role == "both" or c.role in (role, *(d.role for d in EPISODE))]
    with pieces(Schema(kept), {"time": FIELDS["time"]} if role == "timestep" else FIELDS) as found:
        play(found.vector_writer(2, autoreset), LENGTHS, autoreset, publish)
        stored = [found.read([number])[0] for number in range(len(found))]
        own = [columns for columns in stored if columns["reward"].any()]
        for number, length in enumerate(LENGTHS):
            rewards = rewards_of(length, number)
            parts = [own.pop(0) for _ in range(-(-length // LONGEST))]
            assert np.concatenate([part["reward"] for part in parts]).tolist() == rewards.tolist()
            whole = {
                "step": np.arange(length),
                "to_go": np.cumsum(rewards[::-1], dtype=np.float64)[::-1],
            }
            for name in ("step", "to_go"):
                if name in Schema(kept):
                    values = np.concatenate([part[name] for part in parts])
                    assert (values == whole[name].astype(values.dtype)).all()
        assert not own
        if role != "timestep":  # steps of the open episode of environment 1 are not drawn
            assert (
                sum(not columns["to_go"].any() for columns in stored) >= sum(LENGTHS) // LONGEST - 2
            )
            assert {float(found.sample()["return_to_go"]) != 0 for _ in range(sum(LENGTHS))} == {
                True
            }


def test_pieces_have_the_values_that_are_derived_of_whole_episodes() -> None:
    """Bit for bit: the sums of the writer are those of the op, and the fields have the
    same dtype.
    """
    found = []
    rewards = rewards_of(31, 0)
    for schema in (PIECES, EPISODE):
        with pieces(schema, max_length=LONGEST if schema is PIECES else None) as replay:
            if schema is PIECES:
                play(replay.vector_writer(2, "disabled"), [31], "disabled", False)
                replay.remove([2 * number + 1 for number in range(6)])  # of environment 1
            else:
                flags = {"terminated": np.zeros(31, bool), "truncated": np.zeros(31, bool)}
                replay.add({"observation": np.zeros(32), "reward": rewards, **flags})
            batches = (replay.sample() for _ in rewards)
            values = {(int(b["time"]), float(b["return_to_go"]), b["time"].dtype) for b in batches}
            found.append(values)
    assert found[0] == found[1]
    assert len(found[0]) == 31


def test_pieces_whose_episode_ends_otherwise() -> None:
    """Evicted pieces are left out; a reset and close end an episode; a writer that is dropped does
    not.
    """
    with pieces() as found:
        state = np.zeros(2, np.float32)
        ones = np.ones(2, np.float32)
        writer = found.vector_writer(2, "disabled")

        def steps(writer: VectorWriter, count: int) -> None:
            for _ in range(count):
                writer.step(observation=state, reward=ones, terminated=NO, truncated=NO)

        def to_go(number: int) -> list[float]:
            return found.read([number])[0]["to_go"].tolist()

        writer.reset(observation=state)
        steps(writer, 2 * LONGEST + 3)  # pieces 0 and 2 of environment 0, 1 and 3 of environment 1
        assert to_go(0) == [0.0] * LONGEST
        assert not found.can_sample()
        found.remove([1])
        writer.reset(
            np.array([True, False]), observation=state
        )  # drops 3 steps, which are not stored
        assert (to_go(0), to_go(2)) == ([10, 9, 8, 7, 6], [5, 4, 3, 2, 1])
        assert to_go(3) == [0.0] * LONGEST
        steps(writer, 1)
        writer.close()
        assert to_go(3) == [5, 4, 3, 2, 1]
        with pytest.raises(StoreError):
            found.read([1])
        writer = found.vector_writer(2, "disabled")
        writer.reset(observation=state)
        steps(writer, LONGEST + 1)
        del writer
        assert to_go(4) == [0.0] * LONGEST


def test_pieces_of_evicted_published_steps_keep_their_time_steps() -> None:
    with pieces() as found:
        writer = found.vector_writer(2, "disabled")
        state = np.zeros(2, np.float32)
        writer.reset(observation=state)
        for at in range(2 * LONGEST + 4):
            ended = np.full(2, at == 2 * LONGEST + 3)
            reward = np.full(2, at, np.float32)
            columns = {"observation": state, "reward": reward, "terminated": ended, "truncated": NO}
            writer.step(publish=True, **columns)
            if at == 2 * LONGEST + 1:  # two steps of the third piece are published
                found.remove([4, 5])
        last = found.read([6])[0]
        assert (last["step"].tolist(), last["to_go"].tolist()) == ([12, 13], [25.0, 13.0])
        assert found.read([2])[0]["to_go"][0] == sum(range(5, 14)), (
            "with the rewards of evicted steps"
        )


def test_names_and_schemas_of_episode_columns() -> None:
    with pieces() as found:
        writer = found.vector_writer(2, "disabled")
        state = np.zeros(2, np.float32)
        writer.reset(observation=state)
        columns = {"observation": state, "reward": state, "terminated": NO, "truncated": NO}
        with pytest.raises(DataError, match="column step must be a column that step takes"):
            writer.step(**columns, step=np.zeros(2, np.int32))
    with pytest.raises(
        SchemaError, match="return_to_go: must be late, in a table with a reward column"
    ):
        Schema([Column("to_go", "float32", (), "return_to_go", late=True)])
