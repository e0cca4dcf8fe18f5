"""The public data sets: where each is published, its miniature, and the options that load it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from public_data import readers
from public_data.readers import Read

# How a miniature came to be.
CUT = "cut"  # of the files that are published
WHOLE = "whole"  # those files, unchanged
MADE = "made"  # in the published layout, with numbers and texts of our own


@dataclass(frozen=True)
class PublicSet:
    """A data set, and the command that loads it.

    Attributes:
        name: For the table.
        layout: What its files are.
        url: Where the data, or the program that writes the layout, are published.
        origin: `CUT`, `WHOLE` or `MADE`.
        made: What was cut, and from which files, or what else the miniature is.
        sources: Files and folders of the miniature, relative to `miniatures`.
        options: Of `gear ingest`.
        read: Independent read of the sources.
        is_text: Whether its steps are tokens.
        needs: Modules that decode its files, beside those that `launch/setup.sh` always installs.
    """

    name: str
    layout: str
    url: str
    origin: str
    made: str
    sources: tuple[str, ...]
    options: str
    read: Read
    is_text: bool = False
    needs: tuple[str, ...] = ()

    def line(self, target: str) -> str:
        """Return the command that makes a data set at `target`."""
        return " ".join(
            part for part in ("gear ingest", *self.sources, target, self.options) if part
        )


_LAYOUT = "our numbers in the published layout"
_TEXTS = "our texts in the published layout"
_HOPPER = "roll-outs of public policies in gymnasium's Hopper-v4, not the published data"
_CHAT = "byte_tokens:chat"
_ENCODE = "byte_tokens:encode"


def _tokenize(function: str, *columns: str) -> str:
    return " ".join(f"--tokenize {column}={function}" for column in columns)


STEPS = (
    PublicSet(
        name="D4RL locomotion",
        layout="HDF5 with next observations",
        url="https://github.com/Farama-Foundation/D4RL",
        origin=MADE,
        made=f"16 episodes, {_HOPPER}",
        sources=("d4rl/hopper-random.hdf5",),
        options="",
        read=partial(readers.d4rl, others={"infos.qpos": "infos/qpos"}),
    ),
    PublicSet(
        name="D4RL AntMaze",
        layout="HDF5",
        url="https://github.com/Farama-Foundation/D4RL",
        origin=MADE,
        made=_LAYOUT,
        sources=("d4rl/antmaze-umaze.hdf5",),
        options="",
        read=partial(readers.d4rl, others={"infos.goal": "infos/goal"}),
    ),
    PublicSet(
        name="D4RL Maze2D",
        layout="HDF5 without terminal states",
        url="https://github.com/Farama-Foundation/D4RL",
        origin=MADE,
        made=_LAYOUT,
        sources=("d4rl/maze2d-umaze.hdf5",),
        options="",
        read=partial(readers.d4rl, others={"infos.goal": "infos/goal"}),
    ),
    PublicSet(
        name="DSRL",
        layout="HDF5 with costs",
        url="https://github.com/liuzuxin/DSRL",
        origin=MADE,
        made=_LAYOUT,
        sources=("dsrl/SafetyCarCircle1Gymnasium-v0-1-3.hdf5",),
        options="",
        read=partial(readers.d4rl, others={"costs": "costs"}),
    ),
    PublicSet(
        name="NeoRL",
        layout="npz, `done` of terminal states only",
        url="https://github.com/polixir/NeoRL",
        origin=MADE,
        made=f"{_LAYOUT}; episodes of 50 steps",
        sources=("neorl/Hopper-v3-high.npz",),
        options="--episode-length 50 --columns '!index'",
        read=readers.neorl,
    ),
    PublicSet(
        name="Minari MuJoCo",
        layout="Minari HDF5",
        url="https://minari.farama.org/datasets/mujoco/",
        origin=MADE,
        made=f"two episodes of a Minari file; {_HOPPER}",
        sources=("minari/hopper/medium-v0",),
        options="",
        read=readers.minari,
    ),
    PublicSet(
        name="Minari D4RL Kitchen",
        layout="Minari HDF5, a dict with goals",
        url="https://minari.farama.org/datasets/D4RL/kitchen/",
        origin=MADE,
        made=f"{_LAYOUT}, written by the minari package",
        sources=("minari/D4RL/kitchen/complete-v2",),
        options="",
        read=readers.minari,
    ),
    PublicSet(
        name="Minari Atari",
        layout="Minari HDF5, frames",
        url="https://minari.farama.org/datasets/atari/",
        origin=MADE,
        made=f"{_LAYOUT}, with frames of 21 x 16, written by the minari package",
        sources=("minari/atari/breakout/expert-v0",),
        options="",
        read=readers.minari,
    ),
    PublicSet(
        name="LeRobot 2.1 (Unitree G1)",
        layout="Parquet and metadata, no rewards",
        url="https://github.com/YifanTian07/G1-policy-train/tree/d1d3bb45f16a99eb3220c88b4f84f6c92d306f88",
        origin=CUT,
        made="the first 60 frames of episodes 0 and 1, without videos (MIT)",
        sources=("lerobot/g1",),
        options="--columns observation.state --reward none",
        read=partial(readers.lerobot, reward=None, done=None),
    ),
    PublicSet(
        name="LeRobot 3.0",
        layout="Parquet and metadata",
        url="https://huggingface.co/lerobot",
        origin=MADE,
        made="frames of our own, written by lerobot 0.6.1",
        sources=("../../../examples/data/lerobot_v3",),
        options="--columns observation.state",
        read=partial(readers.lerobot, reward="next.reward", done="next.success"),
    ),
    PublicSet(
        name="Open X-Embodiment (RLDS)",
        layout="TFRecord of TensorFlow Datasets",
        url="https://www.tensorflow.org/datasets/catalog/bridge_data_v2",
        origin=MADE,
        made=f"{_LAYOUT}, written and read by tensorflow-datasets 4.9.10",
        sources=("../../../tests/support/formats/mini_robot",),
        options="",
        read=readers.rlds,
    ),
    PublicSet(
        name="Diffusion Policy (PushT)",
        layout="zarr 2, Blosc",
        url="https://diffusion-policy.cs.columbia.edu/data/training/",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 6 x 6, written and read by zarr 3.1.6",
        sources=("../../../tests/support/formats/mini_zarr/pusht.zarr.zip",),
        options="--reward none",
        read=partial(readers.zarr_store, store="pusht"),
        needs=("numcodecs",),
    ),
    PublicSet(
        name="UMI",
        layout="zarr 2 in a zip file, JPEG XL, no actions",
        url="https://umi-gripper.github.io/",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 8 x 8, written and read by zarr 3.1.6",
        sources=("../../../tests/support/formats/mini_zarr/umi.zarr.zip",),
        options="--reward none",
        read=partial(readers.zarr_store, store="umi"),
        needs=("imagecodecs", "numcodecs"),
    ),
    PublicSet(
        name="OGBench",
        layout="npz, the last row is an observation",
        url="https://github.com/seohongpark/ogbench",
        origin=MADE,
        made=_LAYOUT,
        sources=("ogbench/pointmaze-medium-navigate-v0.npz",),
        options="--reward none",
        read=readers.ogbench,
    ),
    PublicSet(
        name="ExORL",
        layout="npz per episode, actions of the step before",
        url="https://github.com/denisyarats/exorl",
        origin=MADE,
        made=f"{_LAYOUT}; episodes of 40 steps",
        sources=("exorl/episode_000000_40.npz", "exorl/episode_000001_40.npz"),
        options="--episode-length 40 --last-step action",
        read=partial(readers.action_before, rows=41),
    ),
    PublicSet(
        name="V-D4RL",
        layout="HDF5 of images, actions of the step before",
        url="https://github.com/conglu1997/v-d4rl",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 12 x 12; episodes of 20 steps",
        sources=("vd4rl/walker_walk-medium.hdf5",),
        options="--episode-length 20 --last-step action",
        read=partial(readers.action_before, rows=21),
    ),
    PublicSet(
        name="V-D4RL for DreamerV2",
        layout="npz per episode, flags of rows",
        url="https://github.com/conglu1997/v-d4rl",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 8 x 8",
        sources=("dreamer/episode-0-15.npz", "dreamer/episode-1-15.npz"),
        options="--rename image=observation --last-step action",
        read=partial(readers.action_before, rows=16, observation="image"),
    ),
    PublicSet(
        name="robomimic",
        layout="HDF5, a group per demonstration",
        url="https://robomimic.github.io/docs/datasets/overview.html",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 8 x 8",
        sources=("robomimic/demo.hdf5",),
        options="--mask train",
        read=partial(readers.demonstrations, mask="train"),
    ),
    PublicSet(
        name="LIBERO",
        layout="HDF5, a group per demonstration",
        url="https://github.com/Lifelong-Robot-Learning/LIBERO",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 8 x 8",
        sources=("libero/pick_up_the_black_bowl_demo.hdf5",),
        options="",
        read=readers.demonstrations,
    ),
    PublicSet(
        name="ALOHA (ACT)",
        layout="HDF5 per episode, no rewards, no flags",
        url="https://github.com/tonyzhaozh/act",
        origin=MADE,
        made=f"{_LAYOUT}, with images of 12 x 16; episodes of 30 steps",
        sources=("aloha/episode_0.hdf5", "aloha/episode_1.hdf5"),
        options="--episode-length 30 --reward none",
        read=readers.aloha,
    ),
    PublicSet(
        name="imitation",
        layout="npz of trajectories",
        url="https://github.com/HumanCompatibleAI/imitation/tree/e5ef18806c449ca47153b494a02471c5e2ae3a14/tests/testdata/expert_models/cartpole_0/rollouts",
        origin=WHOLE,
        made="`final.npz`, unchanged (MIT)",
        sources=("../../../examples/data/cartpole_expert.npz",),
        options="--episode-length 500",
        read=partial(readers.imitation, limit=500),
    ),
    PublicSet(
        name="d3rlpy",
        layout="HDF5 of version 1, `episode_terminals`",
        url="https://github.com/takuseno/d3rlpy/blob/master/d3rlpy/datasets.py",
        origin=MADE,
        made=f"{_LAYOUT}, read by d3rlpy 2.8.1",
        sources=("../../../tests/support/formats/mini_d3rlpy/first.h5",),
        options="",
        read=partial(readers.d3rlpy, file="first"),
    ),
    PublicSet(
        name="Stable-Baselines experts",
        layout="npz with `episode_starts`",
        url="https://github.com/hill-a/stable-baselines/tree/master/stable_baselines/gail/dataset",
        origin=MADE,
        made=f"{_LAYOUT}; a time limit of 42 steps",
        sources=("stable-baselines/expert_cartpole.npz",),
        options="--episode-length 42",
        read=partial(readers.stable_baselines, limit=42),
    ),
    PublicSet(
        name="CS285 experts",
        layout="pickle of a list of dicts",
        url="https://github.com/berkeleydeeprlcourse/homework_fall2023/tree/f401a13ce9139d633c1d242c2557ae29506a7e05/hw1/cs285",
        origin=CUT,
        made="the first 150 steps of both Hopper episodes, with `terminal` set at the last (MIT)",
        sources=("cs285/expert_data_Hopper-v4.pkl",),
        options="--allow-pickle --episode-length 150",
        read=partial(readers.cs285, limit=150),
    ),
    PublicSet(
        name="hand_dapg (Adroit)",
        layout="pickle of a list of dicts, no flags",
        url="https://github.com/aravindr93/hand_dapg/tree/9a1de23df6574e1b94e1da742e3326eb1f61c013/dapg/demonstrations",
        origin=CUT,
        made="the first 40 steps of demonstrations 0 and 1 of the door (Apache 2.0)",
        sources=("dapg/door-v0_demos.pickle",),
        options="--allow-pickle --columns ''",
        read=readers.hand_dapg,
    ),
    PublicSet(
        name="RLlib",
        layout="JSON of sample batches",
        url="https://github.com/ray-project/ray/tree/6cde9cc75be3da126002002b76853623e0e5d3bc/rllib/tests/data/cartpole",
        origin=CUT,
        made="three steps of `small.json` without some keys, the last done (Apache 2.0)",
        sources=("rllib/small.json",),
        options="",
        read=readers.rllib,
    ),
    PublicSet(
        name="Decision Transformer (Gym)",
        layout="Parquet, a row per episode",
        url="https://huggingface.co/datasets/edbeeching/decision_transformer_gym_replay",
        origin=MADE,
        made=f"{_LAYOUT}; a time limit of 40 steps",
        sources=("decision-transformer/hopper-medium.parquet",),
        options="--episode-length 40",
        read=partial(readers.decision_transformer, limit=40),
    ),
    PublicSet(
        name="Decision Transformer (D4RL)",
        layout="pickle of a list of dicts",
        url="https://github.com/kzl/decision-transformer/tree/master/gym",
        origin=MADE,
        made=_LAYOUT,
        sources=("decision-transformer/hopper-medium-v2.pkl",),
        options="--allow-pickle",
        read=readers.decision_transformer_pickle,
    ),
    PublicSet(
        name="JAT (MuJoCo)",
        layout="Parquet, a row per episode, no flags",
        url="https://huggingface.co/datasets/jat-project/jat-dataset",
        origin=MADE,
        made=_LAYOUT,
        sources=("jat/mujoco-hopper.parquet",),
        options="--rename continuous_observations=observation --rename continuous_actions=action",
        read=readers.jat,
    ),
)

TEXTS = (
    PublicSet(
        name="GSM8K",
        layout="JSON lines, question and answer",
        url="https://github.com/openai/grade-school-math/tree/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data",
        origin=CUT,
        made="the first 20 lines of `test.jsonl` (MIT)",
        sources=("../../../examples/data/gsm8k.jsonl",),
        options=_tokenize(_ENCODE, "question", "answer"),
        read=partial(readers.texts, columns=("question", "answer")),
        is_text=True,
    ),
    PublicSet(
        name="HH-RLHF",
        layout="JSON lines, two transcripts",
        url="https://github.com/anthropics/hh-rlhf",
        origin=MADE,
        made=_TEXTS,
        sources=("hh-rlhf/train.jsonl.gz",),
        options=_tokenize("byte_tokens:transcript", "chosen", "rejected"),
        read=readers.transcript_pairs,
        is_text=True,
    ),
    PublicSet(
        name="UltraFeedback (binarized)",
        layout="Parquet, two chats with scores",
        url="https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized",
        origin=MADE,
        made=_TEXTS,
        sources=("ultrafeedback_binarized/train_prefs.parquet",),
        options=_tokenize(_CHAT, "chosen", "rejected") + " --columns '!messages'",
        read=readers.chat_pairs,
        is_text=True,
    ),
    PublicSet(
        name="KTO mix",
        layout="Parquet, completions with a label",
        url="https://huggingface.co/datasets/trl-lib/kto-mix-14k",
        origin=MADE,
        made=_TEXTS,
        sources=("kto-mix/train.parquet",),
        options=_tokenize(_CHAT, "prompt", "completion"),
        read=readers.labelled,
        is_text=True,
    ),
    PublicSet(
        name="HelpSteer2",
        layout="JSON lines, responses with ratings",
        url="https://huggingface.co/datasets/nvidia/HelpSteer2",
        origin=MADE,
        made=_TEXTS,
        sources=("helpsteer2/train.jsonl",),
        options=_tokenize(_ENCODE, "prompt", "response") + " --rename helpfulness=reward",
        read=partial(readers.texts, columns=("prompt", "response"), reward="helpfulness"),
        is_text=True,
    ),
    PublicSet(
        name="ShareGPT",
        layout="JSON array of conversations",
        url="https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered",
        origin=MADE,
        made=_TEXTS,
        sources=("sharegpt/sg_90k.json",),
        options=_tokenize(_CHAT, "conversations"),
        read=partial(readers.chats, column="conversations"),
        is_text=True,
    ),
    PublicSet(
        name="OpenAI fine-tuning",
        layout="JSON lines, chats with weights",
        url="https://platform.openai.com/docs/guides/supervised-fine-tuning",
        origin=MADE,
        made=_TEXTS,
        sources=("openai/fine_tuning.jsonl",),
        options=_tokenize(_CHAT, "messages"),
        read=partial(readers.chats, column="messages"),
        is_text=True,
    ),
    PublicSet(
        name="Alpaca",
        layout="JSON array of instructions",
        url="https://github.com/tatsu-lab/stanford_alpaca",
        origin=MADE,
        made=_TEXTS,
        sources=("alpaca/alpaca_data.json",),
        options=_tokenize(_ENCODE, "instruction", "input", "output"),
        read=partial(readers.texts, columns=("instruction", "input", "output")),
        is_text=True,
    ),
    PublicSet(
        name="GSM8K for verl",
        layout="Parquet, prompts as chats",
        url="https://github.com/volcengine/verl/blob/main/examples/data_preprocess/gsm8k.py",
        origin=MADE,
        made=_TEXTS,
        sources=("verl/gsm8k/train.parquet",),
        options=_tokenize(_CHAT, "prompt"),
        read=readers.prompts,
        is_text=True,
    ),
    PublicSet(
        name="Geometry3K for verl",
        layout="Parquet, prompts with images",
        url="https://github.com/volcengine/verl/blob/main/examples/data_preprocess/geo3k.py",
        origin=MADE,
        made=f"{_TEXTS}, with images of 6 x 8",
        sources=("verl/geo3k/train.parquet",),
        options=_tokenize(_CHAT, "prompt"),
        read=readers.prompts,
        is_text=True,
    ),
)
SETS = STEPS + TEXTS
