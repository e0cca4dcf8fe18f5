"""benchmarks/gpu_peers.py with the systems of the suite's environment, and what its checks find."""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import ROOT
from process_support import environment
from warm_python import run_warm

Load = Callable[[str], ModuleType]


ROLLOUT = {"items": 768, "added": 768, "batch": 192, "rollout": 24}
CASES: list[dict[str, Any]] = [{}, {"prioritized": True}, {"length": 20}, ROLLOUT]
NAMES = ["uniform", "prioritized", "windows", "roll-outs"]


@pytest.fixture(params=["gear", "columns"])
def child(request: pytest.FixtureRequest, load: Load) -> Iterator[Any]:
    """A process's answers, in this process."""
    found = load("device_peers.child").Child(request.param)
    yield found
    if found.table is not None:
        found.table.close()


def order_make(child: Any, **options: Any) -> Any:
    """Have a child fill a small table; return the case."""
    case = {"device": "cpu", "items": 4000, "batch": 64, "added": 16, **options}
    child.answer({"do": "make", "case": case, "compiler": "eager"})
    return child.case


@pytest.mark.parametrize("options", CASES, ids=NAMES)
def test_an_adapter_does_all_work_in_all_forms(
    child: Any, load: Load, options: dict[str, Any]
) -> None:
    case = order_make(child, **options)
    forms = importlib.import_module("device_peers.interface").FORMS
    for form in forms:
        for work in case.works:
            if "compiled" in form and "epochs" in work:
                with pytest.raises(load("peers.interface").NotOfferedError):
                    child.answer({"do": "prepare", "form": form, "work": work})
                continue
            prepared = child.answer({"do": "prepare", "form": form, "work": work})
            assert prepared["wrong"] == "", (form, work)
            assert prepared["host_waits"] is None
            assert prepared["graph_breaks"] == (0 if "compiled" in form else None)
            turn = child.answer({"do": "turn", "form": form, "work": work, "block_s": 1e-4})
            assert turn["us"] >= turn["host_us"] > 0
            assert turn["calls"] >= 3
    if case.length == 1:
        exact = child.answer({"do": "exact"})
        assert exact["exact"], exact
        assert exact["draws"] > (7 if not case.rollout else 4) * case.items
        assert exact.get("shuffles_each_epoch", True)


# ---- what is checked before a time is taken ------------------------------------------------------


def always_the_same(table: Any, name: str) -> None:
    """Make a call of an adapter do what a graph would do whose cursor lies on the host."""
    method = getattr(table, name)
    if name == "add":
        kept = {column: values.clone() for column, values in table.given.items()}

        def add() -> None:
            for column, values in kept.items():
                table.given[column].copy_(values)
            method()

        table.add = add
    elif name == "sample":

        def sample() -> None:
            torch.manual_seed(0)
            method()

        table.sample = sample
    else:
        table.update = lambda: None


@pytest.mark.parametrize(
    ("name", "work", "wrong"),
    [
        ("add", "add", "a second call adds the rows of the first again"),
        ("sample", "sample", "a second call draws the batch of the first again"),
        ("update", "update", "updated priorities change no draws"),
    ],
)
def test_calls_that_repeat_themselves_are_found(
    load: Load, name: str, work: str, wrong: str
) -> None:
    child = load("device_peers.child").Child("columns")
    order_make(child, prioritized=True)
    always_the_same(child.table, name)
    assert child.answer({"do": "prepare", "form": "eager", "work": work})["wrong"] == wrong


def test_an_add_at_one_place_is_found(load: Load) -> None:
    child = load("device_peers.child").Child("columns")
    order_make(child)
    table = child.table
    add = table.add

    def add_at_first() -> None:
        table.cursor.zero_()
        add()

    table.add = add_at_first
    found = child.answer({"do": "prepare", "form": "captured", "work": "add"})
    assert found["wrong"] == "a second call writes over what the first one added"


def test_rows_that_are_mixed_up_are_found(load: Load) -> None:
    interface = load("device_peers.interface")
    contents = load("speed.work")
    case = interface.Case("cpu", 4000, 8)
    batch = contents.transitions(np.arange(8))
    assert interface.wrong_rows(case, batch) == ""
    batch["action"] = batch["action"][::-1]
    assert interface.wrong_rows(case, batch) == "rows are mixed up in action"
    windows = interface.Case("cpu", 4000, 2, length=20)
    rows = interface.window_rows(np.array([[5], [70]]) + np.arange(20))
    assert interface.wrong_rows(windows, {"row": rows}) == ""
    across = interface.window_rows(np.array([[5], [990]]) + np.arange(20))
    assert "cross the end" in interface.wrong_rows(windows, {"row": across})


