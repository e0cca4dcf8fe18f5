"""Advantages and value targets, of windows and of rollout batches, against a loop over
the steps.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import COLUMNS, micros, responses, section

from deepspeed_gear import Batch, Column, DeviceReplay, Replay, Schema
from deepspeed_gear.batching.gather import Gatherer, GatherOptions
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.ops.records import Slot

WAYS = ("host", "direct", "staged", "device")
FLAGS = [Column(name, "bool", (), name) for name in ("terminated", "truncated")]
OFF_POLICY = {"log_prob": "new", "behaviour_log_prob": "logp", "rho_bar": 1.5, "c_bar": 0.75}


def loop(steps: dict[str, np.ndarray], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and value targets of steps in their order, of which the last one is
    bootstrapped.
    """
    gamma = options["gamma"]
    lam = options["lam"]
    known = {name: np.asarray(values, np.float64) for name, values in steps.items()}
    count = len(known["reward"])
    later = 0.0
    advantage = np.zeros(count)
    target = np.zeros(count)
    for t in reversed(range(count)):
        if known["terminated"][t] or known["truncated"][t]:
            later = 0.0
        following = 0.0 if known["terminated"][t] else known["next_value"][t]
        error = known["reward"][t] + gamma * following - known["value"][t]
        rho = 1.0
        c = lam
        own = error + gamma * lam * later
        if options["kind"] == "vtrace":
            ratio = np.exp(known["new"][t] - known["logp"][t])
            rho = min(ratio, options["rho_bar"])
            c = lam * min(ratio, options["c_bar"])
            own = rho * (error + gamma * later)
        later = rho * error + gamma * c * later
        advantage[t] = own
        target[t] = known["value"][t] + later
    return advantage, target


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], bool, list[dict[str, np.ndarray]], dict[str, Any]]:
    """Options of an estimate, whether values have T+1 rows, trajectories with any flags, and a
    window.
    """
    of_kind = draw(st.sampled_from([{"kind": "gae"}, {"kind": "vtrace", **OFF_POLICY}]))
    gamma, lam = (draw(st.sampled_from([0.0, 0.5, 0.97, 1.0])) for _ in range(2))
    words = np.random.default_rng(draw(st.integers(0, 999)))
    trajectories = []
    for steps in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
        value = words.normal(size=steps + 1).astype(np.float32)
        made = {
            name: words.normal(size=steps).astype(np.float32) for name in ("reward", "new", "logp")
        }
        ends = {
            flag.name: (np.arange(steps) == steps - 1) & (words.random() < 0.5) for flag in FLAGS
        }
        trajectories.append({**made, **ends, "value": value, "next_value": value[1:]})
    window = {"offset": draw(st.integers(-4, 4)), "length": draw(st.sampled_from([None, 1, 3, 12]))}
    return (
        {**of_kind, "value": "value", "gamma": gamma, "lam": lam},
        draw(st.booleans()),
        trajectories,
        window,
    )


def check_parts(replay: Replay, batch: Batch) -> None:
    """Check that a rank of those that share a sequence has its part of a window that is estimated
    whole.
    """
    table = replay.tables["main"]
    ids = batch.trajectory_id
    slots = torch.from_numpy(table.slots)[ids]
    zero = ids * 0
    begin = slots[:, Slot.FIRST_ROW]
    steps = slots[:, Slot.NUM_STEPS]
    records = torch.stack([ids, ids, zero, begin, steps, batch.anchor, zero, zero], dim=1)
    fields = [replace(field, part_first=3, part_length=6) for field in replay.fields]
    options = GatherOptions(fields, {}, None, 8, torch.float32, 1)
    tensors, mask = Gatherer(options, table, 1).gather(records)
    assert all(torch.equal(tensors[name], batch[name][:, 3:9]) for name in batch)
    assert all(torch.equal(mask[name], batch.mask[name][:, 3:9]) for name in batch)


