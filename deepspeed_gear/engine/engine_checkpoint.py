"""The replay's part of a DeepSpeed checkpoint: position in the client state, tables in the tag.

`ds_to_universal` copies the client state but not the tables. The client state therefore names the
tag's folder, where the tables of a converted checkpoint are found. DeepSpeed keeps neither the path
nor the client state of a checkpoint that it has loaded, so `attach` needs the path if the engine
has already loaded one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.utils import logger

from deepspeed_gear.arguments import folder as folder_argument
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
    """Write a replay's tables into a tag's folder. Collective.

    Returns:
        The value of `CLIENT_STATE` in the checkpoint's client state.
    """
    position = replay.save(folder / TABLES)
    has_tables = bool((position["save"] or {}).get("tables"))
    return {_POSITION: position, _FOLDER: str(folder.absolute()), _HAS_TABLES: has_tables}


def load(replay: ReplayBase, folder: Path, saved: Mapping[str, Any] | None) -> bool:
    """Load a replay's part of a checkpoint. Collective.

    Args:
        replay: The replay.
        folder: Folder of the tag, or of the tag that `ds_to_universal` has made from it.
        saved: The value that `save` returned, from the client state; None: there is none.
    Returns:
        Whether the checkpoint holds the part of a replay.
    Raises:
        CheckpointError: Only some ranks hold the part, the tables are missing, or they do not fit.
    """
    control_plane = replay.control_plane
    holds = control_plane.all_gather(saved is not None)
    if len(set(holds)) > 1:  # a save was ended between the model files of the ranks
        rule = "must hold a replay's part on all ranks or on none"
        lacking = [rank for rank, has in enumerate(holds) if not has]
        remedy = "take another checkpoint"
        raise CheckpointError(f"client state of {folder}", rule, f"none on ranks {lacking}", remedy)
    if saved is None:
        return False
    if not {_POSITION, _FOLDER, _HAS_TABLES} <= saved.keys():
        rule = "must hold a position and the folder of its tables"
        remedy = "save it with this version"
        raise CheckpointError(f"client state of {folder}", rule, sorted(saved), remedy)
    saved_in = Path(saved[_FOLDER])
    in_tag = folder / TABLES
    in_origin = folder.parent / saved_in.name / TABLES  # of the tag that this was converted from
    as_saved = saved_in / TABLES
    places = [in_tag, in_origin, as_saved]
    tables = next((place for place in places if place.is_dir()), None)
    tables = control_plane.broadcast(tables)  # all ranks load the folder that one rank has chosen
    if tables is None and saved[_HAS_TABLES]:
        rule = (
            f"must hold the replay's tables, which were saved in {as_saved} and are no longer there"
        )
        remedy = (
            f"copy them from where that tag lies now: cp -r .../{saved_in.name}/{TABLES} {in_tag}"
        )
        raise CheckpointError(str(in_tag), rule, None, remedy)
    read = partial(replay.load_folder, tables or in_tag, saved[_POSITION])
    whole_saves.name_others(control_plane, read, partial(whole_tags.others_in, folder.parent))
    return True


def load_late(
    engine: Any, replay: ReplayBase, checkpoint: Checkpoint, control_plane: ControlPlane
) -> None:
    """Load the replay's part of the checkpoint that an engine has already loaded. Collective.

    Args:
        engine: The engine.
        replay: Its replay.
        checkpoint: The folder that `load_checkpoint` got, or that of the tag. None and False load
            nothing.
        control_plane: The control plane of the ranks.
    Raises:
        ConfigError: Ranks give different checkpoints.
        CheckpointError: It is not the engine's checkpoint, or holds no part of a replay that fits.
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
        raise CheckpointError(str(folder), "must hold a replay's part", None, remedy)


def _read(engine: Any, given: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """Find the tag of a checkpoint that an engine has loaded; return its folder and our state."""
    folder = given
    remedy = "give attach the folder that load_checkpoint got, or that of the tag"
    if not deepspeed_compat.model_states(given):
        # A folder of tags: `load_checkpoint` takes the one that this file names.
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
        # Weights stay in the file. Unpickling trusts the file, as DeepSpeed does.
        state = torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)
    if state.get("global_steps") != engine.global_steps:
        rule = (
            f"must be the checkpoint that the engine has loaded, of global step "
            f"{engine.global_steps}"
        )
        raise CheckpointError(str(folder), rule, state.get("global_steps"), "give attach that one")
    return folder, state.get(CLIENT_STATE)


