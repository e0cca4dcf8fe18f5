"""What examples/hopper.py prints as launch/quickstart.sh starts it: progress, no noise, a closing
summary.
"""

import importlib
import json
import logging
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gear_support import ROOT, prefix
from hopper_batches import hopper_data
from process_support import environment, free_port, remove_buffers, run_ranks
from warm_python import run_warm

pytest.importorskip("mujoco", reason="the example evaluates in MuJoCo")
pytest.importorskip("gymnasium", reason="likewise")
STEPS = 50
EVERY = 25
BATCH = 16


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hopper")


@pytest.fixture(scope="module")
def ran(out: Path) -> subprocess.CompletedProcess[str]:
    """A short run on two ranks, with small batches."""
    config = json.loads((ROOT / "configs" / "hopper.json").read_text())
    config["train_batch_size"] = BATCH
    config["tensorboard"]["output_path"] = str(out / "tensorboard")
    config["gear"]["data"]["path"] = str(hopper_data(out))
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    (out / "config.json").write_text(json.dumps(config))
    port = str(free_port())
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        *launch_options(),
        "--master_port",
        port,
    ]
    command += [
        "examples/hopper.py",
        "--config",
        str(out / "config.json"),
        "--out",
        str(out / "run"),
    ]
    command += ["--steps", str(STEPS), "--evaluate-every", str(EVERY)]
    try:
        done = run_warm(*command, env=environment(), cwd=ROOT)
    finally:
        remove_buffers(port)
    assert done.returncode == 0, done.stderr
    return done


def launch_options() -> list[str]:
    """Return the options that the quickstart gives to DeepSpeed's launcher, for two ranks."""
    script = (ROOT / "launch" / "quickstart.sh").read_text()
    (line,) = re.findall(r'^deepspeed (.*) --num_gpus "\$ranks"', script, re.M)
    return [*line.split(), "--num_gpus", "2"]


def lines_of(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of stderr without those of a build of the native op, which only a first run
    has.
    """
    return [line for line in ran.stderr.splitlines() if not line.startswith("gear: b")]


def test_progress_and_a_summary_are_all_that_it_writes(
    ran: subprocess.CompletedProcess[str], out: Path
) -> None:
    number = r"-?\d+"
    run = re.escape(str(out / "run"))
    wanted = [
        rf"\[.*\] \[INFO\] gear: global batch {BATCH} = micro batch {BATCH // 2} x accumulation "
        rf""
        rf"1 x data 2",
        rf"step 0: return {number}",
        rf"step {EVERY} of {STEPS}: return {number}",
        rf"step {STEPS} of {STEPS}: return {number}",
        rf"return \(mean of 5 episodes, asked for 3600\): {number} before training; after \d+ s "
        rf""
        rf"{number} at "
        rf"the best evaluation, of step ({EVERY}|{STEPS}), and {number} at the last; "
        r"mean of the data set: 3728",
        rf"the return varies from one evaluation to the next: {number}, {number}",
        r"behaviour: untrained, the hopper falls after \d+ of 1000 steps; trained, it falls "
        r"after \d+",
        rf"curves: {run}/curves\.png",
        rf"best weights: {run}/checkpoint/best",
        rf"checkpoint: {run}/checkpoint/global_step{STEPS}",
    ]
    lines = lines_of(ran)
    assert len(lines) == len(wanted), ran.stderr
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line), line


def test_no_number_is_nan_and_no_line_comes_twice(ran: subprocess.CompletedProcess[str]) -> None:
    lines = [*lines_of(ran), *ran.stdout.splitlines()]
    assert not [line for line in lines if re.search(r"\bnan\b|\binf\b", line, re.I)]
    assert not [line for line in lines if "warning" in line.lower()]
    assert len(set(lines)) == len(lines)


def test_what_it_names_is_there_and_the_result_ends_stdout(
    ran: subprocess.CompletedProcess[str], out: Path
) -> None:
    paths = [line.split(": ", 1)[1] for line in lines_of(ran)[-3:]]
    assert Path(paths[0]).read_bytes().startswith(b"\x89PNG")
    assert all((Path(path) / "gear" / "position.json").is_file() for path in paths[1:])
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert (result["steps"], result["ranks"], result["checkpoint"]) == (
        STEPS,
        2,
        f"global_step{STEPS}",
    )
    assert math.isfinite(result["return_after"])
    curves = json.loads((out / "run" / "result.json").read_text())["curves"]
    returns = dict(curves["return"])
    assert list(returns) == [0, EVERY, STEPS]
    assert result["return_best"] == round(max(returns[EVERY], returns[STEPS]), 1)
    assert result["return_best"] == round(returns[result["best_step"]], 1)


def test_a_resumed_run_ends_as_the_whole_one(
    ran: subprocess.CompletedProcess[str], out: Path
) -> None:
    """From the save in the middle, with the evaluations before it."""
    shutil.copytree(out / "run" / "checkpoint", out / "again" / "checkpoint")
    (out / "again" / "checkpoint" / "latest").write_text(f"global_step{EVERY}")
    options = [
        "--config",
        str(out / "config.json"),
        "--out",
        str(out / "again"),
        "--steps",
        str(STEPS),
    ]
    options += ["--evaluate-every", str(EVERY), "--resume"]
    output = run_ranks(ROOT / "examples" / "hopper.py", 2, *options)[0]
    whole, again = (
        json.loads((out / name / "result.json").read_text()) for name in ("run", "again")
    )
    assert again["curves"]["return"] == whole["curves"]["return"], output
    for name in ("returns", "return_best", "best_step", "return_before", "episode_steps"):
        assert again[name] == whole[name], output


EARLY = "Attempting to get learning rate from scheduler before it has started"


def start(common: ModuleType) -> None:
    """Log, warn, print and raise where an engine is made."""
    with common.quiet_start():
        for text in (EARLY, "another"):
            logging.getLogger("DeepSpeed").warning(text)
        for text in (
            "`torch.distributed.all_gather_into_tensor` is deprecated.",
            "`torch.jit` is deprecated",
        ):
            warnings.warn(text, FutureWarning, stacklevel=1)
        print("an op was built")
        print("an error", file=sys.stderr)
        raise ValueError("mine")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_quiet_start_hides_known_warnings_only(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("RANK", str(rank))
    common = importlib.import_module("common")
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    logged: list[str] = []
    monkeypatch.setattr(
        logger, "handle", lambda r: logged.append(r.msg) if logger.filter(r) else None
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="mine"):
            start(common)
    assert logged == ["another"]
    assert [str(warning.message) for warning in warned] == ["`torch.jit` is deprecated"]
    printed = capsys.readouterr()
    assert printed.out == ("an op was built\n" if rank == 0 else "")
    assert printed.err == "an error\n"
