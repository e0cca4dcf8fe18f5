"""Make the miniatures of data sets whose layout is public, with numbers and texts of our own.

PYTHONPATH=benchmarks python benchmarks/public_data/make_miniatures.py

Each function has the keys, dtypes and order of rows that the data set publishes; shapes of images
are smaller. The Minari files are written by the minari package.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
from numpy.typing import NDArray

MINIATURES = Path(__file__).resolve().parent / "miniatures"
Arrays = dict[str, NDArray[Any]]
Numbers = np.random.Generator


def normal(numbers: Numbers, *shape: int) -> NDArray[np.float32]:
    return numbers.standard_normal(shape).astype(np.float32)


def at_ends(lengths: Sequence[int], chosen: Sequence[int]) -> NDArray[np.bool_]:
    """Return a flag per row, set in the last rows of the chosen episodes."""
    flags = np.zeros(sum(lengths), np.bool_)
    flags[np.cumsum(lengths)[list(chosen)] - 1] = True
    return flags


def write_hdf5(path: Path, arrays: Mapping[str, Any], **attributes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(attributes)
        for name, array in arrays.items():
            packed = {"compression": "gzip"} if np.asarray(array).nbytes > 8192 else {}
            file.create_dataset(name, data=array, **packed)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- arrays of steps -----------------------------------------------------------------------------


def d4rl_antmaze(numbers: Numbers) -> None:
    """Reaching the goal has the only reward and a terminal flag; other episodes end by timeout."""
    lengths = (40, 23, 40)
    rows = sum(lengths)
    reached = at_ends(lengths, [1])
    arrays = {
        "observations": normal(numbers, rows, 29),
        "actions": normal(numbers, rows, 8),
        "rewards": reached.astype(np.float32),
        "terminals": reached,
        "timeouts": at_ends(lengths, [0, 2]),
        "infos/goal": normal(numbers, rows, 2),
        "infos/qpos": normal(numbers, rows, 15),
        "infos/qvel": normal(numbers, rows, 14),
    }
    write_hdf5(MINIATURES / "d4rl" / "antmaze-umaze.hdf5", arrays)


def d4rl_maze2d(numbers: Numbers) -> None:
    """One stream of goals: no terminal states; the last part has no flag at its end."""
    lengths = (60, 45, 30)
    rows = sum(lengths)
    arrays = {
        "observations": normal(numbers, rows, 4),
        "actions": normal(numbers, rows, 2),
        "rewards": numbers.integers(0, 2, rows).astype(np.float32),
        "terminals": np.zeros(rows, np.bool_),
        "timeouts": at_ends(lengths, [0, 1]),
        "infos/goal": normal(numbers, rows, 2),
        "infos/qpos": normal(numbers, rows, 2),
        "infos/qvel": normal(numbers, rows, 2),
    }
    write_hdf5(MINIATURES / "d4rl" / "maze2d-umaze.hdf5", arrays)


def dsrl(numbers: Numbers) -> None:
    """D4RL's arrays with costs."""
    lengths = (50, 31, 50)
    rows = sum(lengths)
    states = normal(numbers, rows + len(lengths), 16)
    first = np.concatenate(
        [np.arange(n) + start for n, start in zip(lengths, (0, 51, 83), strict=True)]
    )
    arrays = {
        "observations": states[first],
        "next_observations": states[first + 1],
        "actions": normal(numbers, rows, 2),
        "rewards": normal(numbers, rows),
        "costs": numbers.integers(0, 2, rows).astype(np.float32),
        "terminals": at_ends(lengths, [1]).astype(np.float64),
        "timeouts": at_ends(lengths, [0, 2]).astype(np.float64),
    }
    write_hdf5(MINIATURES / "dsrl" / "SafetyCarCircle1Gymnasium-v0-1-3.hdf5", arrays)


def neorl(numbers: Numbers) -> None:
    """Columns [N, 1]; `done` marks terminal states only, `index` the first row of each episode."""
    lengths = (50, 50, 27)
    rows = sum(lengths)
    arrays = {
        "obs": normal(numbers, rows, 11),
        "next_obs": normal(numbers, rows, 11),
        "action": normal(numbers, rows, 3),
        "reward": normal(numbers, rows, 1),
        "done": at_ends(lengths, [2]).astype(np.float32)[:, None],
        "index": np.array([0, 50, 100]),
    }
    write_npz("neorl/Hopper-v3-high.npz", arrays)


