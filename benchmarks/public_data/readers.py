"""Independent reads of the files of data sets: h5py, NumPy, pyarrow and json, nothing of ours.

Each function returns the trajectories of its files as their publishers define them: by column of
the data set, the rows that must be in it.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as parquet

Trajectories = list[dict[str, Any]]
Read = Callable[[Sequence[Path]], Trajectories]
#: What another library has read, kept beside the files that this library has written.
EXPECTED = "expected.npz"
_OBJECTS = ("infos",)  # arrays of Python objects, of imitation


def _with_flags(trajectory: dict[str, Any], terminates: bool) -> dict[str, Any]:
    """Add the two end flags, of which one is set at the last step."""
    steps = len(trajectory["action"])
    is_end = np.arange(steps) == steps - 1
    return {**trajectory, "terminated": is_end & terminates, "truncated": is_end & (not terminates)}


def _hdf5(path: Path) -> dict[str, Any]:
    """Return all arrays of a file by their paths."""
    arrays: dict[str, Any] = {}

    def take(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            arrays[name] = node[()]

    with h5py.File(path) as file:
        file.visititems(take)
    return arrays


def _npz(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name not in _OBJECTS}


def d4rl(paths: Sequence[Path], others: Mapping[str, str] | None = None) -> Trajectories:
    """As `d4rl.qlearning_dataset`: an episode ends at a terminal or timeout flag.

    Without next observations the last step of an episode that does not terminate is left out. The
    observation after a terminal state is not known, and is the state itself here.

    Args:
        others: Further columns, by their names in the data set.
    """
    (path,) = paths
    arrays = _hdf5(path)
    terminals = arrays["terminals"].astype(bool)
    timeouts = arrays["timeouts"].astype(bool)
    ends = np.flatnonzero(terminals | timeouts) + 1
    found = []
    for low, high in pairwise([0, *ends.tolist(), *{len(terminals)} - {*ends.tolist()}]):
        states = arrays["observations"]
        terminates = bool(terminals[high - 1])
        if "next_observations" in arrays:
            end = high
            rows = np.concatenate([states[low:high], arrays["next_observations"][high - 1 : high]])
        elif terminates:
            end = high
            rows = np.concatenate([states[low:high], states[high - 1 : high]])
        else:
            end = high - 1
            rows = states[low:high]
        trajectory = {
            "observation": rows,
            "action": arrays["actions"][low:end],
            "reward": arrays["rewards"][low:end],
        }
        for name, key in (others or {}).items():
            trajectory[name] = arrays[key][low:end]
        found.append(_with_flags(trajectory, terminates))
    return found


def neorl(paths: Sequence[Path]) -> Trajectories:
    """`index` has the first row of each trajectory."""
    arrays = _npz(paths[0])
    found = []
    for low, high in pairwise([*arrays["index"].tolist(), len(arrays["obs"])]):
        trajectory = {
            "observation": arrays["obs"][low:high],
            "next_observation": arrays["next_obs"][low:high],
            "action": arrays["action"][low:high],
            "reward": arrays["reward"][low:high, 0],
        }
        found.append(_with_flags(trajectory, bool(arrays["done"][high - 1, 0])))
    return found


def minari(paths: Sequence[Path]) -> Trajectories:
    """A group per episode, with an observation more than actions."""
    arrays = _hdf5(paths[0] / "data" / "main_data.hdf5")
    episodes = {name.split("/")[0] for name in arrays}
    found = []
    for name in sorted(episodes, key=lambda episode: int(episode.split("_")[1])):
        trajectory = {
            "action": arrays[f"{name}/actions"],
            "reward": arrays[f"{name}/rewards"],
            "terminated": arrays[f"{name}/terminations"],
            "truncated": arrays[f"{name}/truncations"],
        }
        for key, rows in arrays.items():
            if key.startswith(f"{name}/observations"):
                column = key.removeprefix(f"{name}/observations").replace("/", ".")
                trajectory[f"observation{column}"] = rows
        found.append(trajectory)
    return found


def lerobot(paths: Sequence[Path], reward: str | None, done: str | None) -> Trajectories:
    """Rows of Parquet with `episode_index`; success is a terminal state, other ends are not."""
    found = []
    for file in sorted(paths[0].glob("data/*/*.parquet")):
        rows = parquet.read_table(file).to_pydict()
        number = np.array(rows["episode_index"])
        for episode in np.unique(number):
            own = number == episode
            trajectory = {
                "observation.state": np.array(rows["observation.state"], np.float32)[own],
                "action": np.array(rows["action"], np.float32)[own].reshape(sum(own), -1),
            }
            if reward is not None:
                trajectory["reward"] = np.array(rows[reward], np.float32)[own]
            is_end = done is not None and bool(np.array(rows[done])[own][-1])
            found.append(_with_flags(trajectory, is_end))
    return found


def ogbench(paths: Sequence[Path]) -> Trajectories:
    """As `ogbench.load_dataset`: the last row of a trajectory is the last next observation."""
    arrays = _npz(paths[0])
    found = []
    for low, high in pairwise([0, *(np.flatnonzero(arrays["terminals"]) + 1).tolist()]):
        trajectory = {
            "observation": arrays["observations"][low:high],
            "action": arrays["actions"][low : high - 1],
            "qpos": arrays["qpos"][low : high - 1],
        }
        found.append(_with_flags(trajectory, False))
    return found


def action_before(
    paths: Sequence[Path], rows: int, observation: str = "observation"
) -> Trajectories:
    """As ExORL's replay buffer: observation t-1, action t, reward t, observation t.

    Args:
        rows: Of each episode.
        observation: Key of the observations.
    """
    found = []
    for path in paths:
        arrays = _npz(path) if path.suffix == ".npz" else _hdf5(path)
        for low in range(0, len(arrays["action"]), rows):
            own = slice(low + 1, low + rows)
            trajectory = {
                "observation": arrays[observation][low : low + rows],
                "action": arrays["action"][own],
                "reward": arrays["reward"][own].reshape(-1),
                "discount": arrays["discount"][own],
            }
            found.append(_with_flags(trajectory, False))
    return found


def stable_baselines(paths: Sequence[Path], limit: int) -> Trajectories:
    """An episode begins at each `episode_starts`; the time limit shows why it ended.

    The last step of one that does not terminate is left out, as in `d4rl`.
    """
    arrays = _npz(paths[0])
    starts = np.flatnonzero(arrays["episode_starts"]).tolist()
    found = []
    for low, high in pairwise([*starts, len(arrays["actions"])]):
        terminates = high - low < limit
        end = high if terminates else high - 1
        trajectory = {
            "observation": arrays["obs"][[*range(low, end), high - 1]],
            "action": arrays["actions"][low:end],
            "reward": arrays["rewards"][low:end],
        }
        found.append(_with_flags(trajectory, terminates))
    return found


def imitation(paths: Sequence[Path], limit: int) -> Trajectories:
    """Trajectories are divided before the actions `indices`, and have an observation more."""
    arrays = _npz(paths[0])
    found = []
    bounds = [0, *arrays["indices"].tolist(), len(arrays["acts"])]
    for number, (low, high) in enumerate(pairwise(bounds)):
        trajectory = {
            "observation": arrays["obs"][low + number : high + number + 1],
            "action": arrays["acts"][low:high],
            "reward": arrays["rews"][low:high],
        }
        found.append(_with_flags(trajectory, high - low < limit))
    return found


def demonstrations(paths: Sequence[Path], mask: str | None = None) -> Trajectories:
    """Robomimic's groups, in numerical order; `dones` of the last step is success."""
    arrays = _hdf5(paths[0])
    names = {name.split("/")[1] for name in arrays if name.startswith("data/")}
    if mask is not None:
        names &= {name.decode() for name in arrays[f"mask/{mask}"]}
    found = []
    for name in sorted(names, key=lambda demo: int(demo.split("_")[1])):
        group = f"data/{name}"
        trajectory = {"action": arrays[f"{group}/actions"], "reward": arrays[f"{group}/rewards"]}
        for key, rows in arrays.items():
            if key.startswith(f"{group}/obs/"):
                after = arrays.get(key.replace("/obs/", "/next_obs/"), rows)[-1:]
                column = key.removeprefix(f"{group}/obs/")
                trajectory[f"observation.{column}"] = np.concatenate([rows, after])
        found.append(_with_flags(trajectory, bool(arrays[f"{group}/dones"][-1])))
    return found


