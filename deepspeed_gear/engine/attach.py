"""Attach a replay to a DeepSpeed engine: `initialize`, `attach`, `enable`; metrics and progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import deepspeed

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.config import GearConfig, gear_config, parse, refuse_batch_sizes
from deepspeed_gear.config.ds_batch_sizes import check_elasticity
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.engine import engine_checkpoint, packed_steps
from deepspeed_gear.engine.launch_environment import be_single_rank_unless_launched
from deepspeed_gear.engine.pipeline_engine import attach_pipeline, check_section
from deepspeed_gear.errors import ConfigError, undo_on_error
from deepspeed_gear.frameworks import deepspeed_compat, engine_place
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor
from deepspeed_gear.log import LOG
from deepspeed_gear.ops import stale_locks
from deepspeed_gear.ops.op_builders import register
from deepspeed_gear.replay.device_replay import DeviceReplay
from deepspeed_gear.replay.metrics import Progress
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.replay.replay_base import ReplayBase
from deepspeed_gear.sampling.batch_sizes import BatchInfo
from deepspeed_gear.schema import Schema

_plain_initialize = deepspeed.initialize


def initialize(
    *arguments: Any, schemas: Mapping[str, Schema] | None = None, **options: Any
) -> tuple[Any, Any, Iterator[Batch], Any]:
    """Call `deepspeed.initialize` and attach the replay of its config's `gear` section. Collective.

    Without a launcher, as in a notebook, the process is rank 0 of 1.

    Args:
        *arguments: Arguments of `deepspeed.initialize`.
        **options: Options of `deepspeed.initialize`; `config` is a dict or the path of a JSON file.
        schemas: Schemas of tables that have a capacity and no schema in the config.
    Returns:
        Engine, optimizer, an endless iterator over gear batches, learning-rate scheduler. The
        engine has `gear_sample()`, `gear_iterator(stream)`, `gear_update_priorities(batch,
        priorities)` and `gear`, the Replay.
    Raises:
        GearError: On every rank, with the text of the rank where it occurred.
    """
    stale_locks.remove()  # DeepSpeed's init_distributed would wait for one without end
    if options.get("dist_init_required") is not False:
        be_single_rank_unless_launched()
    if options.get("training_data") is not None:
        raise ConfigError(
            "training_data", "must not be given beside a gear section", None, "use one of them"
        )
    config = _config_of(arguments, options)
    if config is None:  # of another form: only the engine has it in the end
        engine, optimizer, _, scheduler = _plain_initialize(*arguments, **options)
        attach(engine, schemas=schemas)
    else:
        required = options.get("dist_init_required")
        if required is not False:
            deepspeed.init_distributed(dist_init_required=required)
        # A wrong section is refused on all ranks before the model is built.
        control_plane = ControlPlane()
        section = control_plane.attempt("the gear section", lambda: _checked_section(config))
        engine, optimizer, _, scheduler = _plain_initialize(*arguments, **options)
        _attach_new(engine, control_plane, section, schemas)
    return engine, optimizer, engine.gear_iterator(), scheduler


def attach(
    engine: Any,
    replay: ReplayBase | None = None,
    config: Any = None,
    schemas: Mapping[str, Schema] | None = None,
    checkpoint: engine_checkpoint.Checkpoint = None,
) -> Any:
    """Attach a replay to an existing engine, as `initialize` does to its own. Collective.

    Args:
        engine: From `deepspeed.initialize`, Accelerate or a Trainer.
        replay: A Replay to share, for example another engine's `gear`. None makes a new one: a
            DeviceReplay if the table has `"placement": "device"`.
        config: The gear section, a ds_config with one, or the path of either; None: the engine's
            config.
        schemas: Schemas of tables that have a capacity and no schema in the config.
        checkpoint: Required if the engine has already trained or loaded a checkpoint: the folder
            that its `load_checkpoint` got, or that of the tag, from which the replay's part is
            loaded; or False, which starts at the first batch.
    Returns:
        The engine. An engine that already has a replay is not changed.
    Raises:
        ConfigError: There is no gear section, the kind of engine is not supported, the shared
            Replay belongs to an engine of other sizes or another place in the grid, or
            `checkpoint` is missing.
        CheckpointError: The checkpoint is not the engine's, or holds no part of a replay that fits.
    """
    if "gear" in engine.__dict__:
        return engine
    if replay is None:
        _attach_new(engine, ControlPlane(), config, schemas, checkpoint)
    else:
        deepspeed_compat.check_engine(engine)
        register()
        _check_shared(engine, replay, checkpoint)
        _bind(engine, replay, owns=False)
    return engine


def enable() -> None:
    """Make `deepspeed.initialize` attach a replay where there is a `gear` section. Idempotent."""
    stale_locks.remove()  # a Trainer calls init_distributed before `initialize`
    deepspeed.initialize = _initialize_if_asked


def disable() -> None:
    """Undo `enable`. Idempotent."""
    deepspeed.initialize = _plain_initialize


@wraps(_plain_initialize)
def _initialize_if_asked(*arguments: Any, **options: Any) -> Any:
    config = None
    with suppress(ConfigError):  # an unreadable config: DeepSpeed raises its own error
        config = gear_config.load(_config_of(arguments, options))
    asked = isinstance(config, Mapping) and "gear" in config
    return initialize(*arguments, **options) if asked else _plain_initialize(*arguments, **options)


def _config_of(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the ds_config that `deepspeed.initialize` would read; None: no mapping or file."""
    config = options.get("config", options.get("config_params"))
    if config is None:
        namespace = options.get("args", arguments[0] if arguments else None)
        config = getattr(namespace, "deepspeed_config", None)
    is_file = isinstance(config, (str, Path)) and Path(config).is_file()
    return config if is_file or isinstance(config, Mapping) else None