@dataclass
class _CheckpointCalls:
    """The checkpoint calls of an engine with a replay, around those of DeepSpeed.

    Order of a save: the old list of the tag's files is removed; the replay's part is written, then
    DeepSpeed's; each node fsyncs its files; one rank lists their sizes; `latest` names the tag.
    So `latest` names a whole checkpoint wherever a process is killed.

    Attributes:
        engine: The engine.
        replay: Its replay.
        owns: Whether the replay was made for the engine, so that its state is saved and loaded.
        pending: Folder, tag and `save_latest` of a checkpoint that is written in the background.
    """

    engine: Any
    replay: ReplayBase
    owns: bool
    pending: tuple[Path, str, bool] | None = None

    def __post_init__(self) -> None:
        # Before the calls are wrapped: DeepSpeed's own parameters and defaults.
        self._saves = inspect.signature(self.engine.save_checkpoint)
        self._loads = inspect.signature(self.engine.load_checkpoint)

    def save(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Save the replay's part, then the engine's by its `save_checkpoint`; list the files."""
        call = self._saves.bind(*arguments, **options)
        call.apply_defaults()
        given = call.arguments
        save_dir = folder_argument("save_dir", given["save_dir"])
        step = self.engine.global_steps
        tag = f"global_step{step}" if given["tag"] is None else str(given["tag"])
        whole_tags.begin(self.replay.control_plane, save_dir / tag)
        if self.owns:
            state = save(self.replay, save_dir / tag)
            given["client_state"] = {**(given["client_state"] or {}), CLIENT_STATE: state}
        save_latest = bool(given["save_latest"])
        given["save_latest"] = False  # DeepSpeed would name the tag before all files are there
        given["tag"] = tag
        result = original(*call.args, **call.kwargs)
        if deepspeed_compat.writes_in_background(self.engine):
            self.pending = save_dir, tag, save_latest
        else:
            self._finish(save_dir, tag, save_latest)
        return result

    def commit(self, original: Callable[..., Any]) -> None:
        """End a save in the background by the engine's call; list the files."""
        original()
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._finish(*pending)

    def _finish(self, save_dir: Path, tag: str, save_latest: bool) -> None:
        replay = self.replay
        whole_tags.finish(replay.control_plane, save_dir, tag, replay.is_node_leader, save_latest)

    def load(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Check that a tag is whole, load it by the engine's `load_checkpoint`, then the replay."""
        call = self._loads.bind(*arguments, **options)
        call.apply_defaults()
        given = call.arguments
        load_dir = folder_argument("load_dir", given["load_dir"])
        only_module = given["load_module_only"]
        if not self.engine.load_universal_checkpoint():
            # ZeRO 3 reads the weights from the optimizer's files, also without its states.
            only_weights = self.engine.zero_optimization_stage() < 3 and (
                only_module or not given["load_optimizer_states"]
            )
            tag = None if given["tag"] is None else str(given["tag"])
            leads_node = self.replay.is_node_leader
            whole_tags.check(
                self.replay.control_plane, load_dir, tag, leads_node, only_weights, self.engine
            )
        path, client_state = original(*arguments, **options)
        if path is None or not self.owns:
            return path, client_state
        state = client_state.pop(CLIENT_STATE, None)
        if not only_module and not load(self.replay, Path(path).parent, state):
            logger.warning(
                "gear: %s holds no replay state; sampling starts at the first batch", path
            )
        return path, client_state


def attach_checkpoints(engine: Any, replay: ReplayBase, owns: bool) -> None:
    """Make an engine's checkpoints hold the replay that it `owns`, and `latest` name whole ones."""
    calls = _CheckpointCalls(engine, replay, owns)
    deepspeed_compat.wrap(engine, "save_checkpoint", calls.save)
    deepspeed_compat.wrap(engine, "load_checkpoint", calls.load)
    if deepspeed_compat.writes_in_background(engine):
        deepspeed_compat.wrap(engine, deepspeed_compat.COMMITTING, calls.commit)
