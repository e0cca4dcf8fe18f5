"""The replay's part of a DeepSpeed checkpoint: position in the client state, tables in a folder of
the tag.

`ds_to_universal` copies the client state but not the tables: so the client state names the tag's
folder, and the tables of a converted checkpoint are found there. DeepSpeed keeps neither the path
nor the client state of a checkpoint that it has loaded: so `attach` needs the checkpoint of an
engine that has loaded one already.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from deepspeed_gear.checkpoint import whole_saves
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.engine import whole_tags
from deepspeed_gear.engine.whole_tags import TABLES
from deepspeed_gear.errors import CheckpointError, ConfigError
from deepspeed_gear.frameworks import deepspeed_compat
from deepspeed_gear.replay.replay_base import ReplayBase

CLIENT_STATE = "deepspeed_gear"  # our one key in a checkpoint's client state
_POSITION = "position"
_FOLDER = "folder"
_HAS_TABLES = "has_tables"

Checkpoint = str | Path | Literal[False] | None


def save(replay: ReplayBase, folder: Path) -> dict[str, Any]:
    """Write the tables into a tag's folder; return the client state's `CLIENT_STATE`.
    Collective.
    """
    position = replay.save(folder / TABLES)
    has_tables = bool((position["save"] or {}).get("tables"))
    return {_POSITION: position, _FOLDER: str(folder.absolute()), _HAS_TABLES: has_tables}


def load(replay: ReplayBase, folder: Path, saved: Mapping[str, Any] | None) -> bool:
    """Load the state that `save` has returned, and its tables; return whether there were any.
    Collective. `folder` is the tag's, also one that `ds_to_universal` has made; `saved` of the
    client state.
    """
    control_plane = replay.control_plane
    holds = control_plane.all_gather(saved is not None)
    if len(set(holds)) > 1:  # a save was ended between the model files of the ranks
        rule = "must hold the part of a replay on all ranks or on none"
        lacking = [rank for rank, has in enumerate(holds) if not has]
        remedy = "take another checkpoint"
        raise CheckpointError(f"client state of {folder}", rule, f"none on ranks {lacking}", remedy)
    if saved is None:
        return False
    if not {_POSITION, _FOLDER, _HAS_TABLES} <= saved.keys():
        rule = "must hold a position and the folder of its tables"
        remedy = "save it with this version"
        raise CheckpointError(f"client state of {folder}", rule, sorted(saved), remedy)
    # In the tag; beside it in the tag that it was converted from; where they were saved.
    saved_in = Path(saved[_FOLDER])
    places = [folder / TABLES, folder.parent / saved_in.name / TABLES, saved_in / TABLES]
    tables = next((place for place in places if place.is_dir()), None)
    tables = control_plane.broadcast(tables)  # of one rank, so that all load the same folder
    if tables is None and saved[_HAS_TABLES]:
        rule = (
            f"must hold the replay's tables, which were saved in {places[2]} and are not "
            f"there any more"
        )
        remedy = (
            f"copy them from where that tag lies now: cp -r .../{saved_in.name}/{TABLES} "
            f"{places[0]}"
        )
        raise CheckpointError(str(places[0]), rule, None, remedy)
    read = partial(replay.load_folder, tables or places[0], saved[_POSITION])
    whole_saves.name_others(control_plane, read, partial(whole_tags.others_in, folder.parent))
    return True


def check_start(engine: Any, checkpoint: Checkpoint) -> None:
    """Raise if an engine is under way, and no checkpoint is given where its batch
    stream continues.
    """
    if not (checkpoint is None or checkpoint is False or isinstance(checkpoint, (str, Path))):
        raise ConfigError(
            "checkpoint", "must be a folder or False", checkpoint, "see deepspeed_gear.attach"
        )
    if checkpoint is not None or not deepspeed_compat.is_under_way(engine):
        return
    rule = "must be given: this engine has trained or loaded a checkpoint (global step "
    rule += f"{engine.global_steps}), and DeepSpeed does not store which one"
    remedy = (
        "attach before load_checkpoint, or call deepspeed_gear.enable() before the engine "
        "or Trainer is "
    )
    remedy += "made, or give attach checkpoint=FOLDER, which load_checkpoint got (of a Trainer: "
    remedy += "OUTPUT_DIR/checkpoint-N), or checkpoint=False to start at the first batch"
    raise ConfigError("checkpoint", rule, None, remedy)


def load_late(
    engine: Any, replay: ReplayBase, checkpoint: Checkpoint, control_plane: ControlPlane
) -> None:
    """Load the replay's part of the checkpoint that an engine has loaded already. Collective.
    `checkpoint` is the folder that `load_checkpoint` got, or that of a tag; None and False load
    nothing.
    """
    given = control_plane.all_gather(str(checkpoint))
    if len(set(given)) > 1:
        raise ConfigError(
            "checkpoint", "must be the same on all ranks", given, "give one to attach"
        )
    if checkpoint is None or checkpoint is False:
        return
    read = control_plane.attempt(
        "the checkpoint",
        lambda: _read(engine, Path(checkpoint)) if control_plane.rank == 0 else None,
    )
    folder, state = control_plane.broadcast(read)
    if not load(replay, folder, state):
        remedy = "give attach checkpoint=False to start at the first batch"
        raise CheckpointError(str(folder), "must hold the part of a replay", None, remedy)


def _read(engine: Any, given: Path) -> tuple[Path, Mapping[str, Any] | None]:
    folder = given
    remedy = "give attach the folder that load_checkpoint got, or that of the tag"
    if not deepspeed_compat.model_states(
        given
    ):  # then the tag that `load_checkpoint` takes by default
        name = given / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        rule = "must name the checkpoint's tag"
        with CheckpointError.on(str(name), rule, OSError, remedy=remedy):
            folder = given / name.read_text().strip()
    files = deepspeed_compat.model_states(folder)
    if not files:
        remedy += f"; {whole_tags.others_in(folder.parent)}"
        raise CheckpointError(str(folder), "must hold *_model_states.pt of DeepSpeed", None, remedy)
    other = "take another checkpoint"
    with CheckpointError.on(str(files[0]), "must be readable", Exception, remedy=other):
        # Weights stay in the file; it is trusted, as by DeepSpeed.
        state = torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)
    if state.get("global_steps") != engine.global_steps:
        rule = (
            f"must be the checkpoint that the engine has loaded, of global step "
            f"{engine.global_steps}"
        )
        raise CheckpointError(str(folder), rule, state.get("global_steps"), "give attach that one")
    return folder, state.get(CLIENT_STATE)
