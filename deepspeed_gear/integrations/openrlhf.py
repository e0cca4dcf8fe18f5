"""OpenRLHF's policy with a table in the place of its replay buffer (docs/how-to/openrlhf.md).

OpenRLHF generates, scores, computes advantages, and trains with its own loss. Its experience goes
into a table that all ranks share, and its micro batches are packs that are planned for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.engine.attach import disable, enable
from deepspeed_gear.errors import ConfigError, DataError, StoreError
from deepspeed_gear.frameworks.deepspeed_compat import wrap
from deepspeed_gear.integrations.framework_options import check_version
from deepspeed_gear.integrations.openrlhf_options import (
    COUNT,
    LOGGED,
    action_columns,
    fill_ds_config,
    fill_section,
)
from deepspeed_gear.replay.packed.rollout import Rollout
from deepspeed_gear.replay.replay import Replay

#: Versions of OpenRLHF whose trainer reads its replay buffer as this one is read.
VERSIONS = ">=0.11,<0.12"
_REMEDY = "pip install 'openrlhf>=0.11,<0.12'"
_EPISODE = ("rewards", "scores", "response_length", "truncated", "total_length")


with ConfigError.on("openrlhf", f"must be installed, {VERSIONS}", ImportError, remedy=_REMEDY):
    check_version("openrlhf", VERSIONS, _REMEDY)
    from openrlhf.trainer.ppo_utils.experience import (
        Experience,
        remove_padding_in_sequences,
        split_experience_batch,
    )


class GearReplayBuffer:
    """The replay buffer of an OpenRLHF policy, over the table of its engine's replay.

    `ActorPPOTrainer.replay_buffer` has this interface; its attributes are those that the trainer
    reads. `clear` keeps what the table's `max_times_sampled` lets be sampled again.

    Args:
        replay: The replay, of a section that `fill_section` has completed.
        columns: From `action_columns`.

    Attributes:
        sample_batch_size: 1: a micro batch is one entry.
        dynamic_batch_num_tokens: By micro batch, loss tokens of its optimizer step, of all ranks.
        dynamic_global_batch_size: Trajectories with loss tokens of its optimizer step.
        dynamic_sample_loss_scale: Weight of a loss term that is no mean over tokens.
        dynamic_optimizer_step: 1 where the optimizer steps after the micro batch, else 0.
    """

    def __init__(self, replay: Replay, columns: Mapping[str, str]) -> None:
        self._replay = replay
        self._columns = dict(columns)
        self.sample_batch_size = 1
        self._rollout: Rollout | None = None
        self._micros: Iterator[tuple[MicroBatch, int]] = iter(())
        self._left = 0  # micro batches of all epochs that were not read
        self._logged: list[str] = []
        self.dynamic_batch_num_tokens: list[float] = []
        self.dynamic_global_batch_size: list[float] = []
        self.dynamic_sample_loss_scale: list[float] = []
        self.dynamic_optimizer_step: list[int] = []

    def append(self, experience: Experience) -> None:
        """Add the trajectories of an experience to the table.

        Raises:
            DataError: It has images, no log-probabilities or advantages, or padding on the left.
            StoreError: A trajectory does not fit into the table.
        """
        experience.to_device(torch.device("cpu"))
        items = remove_padding_in_sequences(split_experience_batch(experience))
        trajectories = [self._trajectory(item) for item in items]
        for trajectory in trajectories:
            self._replay.add(trajectory)

    def setup_dynamic_batch(self, strategy: Any) -> None:
        """Select the next rollout batch and plan its packs; none if too few are stored. Collective.

        Args:
            strategy: OpenRLHF's; not read.
        """
        self.clear()
        dist.barrier()  # the experience of all ranks is in the table
        if not self._replay.can_sample():
            return
        self._rollout = rollout = self._replay.rollout()
        settings = self._replay.config.rollout
        assert settings is not None  # fill_section sets it
        counts = rollout.values(COUNT) > 0
        for number in range(len(rollout) // settings.epochs):
            step = rollout.step(number)
            num_micro = len(step)
            self.dynamic_batch_num_tokens += [float(step.loss_tokens)] * num_micro
            num_learning = float(counts[torch.from_numpy(step.index)].sum())
            self.dynamic_global_batch_size += [num_learning] * num_micro
            self.dynamic_optimizer_step += [0] * (num_micro - 1) + [1]
        self.dynamic_sample_loss_scale += [0.0] * len(self)
        self._left = len(self) * settings.epochs
        self._micros = self._read(rollout)

    def __len__(self) -> int:
        """Return the number of micro batches of an epoch, the same on every rank."""
        return len(self.dynamic_optimizer_step)

    def __getitem__(self, index: int) -> Experience:
        """Return the next micro batch; they are read in their order, epoch by epoch.

        Raises:
            StoreError: Another one than the next is asked for.
        """
        expected = -self._left % len(self) if len(self) else 0
        if not self._left or index != expected:
            rule = f"must be read in order, {expected} next, {self._left} are left"
            raise StoreError("replay buffer", rule, index, "leave shuffling to gear.sampler")
        self._left -= 1
        micro, num_trajectories = next(self._micros)
        self.dynamic_sample_loss_scale[index] = (
            micro.num_trajectories * dist.get_world_size() / num_trajectories
        )
        if micro.num_trajectories:
            return self._experience(micro)
        # Adds nothing to the loss, and as much to the means that are logged as one token does.
        self.dynamic_batch_num_tokens[index] = math.inf
        self.dynamic_global_batch_size[index] = math.inf
        return self._placeholder(micro)

    def collate_fn(self, batch: list[Experience]) -> Experience:
        """Return the micro batch that a data loader has taken."""
        return batch[0]

    def clear(self) -> None:
        """End the rollout batch. Trajectories that may be sampled again stay in the table."""
        if self._rollout is not None:
            if not self._left:
                next(self._micros, None)  # its last step counts as trained
            self._rollout.close()
        self._rollout = None
        self._micros = iter(())
        self._left = 0
        self.dynamic_batch_num_tokens.clear()
        self.dynamic_global_batch_size.clear()
        self.dynamic_sample_loss_scale.clear()
        self.dynamic_optimizer_step.clear()

    @staticmethod
    def _read(rollout: Rollout) -> Iterator[tuple[MicroBatch, int]]:
        """Yield the micro batches of all epochs, with the trajectories of their steps."""
        for step in rollout:
            for micro in step:
                yield micro, step.num_trajectories

    def _trajectory(self, item: Experience) -> dict[str, Any]:
        """Return the columns of an experience of one sample, without padding."""
        num_tokens = len(item.sequences)
        if any(getattr(item, "mm_train_inputs", None) or []):
            raise DataError("experience", "must be text alone", "images", "use OpenRLHF's buffer")
        if not item.attention_mask.all():
            rule = "must have no padding before its last token"
            raise DataError("experience.attention_mask", rule, None, "pad on the right")
        mask = item.action_mask.bool()
        if len(mask) != num_tokens - 1:
            rule = f"must have one action for each of the {num_tokens} tokens but the first"
            remedy = f"use a version {VERSIONS} of OpenRLHF"
            raise DataError("experience.action_mask", rule, len(mask), remedy)
        columns = {
            "tokens": item.sequences.int().numpy(),
            "loss_mask": _from_actions(mask).numpy(),
            COUNT: int(mask.sum()),
        }
        for name, field in self._columns.items():
            values = getattr(item, field)
            if values is None:
                remedy = "let OpenRLHF's experience maker compute it"
                raise DataError(f"experience.{field}", "must be there", None, remedy)
            columns[name] = _from_actions(values.float()).numpy()
        logged = {name: _number(name, value) for name, value in item.info.items()}
        for name in _EPISODE:
            value = getattr(item, name)
            if value is not None:
                logged[f"experience.{name}"] = _number(name, value)
        self._logged = list(logged)
        columns[LOGGED] = logged
        return columns

    def _experience(self, micro: MicroBatch) -> Experience:
        """Return a pack as a batch of right-padded samples."""
        row = micro.sequence[0]
        is_there = row >= 0
        row = row[is_there]
        step = micro.position_ids[0][is_there]
        width = int(micro.lengths.max())

        def padded(values: Tensor) -> Tensor:
            whole = values.new_zeros(micro.num_trajectories, width)
            whole[row, step] = values[0][is_there]
            return whole

        # Columns stand where their token is predicted: place i is that of action i.
        fields = {field: padded(micro[name])[:, :-1] for name, field in self._columns.items()}
        sequences = padded(micro["tokens"].long())
        mask = padded(torch.ones_like(micro["tokens"], dtype=torch.long))
        actions = padded(micro.loss_mask)[:, :-1]
        return _with_logged(
            Experience(
                sequences=sequences, attention_mask=mask, action_mask=actions, info={}, **fields
            ),
            micro.opaque(LOGGED),
        )

    def _placeholder(self, micro: MicroBatch) -> Experience:
        """Return a sample of two tokens for a pack without trajectories."""
        device = micro["tokens"].device
        zero = torch.zeros(1, 1, device=device)
        if not self._logged:
            rule = "must have got experience on this rank before its first rollout batch"
            raise StoreError("replay buffer", rule, None, "append to every rank, as OpenRLHF does")
        tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
        fields = dict.fromkeys(self._columns.values(), zero)
        experience = Experience(
            sequences=tokens,
            attention_mask=torch.ones_like(tokens),
            action_mask=torch.ones(1, 1, dtype=torch.bool, device=device),
            info={},
            **fields,
        )
        return _with_logged(experience, [dict.fromkeys(self._logged, 0.0)])


def policy_actor(base: Any, section: Mapping[str, Any]) -> Any:
    """Return OpenRLHF's actor of the policy, as a class of Ray, with a table for a replay buffer.

    Args:
        base: `openrlhf.trainer.ray.ppo_actor.PolicyModelActor`.
        section: The gear section: the table `rollouts`, with its capacity and `max_length`.
    """
    import ray

    plain: Any = base.__ray_metadata__.modified_class
    given = dict(section)

    class GearPolicyModelActor(plain):
        def init_model_from_pretrained(
            self, strategy: Any, *arguments: Any, **options: Any
        ) -> None:
            add_section(strategy, given)
            enable()
            try:
                super().init_model_from_pretrained(strategy, *arguments, **options)
            finally:
                disable()
            use_replay(self.trainer)

    return ray.remote(num_gpus=1)(GearPolicyModelActor)


def add_section(strategy: Any, section: Mapping[str, Any]) -> None:
    """Give the training engines that an OpenRLHF strategy makes a gear section.

    Args:
        strategy: A DeepspeedStrategy, before `prepare`.
        section: As of `policy_actor`.
    Raises:
        ConfigError: As `fill_section`.
    """
    whole = fill_section(section, strategy.args)

    def with_section(
        plain: Callable[..., dict[str, Any]], *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        return fill_ds_config(plain(*arguments, **options), whole)

    wrap(strategy, "get_ds_train_config", with_section)


def use_replay(trainer: Any) -> None:
    """Put the table of the policy's engine in the place of a trainer's replay buffer.

    Args:
        trainer: An ActorPPOTrainer whose engine has a replay.
    """
    replay = trainer.actor.model.gear
    trainer.replay_buffer = GearReplayBuffer(replay, action_columns(trainer.args))
    trainer.dataloader_pin_memory = False  # micro batches are on the device already


def _from_actions(values: Tensor) -> Tensor:
    """Return values of actions by token: the first token is none. [T - 1] to [T]."""
    return torch.cat([values.new_zeros(1), values])


def _number(name: str, value: Any) -> float | None:
    """Return a logged value as JSON has it; DataError: it is not one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        rule = "must be one number for each sample"
        raise DataError(f"experience.info[{name!r}]", rule, type(value).__name__, "leave it out")
    return float(value) if math.isfinite(value) else None


def _with_logged(experience: Experience, logged: list[dict[str, float | None]]) -> Experience:
    """Add what is logged of each sample to an experience."""
    device = experience.sequences.device
    for name in logged[0]:
        values = [math.nan if one.get(name) is None else one[name] for one in logged]
        if name.startswith("experience."):
            tensor = torch.tensor(values, device=device)
            setattr(experience, name.removeprefix("experience."), tensor)
        else:
            experience.info[name] = values
    return experience