def write_npz(name: str, arrays: Arrays) -> None:
    path = MINIATURES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def ogbench(numbers: Numbers) -> None:
    """The last row of a trajectory, which `terminals` marks, holds only an observation."""
    lengths = (61,) * 4
    rows = sum(lengths)
    arrays = {
        "observations": normal(numbers, rows, 2),
        "actions": normal(numbers, rows, 2),
        "terminals": at_ends(lengths, range(4)).astype(np.float32),
        "qpos": normal(numbers, rows, 2),
        "qvel": normal(numbers, rows, 2),
    }
    write_npz("ogbench/pointmaze-medium-navigate-v0.npz", arrays)


def exorl(numbers: Numbers) -> None:
    """A file per episode; row t has the action and the reward that led to observation t."""
    for number in range(2):
        arrays = {
            "observation": normal(numbers, 41, 24),
            "action": normal(numbers, 41, 6),
            "reward": normal(numbers, 41, 1),
            "discount": np.ones((41, 1), np.float32),
            "physics": numbers.standard_normal((41, 18)),
        }
        for name in ("action", "reward"):  # of the first row, which no step leads to
            arrays[name][0] = 0
        write_npz(f"exorl/episode_{number:06d}_40.npz", arrays)


def vd4rl(numbers: Numbers) -> None:
    """Images in channels-first order, with `step_type` and the rows of ExORL."""
    step_type = np.ones(21)
    step_type[0] = 0
    step_type[20] = 2
    is_first = np.tile(step_type == 0, 3)
    rewards = numbers.random(63)
    rewards[is_first] = 0
    actions = normal(numbers, 63, 6)
    actions[is_first] = 0
    arrays = {
        "action": actions,
        "discount": np.ones(63),
        "observation": numbers.integers(0, 256, (63, 3, 12, 12), np.uint8),
        "reward": rewards,
        "step_type": np.tile(step_type, 3),
    }
    write_hdf5(MINIATURES / "vd4rl" / "walker_walk-medium.hdf5", arrays)


def dreamer(numbers: Numbers) -> None:
    """A file per episode with V-D4RL's rows and flags of rows; images are 64 x 64 there."""
    for number in range(2):
        at = np.arange(16)
        arrays = {
            "image": numbers.integers(0, 256, (16, 8, 8, 3), np.uint8),
            "action": normal(numbers, 16, 6),
            "reward": numbers.random(16).astype(np.float32),
            "discount": np.ones(16, np.float32),
            "is_first": at == 0,
            "is_last": at == 15,
            "is_terminal": np.zeros(16, np.bool_),
        }
        for name in ("action", "reward"):
            arrays[name][0] = 0
        write_npz(f"dreamer/episode-{number}-15.npz", arrays)


def stable_baselines(numbers: Numbers) -> None:
    """What `generate_expert_traj` writes: `episode_starts` divide whole episodes."""
    lengths = (30, 42, 25)
    starts = np.roll(at_ends(lengths, range(3)), 1)
    rewards = np.ones(97)
    arrays = {
        "actions": numbers.integers(0, 2, (97, 1)),
        "obs": numbers.standard_normal((97, 4)),
        "rewards": rewards,
        "episode_returns": np.array(lengths, np.float64),
        "episode_starts": starts,
    }
    write_npz("stable-baselines/expert_cartpole.npz", arrays)