@settings(max_examples=20)
@given(way=st.sampled_from(WAYS), case=cases())
def test_advantages_of_windows(way: str, case: Any) -> None:
    """A window's steps alone, bootstrapped after the last one, whichever memory and kernels have
    them.
    """
    options, has_final, trajectories, window = case
    late = way != "device" and options["kind"] == "vtrace"
    value = [Column("value", "float32", (), "other", "T+1")]
    if not has_final:
        value = [Column("value", "float32"), Column("next_value", "float32")]
        options = {**options, "next_value": "next_value"}
    rows = [Column("reward", "float32", (), "reward"), Column("new", "float32", late=late)]
    rows += [*FLAGS, Column("logp", "float32")]
    schema = Schema([*value, *rows])
    names = ("advantage", "value_target")
    config = {
        "batch_size": 8,
        "tables": {"main": {"capacity_steps": 200, "max_length": 9, "remove": "fifo"}},
        "sampler": {"unit": "step"},
        "advantage": options,
        "fields": dict.fromkeys((*names, "reward"), window),
        "shared_memory": {"prefix": prefix()},
    }
    if way == "device":
        config["tables"]["main"]["placement"] = "device"
    elif way != "host":
        config["transfer"] = {"way": way}
    kind = DeviceReplay if way == "device" else Replay
    with kind(config, *(["cpu"] if way == "device" else []), schemas={"main": schema}) as replay:
        for number, trajectory in enumerate(trajectories):
            steps = len(trajectory["reward"])
            shown = {
                c.name: trajectory[c.name][: steps + (c.rows == "T+1")]
                for c in schema
                if not c.late
            }
            if way == "device":
                replay.add_({name: torch.from_numpy(array)[None] for name, array in shown.items()})
            else:
                replay.add(shown)
                if late:
                    replay.fill(number, new=trajectory["new"])
        batch = replay.sample()
        if way == "host" and window["length"] == 12:
            check_parts(replay, batch)
    assert list(batch) == ["advantage", "value_target", "reward"]
    for i, (which, anchor) in enumerate(
        zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)
    ):
        begin = anchor + window["offset"]
        steps = len(trajectories[which]["reward"])
        real = [t for t in range(begin, begin + (window["length"] or 1)) if 0 <= t < steps]
        part = {name: array[real] for name, array in trajectories[which].items()}
        for name, wanted in zip(names, loop(part, options), strict=True):
            got = batch[name][i].reshape(-1)
            mask = batch.mask[name][i].reshape(-1)
            assert torch.equal(mask, batch.mask["reward"][i].reshape(-1))
            assert got[mask].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert not got[~mask].any()


GAE = {"kind": "gae", "value": "value"}
FIELD = {"advantage": {}}
LONGER = {"advantage": {"length": 3}, "value_target": {"length": 4}}
REFUSED = [
    (GAE, {}, "gear.advantage must have a field that is derived from it"),
    (None, FIELD, "fields.advantage must not be derived without gear.advantage"),
    ({**GAE, "value": "after"}, FIELD, "next_value must be given where value has T rows"),
    ({**GAE, "value": "observation"}, FIELD, "advantage.value must name a column with one float"),
    ({"kind": "vtrace", "value": "value"}, FIELD, 'log_prob must be given with "kind": "vtrace"'),
    ({**GAE, "c_bar": 2.0}, FIELD, 'c_bar must not be given with "kind": "gae"'),
    (GAE, LONGER, "fields.value_target must have the offset and length of gear.fields.advantage"),
    (GAE, {"advantage": {"pad": "edge"}}, "pad must not be given for advantages"),
]


@pytest.mark.parametrize(("options", "fields", "text"), REFUSED)
def test_what_is_refused(options: Any, fields: dict[str, Any], text: str) -> None:
    columns = [Column("value", "float32", (), "other", "T+1"), Column("after", "float32"), *FLAGS]
    schema = Schema([*columns, Column("reward", "float32", (), "reward")])
    config = {"batch_size": 8, "tables": {"main": {"capacity_steps": 200}}, "fields": fields}
    if options is not None:
        config["advantage"] = {"gamma": 0.9, **options}
    with pytest.raises(ConfigError, match=text):
        Replay(config, schemas={"main": schema})


@pytest.mark.parametrize("option", ["advantage", "n_step"])
def test_flags_that_are_not_bool(option: str) -> None:
    columns = [
        Column("value", "float32", (), "other", "T+1"),
        Column("reward", "float32", (), "reward"),
    ]
    schema = Schema([*columns, FLAGS[0], Column("cut", "uint8", (), "truncated")])
    section = {"batch_size": 8, "tables": {"main": {"capacity_steps": 200}}}
    of = {"advantage": {"gamma": 0.9, **GAE}, "n_step": {"n": 2, "gamma": 0.9}}
    fields: dict[str, Any] = FIELD if option == "advantage" else {"reward": {}}
    with pytest.raises(
        ConfigError, match=f"gear.{option} must be .* are bool, got 'cut of dtype uint8'; store"
    ):
        Replay({**section, "fields": fields, option: of[option]}, schemas={"main": schema})
    with Replay({**section, "fields": {"cut": {}}}, schemas={"main": schema}):
        pass  # nothing computes with it


