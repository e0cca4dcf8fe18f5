"""Files that a reader goes through: for construction, rollout batches, and leases until drawn."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import rollout_support
from group_support import take, train
from ledger_support import ledger_section, responses, write_prompts
from page_scenes import section
from pydantic import BaseModel

import deepspeed_gear
from deepspeed_gear import Replay, RolloutWorker

MOST_OF_CONSTRUCTION = 25
MOST_OF_ROLLOUT = 12
MOST_OF_LEASE = 13
MOST_CALLBACKS = 3
ROOT = f"{Path(deepspeed_gear.__file__).parent}/"
# Files of words and rules, which a reader knows by name; the control plane runs steps of others.
WORDS = {
    *(f"config/{name}.py" for name in "field_names option_rules schedules types".split()),
    *(f"ops/{name}.py" for name in "constants records".split()),
    *(f"{name}.py" for name in "arguments errors log outcome schema timeouts".split()),
    "distributed/control_plane.py",
    "store/memory_layout.py",
    "store/native_rows.py",
}


def is_record(owner: type) -> bool:
    """Return whether a class only holds values: a frozen dataclass, a named tuple, options."""
    options = getattr(owner, "__dataclass_params__", None)
    return issubclass(owner, (tuple, BaseModel)) or (options is not None and options.frozen)


def traced_calls(frame: FrameType) -> tuple[str, str] | None:
    """Return the file of a function's caller and its own, if it leads a reader to another file."""

    def file_of(one: FrameType) -> str:
        path = one.f_code.co_filename
        return path.removeprefix(ROOT) if path.startswith(ROOT) else ""

    own = file_of(frame)
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith("comp>")
    if not own or own in WORDS or not is_function or code.co_name == "<genexpr>":
        return None
    this = frame.f_locals.get("self", frame.f_locals.get("cls"))
    if is_record(this if isinstance(this, type) else type(this)):
        return None
    caller = frame.f_back
    while caller is not None and (file_of(caller) in WORDS or not file_of(caller)):
        caller = caller.f_back
    if caller is None or file_of(caller) == own:
        return None
    if this is not None and caller.f_locals.get("self") is this:
        return None  # of a base class, or of a subclass
    if code.co_name == "__init__" and type(this).__module__ == caller.f_globals["__name__"]:
        return None  # inherited
    return file_of(caller), own


def leads_of(walk: Callable[[], object]) -> dict[str, set[str]]:
    """Return the files whose functions a walk runs and that call a function of another file."""
    leads: dict[str, set[str]] = defaultdict(set)

    def trace(frame: FrameType, event: str, _: object) -> None:
        files = traced_calls(frame) if event == "call" else None
        if files is not None:
            leads[files[0]].add(files[1])

    sys.setprofile(trace)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return leads


@pytest.mark.parametrize("is_online", [False, True], ids=["data set", "capacity"])
def test_a_reader_of_the_construction_goes_through_few_files(data: Path, is_online: bool) -> None:
    options: dict[str, Any] = section()
    if not is_online:
        options = {**options, "data": str(data), "tables": {}, "fields": {"reward": {}}}
    Replay(options).close()  # builds, and imports that happen once
    made: list[Replay] = []
    leads = leads_of(lambda: made.append(Replay(options)))
    made[0].close()
    stages = {"plan/resolved_plan.py", "replay/replay_parts.py", "replay/node_stores.py"}
    assert stages | {"replay/replay.py"} <= leads.keys()
    assert len(leads) <= MOST_OF_CONSTRUCTION, leads


def test_a_reader_of_a_rollout_batch_goes_through_few_files() -> None:
    """It is selected, its steps are iterated over and read, and it is consumed.

    A callback leads back: one of two files calls the other, which calls a function of the first.
    """
    with rollout_support.filled(rollout_support.section()) as replay:

        def walk() -> None:
            for step in replay.rollout():
                for micro in step:
                    assert micro["logp"].numel()

        walk()
        leads = leads_of(walk)
    back = {
        frozenset((a, b)) for a, others in leads.items() for b in others if a in leads.get(b, ())
    }
    assert {"replay/packed/rollout_loader.py", "replay/packed/packs.py"} <= leads.keys()
    assert len(leads) <= MOST_OF_ROLLOUT, leads
    assert len(back) <= MOST_CALLBACKS, back


def test_a_reader_goes_from_a_lease_to_the_drawn_group_through_few_files(tmp_path: Path) -> None:
    """A worker leases prompts and commits their groups; the batch stream draws these groups."""
    config = ledger_section(write_prompts(tmp_path / "prompts", 7), {"max_lag": 2})
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:

        def commit() -> None:
            for lease in worker.lease(3):
                lease.commit(responses(lease))

        def walk() -> None:
            commit()
            assert len(take(train(replay), 1)) == 3

        commit()
        take(train(replay), 0)
        leads = leads_of(walk)
    assert {"writer/rollout_worker.py", "store/prompt_ledger.py"} <= leads.keys()
    assert {"sampling/selector.py", "store/groups.py"} <= leads.keys()
    assert len(leads) <= MOST_OF_LEASE, leads