def aloha(paths: Sequence[Path]) -> Trajectories:
    """A file per episode; the observation after the last action is not in it."""
    found = []
    for path in paths:
        arrays = _hdf5(path)
        trajectory = {
            "observation.qpos": arrays["observations/qpos"],
            "observation.qvel": arrays["observations/qvel"],
            "observation.images.top": arrays["observations/images/top"],
            "action": arrays["action"][:-1],
        }
        found.append(_with_flags(trajectory, False))
    return found


def _unpickled(path: Path) -> Any:
    """Return the content of a pickle of this checkout, which is trusted."""
    return pickle.loads(path.read_bytes(), encoding="latin1")


def cs285(paths: Sequence[Path], limit: int) -> Trajectories:
    """A dict of arrays per episode."""
    found = []
    for episode in _unpickled(paths[0]):
        states = episode["observation"]
        trajectory = {
            "observation": np.concatenate([states, episode["next_observation"][-1:]]),
            "action": episode["action"],
            "reward": episode["reward"],
        }
        found.append(_with_flags(trajectory, len(states) < limit))
    return found


def decision_transformer_pickle(paths: Sequence[Path]) -> Trajectories:
    """A dict of arrays per trajectory, of which some end in a terminal state."""
    found = []
    for episode in _unpickled(paths[0]):
        trajectory = {
            "observation": np.concatenate(
                [episode["observations"], episode["next_observations"][-1:]]
            ),
            "action": episode["actions"],
            "reward": episode["rewards"],
        }
        found.append(_with_flags(trajectory, bool(episode["terminals"][-1])))
    return found