def robomimic(numbers: Numbers) -> None:
    """Groups of demonstrations with next observations; filters name those of a split."""
    arrays: dict[str, Any] = {}
    for number, steps in enumerate((15, 12, 18)):
        states = normal(numbers, steps + 1, 3)
        images = numbers.integers(0, 256, (steps + 1, 8, 8, 3), np.uint8)
        success = (np.arange(steps) == steps - 1).astype(np.int64)
        group = f"data/demo_{number}"
        arrays |= {
            f"{group}/actions": normal(numbers, steps, 7).astype(np.float64),
            f"{group}/rewards": success.astype(np.float64),
            f"{group}/dones": success,
            f"{group}/states": numbers.standard_normal((steps, 32)),
            f"{group}/obs/agentview_image": images[:-1],
            f"{group}/obs/robot0_eef_pos": states[:-1],
            f"{group}/next_obs/agentview_image": images[1:],
            f"{group}/next_obs/robot0_eef_pos": states[1:],
        }
    arrays |= {"mask/train": np.array([b"demo_0", b"demo_2"]), "mask/valid": np.array([b"demo_1"])}
    path = MINIATURES / "robomimic" / "demo.hdf5"
    write_hdf5(path, arrays)
    with h5py.File(path, "a") as file:
        file["data"].attrs.update(total=45, env_args=json.dumps({"env_name": "Lift", "type": 1}))
        for number, steps in enumerate((15, 12, 18)):
            file[f"data/demo_{number}"].attrs["num_samples"] = steps


def libero(numbers: Numbers) -> None:
    """Robomimic's groups without next observations, with sparse rewards at success."""
    arrays: dict[str, Any] = {}
    for number, steps in enumerate((20, 26)):
        success = (np.arange(steps) == steps - 1).astype(np.uint8)
        images = numbers.integers(0, 256, (steps, 8, 8, 3), np.uint8)
        group = f"data/demo_{number}"
        arrays |= {
            f"{group}/actions": numbers.standard_normal((steps, 7)),
            f"{group}/rewards": success,
            f"{group}/dones": success,
            f"{group}/states": numbers.standard_normal((steps, 47)),
            f"{group}/robot_states": numbers.standard_normal((steps, 9)),
            f"{group}/obs/agentview_rgb": images,
            f"{group}/obs/eye_in_hand_rgb": images[::-1],
            f"{group}/obs/ee_states": numbers.standard_normal((steps, 6)),
            f"{group}/obs/gripper_states": numbers.standard_normal((steps, 2)),
            f"{group}/obs/joint_states": numbers.standard_normal((steps, 7)),
        }
    path = MINIATURES / "libero" / "pick_up_the_black_bowl_demo.hdf5"
    write_hdf5(path, arrays)
    with h5py.File(path, "a") as file:
        file["data"].attrs.update(num_demos=2, total=46, env_args=json.dumps({"type": 1}))


def aloha(numbers: Numbers) -> None:
    """A file per episode of one length, without rewards and flags."""
    for number in range(2):
        arrays = {
            "action": normal(numbers, 30, 14),
            "observations/qpos": normal(numbers, 30, 14),
            "observations/qvel": normal(numbers, 30, 14),
            "observations/images/top": numbers.integers(0, 256, (30, 12, 16, 3), np.uint8),
        }
        write_hdf5(MINIATURES / "aloha" / f"episode_{number}.hdf5", arrays, sim=True)


def decision_transformer_pickle(numbers: Numbers) -> None:
    """A list of trajectories; `terminals` is set at terminal states only."""
    trajectories = []
    for steps in (22, 35):
        states = normal(numbers, steps + 1, 11)
        terminals = np.arange(steps) == 21
        trajectories.append(
            {
                "observations": states[:-1],
                "next_observations": states[1:],
                "actions": normal(numbers, steps, 3),
                "rewards": normal(numbers, steps),
                "terminals": terminals & (steps == 22),
            }
        )
    folder = MINIATURES / "decision-transformer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hopper-medium-v2.pkl").write_bytes(pickle.dumps(trajectories, protocol=4))


# ---- tables of episodes, Minari ------------------------------------------------------------------


def decision_transformer(numbers: Numbers) -> None:
    """A row per episode with lists; `dones` is set at ends of both causes."""
    lengths = (25, 40, 40)
    rows = [
        {
            "observations": normal(numbers, steps, 11).tolist(),
            "actions": normal(numbers, steps, 3).tolist(),
            "rewards": normal(numbers, steps).tolist(),
            "dones": (np.arange(steps) == steps - 1).tolist(),
        }
        for steps in lengths
    ]
    write_parquet("decision-transformer/hopper-medium.parquet", rows)


def jat(numbers: Numbers) -> None:
    """A row per episode with lists of other names, without flags."""
    rows = [
        {
            "continuous_observations": normal(numbers, steps, 11).tolist(),
            "continuous_actions": normal(numbers, steps, 3).tolist(),
            "rewards": normal(numbers, steps).tolist(),
        }
        for steps in (18, 24)
    ]
    write_parquet("jat/mujoco-hopper.parquet", rows)