# ---- rollout batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"kind": "gae"}, {"kind": "vtrace", **OFF_POLICY, "log_prob": "new"}]
)
@pytest.mark.parametrize("per_step", [False, True])
def test_advantages_of_rollout_batches(options: dict[str, Any], per_step: bool) -> None:
    """Tokens of the loss mask are actions; others take no time, and their rewards are the action's
    before.
    """
    columns = {**COLUMNS, **{flag.name: {"dtype": "bool", "role": flag.name} for flag in FLAGS}}
    columns["step_reward"] = {"dtype": "float32", "role": "reward"}
    words = np.random.default_rng(5)
    stored = responses(12)
    for response in stored:
        count = len(response["tokens"])
        last = np.arange(count) == count - 1
        ends = words.random() < 0.5
        response |= {"terminated": last & ends, "truncated": last & ~ends}
        response["loss_mask"] = words.random(count) < 0.6
        response["step_reward"] = words.normal(size=count).astype(np.float32)
    options = {**options, "value": "value", "gamma": 0.9, "lam": 0.8}
    reward = "step_reward" if per_step else "reward"
    known = {}
    with Replay(section(columns, rollout={"trajectories": 12})) as replay:
        for response in stored:
            replay.add(response)
        rollout = replay.rollout()
        for name in ("value", "new"):
            known[name] = words.normal(size=rollout.num_tokens).astype(np.float32)
            rollout.set(name, known[name])
        found = rollout.advantages(**options, reward=reward, name="a")
        assert torch.equal(found, rollout.column("a"))
        first = 0
        target = rollout.column("value_target")
        for which, count in zip(
            rollout.trajectory_id.tolist(), rollout.lengths.tolist(), strict=True
        ):
            response = stored[which]
            own = slice(first, first + count)
            first += count
            actions = np.flatnonzero(response["loss_mask"][1:])
            value = known["value"][own]
            rewards = np.append(response["step_reward"][1:], 0.0)
            if not per_step:
                rewards = np.where(np.arange(count) == count - 1, response["reward"], 0.0)
            ends = [*actions[1:], count]
            part = {
                "reward": [rewards[i:end].sum() for i, end in zip(actions, ends, strict=True)],
                "value": value[actions],
                "next_value": np.append(value[actions[1:]], value[-1]),
                "terminated": (np.arange(len(actions)) == len(actions) - 1)
                & response["terminated"][-1],
                "truncated": np.zeros(len(actions), bool),
                "new": known["new"][own][actions],
                "logp": np.append(response["logp"][1:], 0.0)[actions],
            }
            for got, wanted in zip((found, target), loop(part, options), strict=True):
                assert got[own][actions].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
                assert np.count_nonzero(got[own]) <= len(actions)
        assert any("a" in micro and "value_target" in micro for micro in micros(rollout))


def test_a_critic_of_states_needs_the_value_after_the_end() -> None:
    columns = {
        "observation": {"dtype": "float32", "shape": [2], "rows": "T+1"},
        "reward": {"dtype": "float32", "role": "reward"},
        "terminated": {"dtype": "bool", "role": "terminated"},
        "value": {"dtype": "float32", "rows": "T+1"},
    }
    with Replay(section(columns, rollout={"trajectories": 2})) as replay:
        for ends in (True, False):
            states = np.arange(4, dtype=np.float32)
            rows = {
                "observation": np.stack([states, states], 1),
                "reward": np.ones(3),
                "value": states,
            }
            replay.add({**rows, "terminated": (np.arange(3) == 2) & ends})
        rollout = replay.rollout()
        rollout.advantages("gae", value="value", reward="reward", lam=0.0)
        wanted = [2.0, 2.0, -1.0, 2.0, 2.0, 2.0]  # r + V' - V, without V' after the termination
        assert rollout.column("advantage").tolist() == wanted
        rollout.set("own", np.arange(6.0))
        with pytest.raises(
            DataError, match=r"value of the state after trajectories .* got '1 of 2"
        ):
            rollout.advantages("gae", value="own")
        for wrong, text in (
            ({"value": "valu"}, "column 'valu' must be filled or set before, or be a column"),
            (
                {"value": "value", "lam": 2.0},
                r"rollout.advantages.lam must be a finite number in \[0, 1\], got 2.0",
            ),
            ({"value": "value", "group": "x"}, "rollout.advantages.group is not an option"),
        ):
            with pytest.raises(ConfigError, match=text):
                rollout.advantages("gae", **wrong)
        with pytest.raises(
            ConfigError, match=r"rollout.advantages.value is not an option of 'grpo'"
        ):
            rollout.advantages(value="value")


@pytest.mark.parametrize("flag", [None, "terminated", "truncated"])
def test_a_response_that_a_pack_cuts_is_truncated(flag: str | None) -> None:
    """The value after its last trained token is bootstrapped from; that of a whole
    response is not.
    """
    columns = {**COLUMNS, **({} if flag is None else {flag: {"dtype": "bool", "role": flag}})}
    pack = {"tokens": 16, "pad": {"multiple": 16}, "too_long": "truncate"}
    with Replay(section(columns, rollout={"trajectories": 2}, pack=pack)) as replay:
        for length in (16, 17):
            flags = (
                {}
                if flag is None
                else {flag: (np.arange(length) == length - 1) & (flag == "terminated")}
            )
            stored = {
                "tokens": np.ones(length, np.int32),
                "loss_mask": np.arange(length) > 0,
                "reward": 0.0,
            }
            replay.add({**stored, "logp": np.zeros(length), "prompt": 0, **flags})
        rollout = replay.rollout()
        assert rollout.lengths.tolist() == [16, 16]
        rollout.set("value", np.full(32, 3.0))
        found = rollout.advantages("gae", value="value", gamma=1.0, lam=0.0).view(2, 16)
        assert found[:, 14].tolist() == [-3.0, 0.0]
        assert not found[:, :14].any()