def hand_dapg(paths: Sequence[Path]) -> Trajectories:
    """A dict of arrays per demonstration, without flags and next observations."""
    return [
        _with_flags(
            {
                "observation": demo["observations"],
                "action": demo["actions"][:-1],
                "reward": demo["rewards"][:-1],
            },
            False,
        )
        for demo in _unpickled(paths[0])
    ]


def rllib(paths: Sequence[Path]) -> Trajectories:
    """A SampleBatch per line; each of these lines is one episode."""
    found = []
    for line in paths[0].read_text().splitlines():
        batch = json.loads(line)
        trajectory = {
            "observation": np.array([*batch["obs"], batch["new_obs"][-1]]),
            "action": np.array(batch["actions"]),
            "reward": np.array(batch["rewards"]),
        }
        found.append(_with_flags(trajectory, batch["dones"][-1]))
    return found


def decision_transformer(paths: Sequence[Path], limit: int) -> Trajectories:
    """A row per episode; the time limit shows why it ended."""
    return [
        _with_flags(
            {
                "observation": np.array(row["observations"]),
                "action": np.array(row["actions"]),
                "reward": np.array(row["rewards"]),
            },
            len(row["rewards"]) < limit,
        )
        for row in parquet.read_table(paths[0]).to_pylist()
    ]


def jat(paths: Sequence[Path]) -> Trajectories:
    """A row per episode, without flags."""
    return [
        {
            "observation": np.array(row["continuous_observations"]),
            "action": np.array(row["continuous_actions"]),
            "reward": np.array(row["rewards"]),
        }
        for row in parquet.read_table(paths[0]).to_pylist()
    ]


def zarr_store(paths: Sequence[Path], store: str) -> Trajectories:
    """What zarr itself has read from the store, kept beside it; `episode_ends` divide the rows."""
    arrays = _npz(paths[0].parent / EXPECTED)
    begin = f"{store}/data/"
    found = []
    for low, high in pairwise([0, *arrays[f"{store}/meta/episode_ends"].tolist()]):
        trajectory = {
            key.removeprefix(begin): rows[low:high]
            for key, rows in arrays.items()
            if key.startswith(begin)
        }
        ends = np.arange(low, high) == high - 1
        found.append({**trajectory, "terminated": ends & False, "truncated": ends})
    return found


def d3rlpy(paths: Sequence[Path], file: str) -> Trajectories:
    """The transitions that d3rlpy itself has made of the file, kept beside it.

    The observation after a terminal state is not known, and is the state itself here.
    """
    arrays = _npz(paths[0].parent / "transitions.npz")
    found = []
    for number in range(sum(key.startswith(f"{file}/") and "/action" in key for key in arrays)):
        own = f"{file}/{number}"
        states = arrays[f"{own}/observation"]
        terminates = bool(arrays[f"{own}/terminal"][-1])
        after = states if terminates else arrays[f"{own}/next_observation"]
        trajectory = {
            "observation": np.concatenate([states, after[-1:]]),
            "action": arrays[f"{own}/action"],
            "reward": arrays[f"{own}/reward"][:, 0],
        }
        found.append(_with_flags(trajectory, terminates))
    return found


