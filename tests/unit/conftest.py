"""The package's syntax trees, small sources of the formats that ingest reads, and stores with
streams.
"""

import ast
import contextlib
import importlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest


def write_d4rl(
    path: Path,
    lengths: Sequence[int] = (3, 1, 4),
    ends: Sequence[str] = ("terminals", "timeouts", "timeouts"),
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Write a D4RL file and return its arrays.

    `ends` says what marks each episode's last step: "terminals", "timeouts", "both" or "". A change
    replaces an array (None drops it) or adds one; `__` in its name stands for `/`.
    """
    random = np.random.default_rng(0)
    total = sum(lengths)
    last = np.cumsum(lengths) - 1
    arrays: dict[str, Any] = {
        "observations": random.standard_normal((total, 2)).astype(np.float32),
        "actions": random.standard_normal((total, 3)).astype(np.float32),
        "rewards": random.standard_normal(total).astype(np.float32),
        "terminals": np.zeros(total, bool),
        "timeouts": np.zeros(total, bool),
    }
    for row, end in zip(last, ends, strict=True):
        for key in ("terminals", "timeouts"):
            arrays[key][row] = end in (key, "both")
    arrays["next_observations"] = np.roll(arrays["observations"], -1, axis=0)
    arrays["next_observations"][last] = random.standard_normal((len(last), 2))
    arrays.update({key.replace("__", "/"): value for key, value in changes.items()})
    arrays = {key: value for key, value in arrays.items() if value is not None}
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key] = value
    return arrays


def write_minari(
    folder: Path,
    form: str = "hdf5",
    lengths: Sequence[int] = (3, 1, 4),
    spaces: Any = None,
    **changes: Any,
) -> list[Any]:
    """Write a Minari data set with the minari package and return its episode buffers.

    A change replaces what `EpisodeBuffer` takes; a function of the number of steps is called per
    episode.
    """
    import gymnasium
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    observation_space, action_space = spaces or (box, gymnasium.spaces.Discrete(3))
    folder.mkdir(parents=True, exist_ok=True)
    storage = MinariStorage.new(folder, observation_space, action_space, data_format=form)
    random = np.random.default_rng(0)
    buffers = []
    for i, length in enumerate(lengths):
        parts: dict[str, Any] = {
            "id": None if form == "hdf5" else i,
            "seed": 7 + i,
            "observations": random.standard_normal((length + 1, 2)),
            "actions": random.integers(0, 3, length),
            "rewards": random.standard_normal(length).tolist(),
            "terminations": [False] * (length - 1) + [i % 2 == 0],
            "truncations": [False] * (length - 1) + [i % 2 == 1],
        }
        parts.update(
            {k: value(length) if callable(value) else value for k, value in changes.items()}
        )
        buffers.append(EpisodeBuffer(**parts))
        storage.update_episodes(buffers[-1:])
    return buffers


@pytest.fixture(scope="session")
def trees(checkout: Path) -> dict[str, ast.Module]:
    """The syntax tree of each module of the package, by its name."""
    return {
        ".".join(file.relative_to(checkout).with_suffix("").parts): ast.parse(
            file.read_text("utf-8")
        )
        for file in sorted((checkout / "deepspeed_gear").rglob("*.py"))
    }


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> Callable[[str], ModuleType]:
    """Import a module of the benchmarks, which are scripts and no package."""
    monkeypatch.syspath_prepend(str(checkout / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def scenes() -> Iterator[Callable[..., Any]]:
    """Return what makes a scene of streams, with the arguments of `StoreScene`."""
    from store_support import StoreScene

    with contextlib.ExitStack() as made:
        yield lambda *specs, **options: made.enter_context(StoreScene(specs, **options))


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's handler of Ctrl-C, which a shell's process in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def d4rl() -> Callable[..., dict[str, np.ndarray]]:
    """`write_d4rl`."""
    return write_d4rl


@pytest.fixture
def minari() -> Callable[..., list[Any]]:
    """`write_minari`, where the minari package is installed."""
    pytest.importorskip("minari", reason="the minari package makes the files of this test")
    return write_minari