def write_parquet(name: str, rows: list[dict[str, Any]]) -> None:
    path = MINIATURES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path, compression="zstd")


def minari(folder: Path, spaces: Any, observations: Callable[[int], Any], actions: Any) -> None:
    """Write two Minari episodes; the first one terminates, the second one is truncated."""
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    storage = MinariStorage.new(folder, *spaces, data_format="hdf5")
    for number, steps in enumerate((9, 12)):
        is_end = np.arange(steps) == steps - 1
        buffer = EpisodeBuffer(
            id=None,
            seed=number,
            observations=observations(steps + 1),
            actions=actions(steps),
            rewards=is_end.astype(np.float64).tolist(),
            terminations=(is_end & (number == 0)).tolist(),
            truncations=(is_end & (number == 1)).tolist(),
        )
        storage.update_episodes([buffer])


def minari_kitchen(numbers: Numbers) -> None:
    """Observations are a dict with goals, which are dicts of tasks."""
    from gymnasium.spaces import Box, Dict

    def box(size: int) -> Any:
        return Box(-np.inf, np.inf, (size,), np.float64)

    tasks = {"kettle": 7, "microwave": 1}
    goal = Dict({task: box(size) for task, size in tasks.items()})
    space = Dict({"achieved_goal": goal, "desired_goal": goal, "observation": box(59)})

    def observations(rows: int) -> Any:
        goals = {task: numbers.standard_normal((rows, size)) for task, size in tasks.items()}
        wanted = {task: np.tile(numbers.standard_normal(n), (rows, 1)) for task, n in tasks.items()}
        states = numbers.standard_normal((rows, 59))
        return {"achieved_goal": goals, "desired_goal": wanted, "observation": states}

    spaces = (space, Box(-1, 1, (9,), np.float64))
    folder = MINIATURES / "minari" / "D4RL" / "kitchen" / "complete-v2" / "data"
    minari(folder, spaces, observations, lambda steps: numbers.uniform(-1, 1, (steps, 9)))


def minari_atari(numbers: Numbers) -> None:
    """Observations are frames, of 21 x 16 in place of 210 x 160."""
    from gymnasium.spaces import Box, Discrete

    def observations(rows: int) -> Any:
        return numbers.integers(0, 256, (rows, 21, 16, 3), np.uint8)

    spaces = (Box(0, 255, (21, 16, 3), np.uint8), Discrete(4))
    folder = MINIATURES / "minari" / "atari" / "breakout" / "expert-v0" / "data"
    minari(folder, spaces, observations, lambda steps: numbers.integers(0, 4, steps))


# ---- texts ---------------------------------------------------------------------------------------

QUESTIONS = ("What is 2+2?", "Name a prime above 10.", "Spell 'gear' backwards.")
GOOD = ("2+2 is 4.", "11 is a prime.", "That is 'raeg'.")
BAD = ("2+2 is 22.", "12.", "I cannot do that.")


def user(text: str) -> dict[str, str]:
    return {"content": text, "role": "user"}


def assistant(text: str) -> dict[str, str]:
    return {"content": text, "role": "assistant"}


def hh_rlhf(_: Numbers) -> None:
    """Two whole transcripts in a row; all but the last reply is the same."""
    rows = []
    for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True):
        head = f"\n\nHuman: Hello\n\nAssistant: Hi\n\nHuman: {question}\n\nAssistant: "
        rows.append({"chosen": head + good, "rejected": head + bad})
    path = MINIATURES / "hh-rlhf" / "train.jsonl.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def ultrafeedback(_: Numbers) -> None:
    """Chats with the prompt in them, and a score of each."""
    rows = [
        {
            "prompt": question,
            "prompt_id": f"{number:064x}",
            "chosen": [user(question), assistant(good)],
            "rejected": [user(question), assistant(bad)],
            "messages": [user(question), assistant(good)],
            "score_chosen": 8.5 - number,
            "score_rejected": 3.0 + number / 2,
        }
        for number, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True))
    ]
    write_parquet("ultrafeedback_binarized/train_prefs.parquet", rows)