def test_draws_that_do_not_fit_the_masses_are_found(load: Load) -> None:
    child = load("device_peers.child").Child("columns")
    order_make(child, prioritized=True)
    module = child.module

    class Half(module.Columns):
        """Draws by the square root of the masses."""

        def sample(self) -> None:
            kept = self._masses.clone()
            self._masses.sqrt_()
            super().sample()
            self._masses.copy_(kept)

    child.module = ModuleType("half")
    child.module.make = Half
    found = child.answer({"do": "exact"})
    assert not found["exact"]
    assert found["deviation"] > 6


@pytest.mark.parametrize("fault", ["with replacement", "rows"])
def test_epochs_that_miss_an_item_are_found(load: Load, fault: str) -> None:
    child = load("device_peers.child").Child("columns")
    order_make(child, **ROLLOUT)
    module = child.module

    class Wrong(module.Columns):
        """Draws with replacement, or mixes up the rows of a column."""

        def minibatches(self) -> Iterator[None]:
            for _ in super().minibatches():
                if fault == "rows":
                    self._out["action"].copy_(self._out["action"].flip(0))
                else:
                    self._copy(torch.randint(self.case.items, (self.case.batch,)))
                yield

    child.module = ModuleType("wrong")
    child.module.make = Wrong
    found = child.answer({"do": "exact"})
    assert not found["exact"]
    assert found["each_once"] == (fault == "rows")


def test_a_roll_out_that_is_not_replaced_is_found(load: Load) -> None:
    child = load("device_peers.child").Child("columns")
    order_make(child, **ROLLOUT)
    always_the_same(child.table, "add")
    found = child.answer({"do": "prepare", "form": "captured", "work": "add"})
    assert found["wrong"] == "a second call adds the rows of the first again"


def test_waits_of_the_host_are_counted(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    forms = load("device_peers.torch_forms")
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        for _ in range(2):
            warnings.warn(f"{forms.SYNC} (Triggered internally)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert forms.count_waits(call) == 2
    assert modes == ["warn", "default"]


# ---- the command ---------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    script = str(ROOT / "benchmarks" / "gpu_peers.py")
    return run_warm(script, *arguments, env=environment(), cwd=ROOT)


def test_the_command_runs_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    options = ("--device", "cpu", "--smoke", "--systems", "gear", "columns")
    forms = ("--kinds", "prioritized", "roll-outs", "--forms", "eager", "captured")
    result = run(*options, *forms, "--json", str(path))
    assert result.returncode == 0, result.stderr
    document = json.loads(path.read_text())
    assert document["smoke"]
    assert len(document["kernel_sources"]) == 64
    assert document["systems"]["gear"].endswith(f"torch {torch.__version__}")
    timed = [row for row in document["rows"] if "us" in row]
    assert {(row["system"], row["form"]) for row in timed} == {
        (system, form) for system in ("gear", "columns") for form in ("eager", "captured")
    }
    exact = [row for row in document["rows"] if row["work"] == "exactness"]
    assert [row["exact"] for row in exact] == [True] * 4
    rollouts = [row for row in exact if "each_once" in row]
    assert [row["case"] for row in rollouts] == ["roll-outs of 64 x 24, B = 384"] * 2
    works = {row["work"] for row in timed if row["case"].startswith("roll-outs")}
    assert works == {"add", "5 epochs of 4 minibatches"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_without_a_gpu_names_the_remedy() -> None:
    result = run()
    assert result.returncode == 2
    assert "--device cpu --smoke" in result.stderr


def test_a_failed_capture_starts_a_new_process(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other calls are made again there, and the one that failed is not."""
    peers = load("gpu_peers")
    processes: list[Any] = []

    class Process:
        is_alive = True

        def __init__(self, *_: Any, **__: Any) -> None:
            self.made: list[str] = []
            processes.append(self)

        def order(self, do: str, _seconds: float, **more: Any) -> dict[str, Any]:
            if do == "make":
                return {"note": "a note"}
            self.made.append(more["work"])
            if more["work"] == "sample":
                return {"left out": "RuntimeError: capture"}
            return {"wrong": "", "host_waits": 1, "graph_breaks": None}

        def end(self) -> None:
            self.is_alive = False

    monkeypatch.setattr(peers, "Child", Process)
    systems = peers.Systems({"torchrl": "python"}, "cuda", "inductor")
    case = peers.Case("cuda", 4000, 64)
    note, answers = systems.prepare("torchrl", case, "captured")
    assert note == "a note"
    assert [process.made for process in processes] == [
        ["add", "sample", "add and sample"],
        ["add", "add and sample"],
    ]
    assert answers["sample"] == {"left out": "RuntimeError: capture"}
    assert answers["add"]["wrong"] == ""
    row = peers.row_of(case, "sample", "torchrl", "captured", answers["sample"], note)
    assert row["left_out"] == "RuntimeError: capture"