def rlds(paths: Sequence[Path]) -> Trajectories:
    """What tensorflow-datasets itself has read from the files, stored beside them."""
    arrays = _npz(paths[0] / EXPECTED)
    names = dict.fromkeys("/".join(key.split("/")[:2]) for key in arrays)
    found = []
    for name in names:
        own = {key.removeprefix(f"{name}/"): a for key, a in arrays.items() if key.startswith(name)}
        if len(own["reward"]) < 2:  # no step, only an observation
            continue
        trajectory = {
            key: rows if key.startswith("observation") else rows[:-1]
            for key, rows in own.items()
            if not key.startswith("is_")
        }
        found.append(_with_flags(trajectory, bool(own["is_terminal"][-1])))
    return found


# ---- texts, of which a token is a byte -----------------------------------------------------------


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    if text.startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def _sequence(parts: Sequence[tuple[str, bool]], **values: Any) -> dict[str, Any]:
    """Return the tokens of texts, and which texts have loss."""
    texts = [(text.encode(), has_loss) for text, has_loss in parts]
    tokens = np.frombuffer(b"".join(text for text, _ in texts), np.uint8)
    return {
        "tokens": tokens.astype(np.int32),
        "loss_mask": np.repeat([loss for _, loss in texts], [len(text) for text, _ in texts]),
        **values,
    }


def _turns(messages: Sequence[Mapping[str, Any]], answered: bool = True) -> list[tuple[str, bool]]:
    """Return the text of each message, and whether it has loss: the assistant's, by its weight."""
    found = []
    for message in messages:
        role = message.get("role", message.get("from"))
        has_loss = answered and role in ("assistant", "gpt") and message.get("weight", 1) == 1
        found.append((message.get("content", message.get("value")) + "\n", has_loss))
    return found


def texts(paths: Sequence[Path], columns: Sequence[str], reward: str | None = None) -> Trajectories:
    """Columns of texts one after the other, the last of which has loss."""
    found = []
    for row in _rows(paths[0]):
        parts = [(row[name], name == columns[-1]) for name in columns]
        values = {} if reward is None else {"reward": row[reward]}
        found.append(_sequence(parts, **values))
    return found


def chats(paths: Sequence[Path], column: str) -> Trajectories:
    """A list of messages in each row."""
    return [_sequence(_turns(row[column])) for row in _rows(paths[0])]


def transcript_pairs(paths: Sequence[Path]) -> Trajectories:
    """Two transcripts in a row, the preferred one first; their last replies have loss."""
    found = []
    for row in _rows(paths[0]):
        for name, reward in (("chosen", 1.0), ("rejected", 0.0)):
            text = row[name]
            reply = text.rindex("\n\nAssistant:") + len("\n\nAssistant:")
            found.append(_sequence([(text[:reply], False), (text[reply:], True)], reward=reward))
    return found


def chat_pairs(paths: Sequence[Path]) -> Trajectories:
    """Two chats in a row, each with a score."""
    found = []
    for row in _rows(paths[0]):
        for name, reward in (("chosen", 1.0), ("rejected", 0.0)):
            score = row[f"score_{name}"]
            found.append(_sequence(_turns(row[name]), reward=reward, score=score))
    return found


def labelled(paths: Sequence[Path]) -> Trajectories:
    """Prompt and completion as messages, and a label of each completion."""
    found = []
    for row in _rows(paths[0]):
        turns = [*_turns(row["prompt"]), *_turns(row["completion"])]
        found.append(_sequence(turns, reward=float(row["label"])))
    return found


def prompts(paths: Sequence[Path]) -> Trajectories:
    """Prompts without answers, and with the files of their images if there are any."""
    found = []
    for row in _rows(paths[0]):
        values: dict[str, Any] = {}
        if "images" in row:
            values["images"] = [image["bytes"] for image in row["images"]]
        found.append(_sequence(_turns(row["prompt"], answered=False), **values))
    return found