def kto_mix(_: Numbers) -> None:
    """Prompt and completion as messages, and whether the completion is desirable."""
    rows = [
        {"prompt": [user(question)], "completion": [assistant(answer)], "label": answer in GOOD}
        for question, answer in zip(QUESTIONS * 2, GOOD + BAD, strict=True)
    ]
    write_parquet("kto-mix/train.parquet", rows)


def sharegpt(_: Numbers) -> None:
    """One JSON array of conversations of several turns, in `from` and `value`."""
    pairs = [*zip(QUESTIONS, GOOD, strict=True)]
    rows = []
    for number in (1, 2, 3):
        turns = []
        for question, answer in pairs[:number]:
            turns.append({"from": "human", "value": question})
            turns.append({"from": "gpt", "value": answer})
        rows.append({"id": f"chat_{number}", "conversations": turns})
    path = MINIATURES / "sharegpt" / "sg_90k.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1))


def openai_chat(_: Numbers) -> None:
    """Messages of which a weight of 0 leaves one out of the loss."""
    rows = []
    for question, good, bad in zip(QUESTIONS, GOOD, BAD, strict=True):
        first = {**assistant(bad), "weight": 0}
        second = {**assistant(good), "weight": 1}
        system = {"role": "system", "content": "Be brief."}
        rows.append({"messages": [system, user(question), first, user("No."), second]})
    write_jsonl(MINIATURES / "openai" / "fine_tuning.jsonl", rows)


def alpaca(_: Numbers) -> None:
    """One JSON array of instructions, inputs (often empty) and outputs."""
    rows = [
        {"instruction": question, "input": "" if number else "Think.", "output": answer}
        for number, (question, answer) in enumerate(zip(QUESTIONS, GOOD, strict=True))
    ]
    path = MINIATURES / "alpaca" / "alpaca_data.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=4))


def helpsteer2(_: Numbers) -> None:
    """Responses with five ratings from 0 to 4."""
    marks = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
    rows = []
    for number, (question, answer) in enumerate(zip(QUESTIONS, GOOD, strict=True)):
        ratings = {mark: (number + place) % 5 for place, mark in enumerate(marks)}
        rows.append({"prompt": question, "response": answer, **ratings})
    write_jsonl(MINIATURES / "helpsteer2" / "train.jsonl", rows)


def verl_gsm8k(_: Numbers) -> None:
    """Prompts as messages, and the ground truth that a rule compares answers with."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [user(question)],
            "ability": "math",
            "reward_model": {"ground_truth": str(number), "style": "rule"},
            "extra_info": {"answer": answer, "index": number, "split": "train"},
        }
        for number, (question, answer) in enumerate(zip(QUESTIONS, GOOD, strict=True))
    ]
    write_parquet("verl/gsm8k/train.parquet", rows)


def geometry3k(numbers: Numbers) -> None:
    """Verl's prompts with a list of images, each of them a file in the table."""
    from PIL import Image

    rows = []
    for number, count in enumerate((1, 2)):
        images = []
        for _ in range(count):
            file = io.BytesIO()
            pixels = numbers.integers(0, 256, (6, 8 + number, 3), np.uint8)
            Image.fromarray(pixels).save(file, "PNG")
            images.append({"bytes": file.getvalue(), "path": None})
        rows.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [user("<image>" * count + "Find x.")],
                "images": images,
                "ability": "math",
                "reward_model": {"ground_truth": str(number), "style": "rule"},
                "extra_info": {"answer": str(number), "index": number, "split": "train"},
            }
        )
    write_parquet("verl/geo3k/train.parquet", rows)


MAKERS = (
    d4rl_antmaze,
    d4rl_maze2d,
    dsrl,
    neorl,
    ogbench,
    exorl,
    vd4rl,
    stable_baselines,
    robomimic,
    libero,
    aloha,
    decision_transformer,
    minari_kitchen,
    minari_atari,
    hh_rlhf,
    ultrafeedback,
    kto_mix,
    sharegpt,
    openai_chat,
    alpaca,
    helpsteer2,
    verl_gsm8k,
    geometry3k,
    dreamer,
    decision_transformer_pickle,
    jat,
)


if __name__ == "__main__":
    for number, make in enumerate(MAKERS):
        make(np.random.default_rng(number))