def _checked_section(config: Any) -> GearConfig:
    """Parse and check the gear section of a ds_config or its file, before an engine is made."""
    given = gear_config.load(config)
    section = _parsed(given.get("gear") if isinstance(given, Mapping) else None)
    check_elasticity(given)
    refuse_batch_sizes(section)
    return section


def _parsed(section: Any) -> GearConfig:
    """Parse a gear section, or return a parsed one; ConfigError if there is none."""
    if section is None:
        remedy = 'add "gear": {"data": "path/of/the/data/set"}'
        raise ConfigError("gear", "must be a section of the DeepSpeed config", None, remedy)
    return parse(section)


def _attach_new(
    engine: Any,
    control_plane: ControlPlane,
    config: Any,
    schemas: Mapping[str, Schema] | None,
    checkpoint: engine_checkpoint.Checkpoint = None,
) -> None:
    """Make an engine's replay, which reports and closes with it, and attach it. Collective.

    The control plane becomes the replay's.
    """
    deepspeed_compat.check_engine(engine)
    register()
    make = control_plane.attempt("the engine", lambda: _replay_for(engine, config, checkpoint))
    replay = make(process_group=control_plane, schemas=schemas)
    with undo_on_error(replay.close):
        if isinstance(replay, Replay) and replay.config.pack is not None:
            replay.set_model(engine)
        engine_checkpoint.load_late(engine, replay, checkpoint, control_plane)
    _bind(engine, replay, owns=True)
    _log_sizes(engine, replay)
    _report_steps(engine, replay)

    def destroy(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        replay.close()
        return original(*arguments, **options)

    deepspeed_compat.wrap(engine, "destroy", destroy)


def _replay_for(
    engine: Any, config: Any, checkpoint: engine_checkpoint.Checkpoint
) -> Callable[..., ReplayBase]:
    """Return the constructor of an engine's replay, with its section, sizes, place and device.

    Raises:
        ConfigError: The section is missing or wrong, or the engine does not suit it.
    """
    section = _parsed(engine.config.get("gear") if config is None else gear_config.read(config)[0])
    check_elasticity(engine.config)
    _check_start(engine, checkpoint)
    if section.pack is not None:
        packed_steps.check_gradients(engine, section.pack)
    if engine_place.is_pipeline(engine):
        check_section(section)
    place, info = _sizes_of(engine)
    of_engine: dict[str, Any] = {
        "info": info,
        "place": place,
        "engine_dtype": deepspeed_compat.compute_dtype(engine),
        "device": engine.device,
    }
    if section.on_device:
        return partial(DeviceReplay, section, **of_engine)
    return partial(Replay, section, turns=engine_place.turns_of(engine), **of_engine)


def _check_start(engine: Any, checkpoint: engine_checkpoint.Checkpoint) -> None:
    """Raise a ConfigError if an engine has trained and `checkpoint` is not given, or malformed."""
    if not (checkpoint is None or checkpoint is False or isinstance(checkpoint, (str, Path))):
        raise ConfigError(
            "checkpoint", "must be a folder or False", checkpoint, "see deepspeed_gear.attach"
        )
    if checkpoint is not None or not deepspeed_compat.is_under_way(engine):
        return
    rule = (
        "must be given: this engine has trained or loaded a checkpoint (global step "
        f"{engine.global_steps}), and DeepSpeed does not store which one"
    )
    remedy = (
        "attach before load_checkpoint, or call deepspeed_gear.enable() before the engine or "
        "Trainer is made, or give attach checkpoint=FOLDER, which load_checkpoint got (of a "
        "Trainer: OUTPUT_DIR/checkpoint-N), or checkpoint=False to start at the first batch"
    )
    raise ConfigError("checkpoint", rule, None, remedy)


def _bind(engine: Any, replay: ReplayBase, owns: bool) -> None:
    """Give an engine the calls of a replay, which may belong to another engine, too."""
    engine.gear = replay
    # Inner stages of a pipeline read no batches.
    engine.gear_sample = replay.sample if replay.topology.place.reads else lambda: None
    engine.gear_update_priorities = replay.update_priorities
    engine.gear_iterator = replay.iterator
    _keep_sizes(engine)
    if engine_place.is_pipeline(engine) and isinstance(replay, Replay):
        attach_pipeline(engine, replay)  # after its section was checked, so that this cannot fail
    if isinstance(replay, Replay) and replay.config.pack is not None:
        packed_steps.attach_packed(engine, replay, owns)
    engine_checkpoint.attach_checkpoints(engine, replay, owns)


def _keep_sizes(engine: Any) -> None:
    """Make an engine's setters of batch sizes raise: selections are made for fixed sizes."""

    def refuse(name: str, *_: Any, **__: Any) -> None:
        raise ConfigError(
            f"engine.{name}", "must not be called with a gear section", None, "start again"
        )

    for name in ("set_train_batch_size", "set_train_micro_batch_size"):
        setattr(engine, name, partial(refuse, name))


def _sizes_of(engine: Any) -> tuple[RankCoordinates, BatchInfo]:
    """Return this rank's place in an engine's grid, and the sizes of the engine's batches."""
    place = engine_place.place_of(engine)
    micro = int(engine.train_micro_batch_size_per_gpu())
    return place, BatchInfo.at(place, micro, deepspeed_compat.accumulation_of(engine))


def _check_shared(
    engine: Any, replay: ReplayBase, checkpoint: engine_checkpoint.Checkpoint
) -> None:
    """Raise a ConfigError if a shared Replay does not suit an engine, or a checkpoint is given."""
    if checkpoint is not None:
        remedy = "the engine that the Replay was made for loads and saves its position"
        raise ConfigError(
            "checkpoint", "must not be given with a shared replay", str(checkpoint), remedy
        )
    place, info = _sizes_of(engine)
    if isinstance(replay, Replay) and replay.config.pack is not None:
        info = replay.batch_info  # packed batches have the sizes of the config
        packed_steps.check_gradients(engine, replay.config.pack)
        divisor = gradient_divisor(engine)
        if divisor != replay.gradient_divisor:
            rule = f"must belong to an engine that divides gradients as this one does ({divisor:g})"
            remedy = "give both engines the same ZeRO stage, or the engine a Replay of its own"
            raise ConfigError("replay", rule, replay.gradient_divisor, remedy)
    if (place, info) != (replay.topology.place, replay.batch_info):
        rule = f"must belong to an engine like this one ({place}; {info})"
        given = f"{replay.topology.place}; {replay.batch_info}"
        raise ConfigError("replay", rule, given, "give the engine a Replay of its own")


def _log_sizes(engine: Any, replay: ReplayBase) -> None:
    """Write the batch sizes to gear's own log: DeepSpeed's log shows warnings only."""
    if not LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
    if replay.topology.rank == 0:
        counted = engine.train_batch_size()
        wanted = replay.batch_info.global_batch
        packs = replay.config.pack
        wrong = (
            "" if counted == wanted or packs is not None else f" (train_batch_size is {counted})"
        )
        LOG.info("gear: %s%s", replay.batch_info, wrong)
        for note in [] if packs is None else packed_steps.check_gradients(engine, packs):
            LOG.info("gear: %s", note)


@dataclass
class _StepReports:
    """Reports of a replay after each optimizer step of its engine.

    Attributes:
        engine: The engine.
        replay: The replay that was made for it.
        writes: Whether metrics go to DeepSpeed's monitor.
        every: Steps between two lines of progress in the log; None or 0: no lines.
        logged: Progress at the last line.
    """

    engine: Any
    replay: ReplayBase
    writes: bool
    every: int | None
    logged: Progress | None = None

    def step(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the engine's step; report if it was an optimizer step."""
        engine = self.engine
        number = engine.global_steps
        result = original(*arguments, **options)
        if engine.global_steps == number:
            return result
        if self.writes:
            metrics = self.replay.take_metrics()
            events = [
                (f"Train/Gear/{name}", value, engine.global_samples)
                for name, value in metrics.items()
            ]
            if engine.global_rank == 0:
                engine.monitor.write_events(events)
        if self.every and (self.logged is None or engine.global_steps % self.every == 0):
            progress = self.replay.total_progress()
            if self.logged is not None:
                LOG.info("gear: step %d: %s", engine.global_steps, progress - self.logged)
            self.logged = progress
        return result


def _report_steps(engine: Any, replay: ReplayBase) -> None:
    """Report metrics and progress after each optimizer step.

    Metrics go to DeepSpeed's monitor, where one is enabled; the first rank logs the progress every
    `steps_per_print` steps, from the first one on.
    """
    writes = replay.config.metrics and getattr(getattr(engine, "monitor", None), "enabled", False)
    every = engine.steps_per_print() if replay.topology.rank == 0 else None
    if writes or every:
        name = "train_batch" if engine_place.is_pipeline(engine) else "step"
        deepspeed_compat.wrap(engine, name, _StepReports(engine, replay, writes, every).step)
