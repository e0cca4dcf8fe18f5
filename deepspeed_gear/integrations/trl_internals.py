"""TRL's private names, and the versions that have them.

No other module uses names of TRL that its documentation does not have.
tests/unit/integrations/test_trl_internals.py compares them with the installed version.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import check_version

#: Versions of TRL whose losses are those of grpo_losses.py; the extra `trl` has the same.
VERSIONS = ">=1.16,<1.17"
REMEDY = "pip install 'deepspeed_gear[trl]'"
#: Methods of GRPOTrainer that are called or overridden, with the parameters that they need.
METHODS = {
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "_generate_and_score_completions": ("inputs",),
}
#: Attributes that its constructor sets.
ATTRIBUTES = ("_metrics", "_step", "aux_loss_enabled")
#: Fields of a forward pass with the fused head that it gives its models.
OUTPUTS = ("log_probs", "entropy")
#: Tensors of a scored generation batch that are there in some configurations only, by the column
#: that they become.
SCORED = {
    "old_logp": "old_per_token_logps",
    "ref_logp": "ref_per_token_logps",
    "is_ratio": "importance_sampling_ratio",
    "sampling_logp": "sampling_per_token_logps",
}
#: Its other tensors.
READ = (
    "prompt_ids prompt_mask completion_ids completion_mask tool_mask advantages num_items_in_batch"
).split()


def check_names(trainer: type, output: type) -> None:
    """Raise a ConfigError, with the missing name, unless TRL's classes have what is used.

    Args:
        trainer: GRPOTrainer.
        output: The class of a forward pass with the fused head.
    """
    for name, parameters in METHODS.items():
        method = getattr(trainer, name, None)
        if method is None:
            _refuse(f"GRPOTrainer.{name}")
        known = inspect.signature(method).parameters
        for parameter in parameters:
            if parameter not in known:
                _refuse(f"the parameter {parameter} of GRPOTrainer.{name}")
    for name in OUTPUTS:
        if not hasattr(output, name):
            _refuse(f"{output.__name__}.{name}")


def check_attributes(trainer: object) -> None:
    """Raise a ConfigError, with the missing name, unless a trainer has what is used."""
    for name in ATTRIBUTES:
        if not hasattr(trainer, name):
            _refuse(f"the attribute GRPOTrainer.{name}")


def _refuse(missing: str) -> NoReturn:
    version = importlib.metadata.version("trl")
    raise ConfigError("trl", f"must be a version {VERSIONS} with {missing}", version, REMEDY)


with ConfigError.on("trl", f"must be installed, {VERSIONS}", ImportError, remedy=REMEDY):
    check_version("trl", VERSIONS, REMEDY)
    from datasets import Dataset
    from trl import GRPOTrainer
    from trl.trainer.utils import FusedCausalLMOutput
check_names(GRPOTrainer, FusedCausalLMOutput)


class GRPOTrainerParts(GRPOTrainer):
    """A GRPOTrainer whose private parts have public names."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        check_attributes(self)

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss has the load-balancing loss of a model with experts."""
        return bool(self.aux_loss_enabled)

    def generate_and_score(self, inputs: Any) -> Mapping[str, Tensor]:
        """Generate and score this rank's responses to its prompts, as tensors with padding."""
        scored: Mapping[str, Tensor] = self._generate_and_score_completions(inputs)
        return scored

    def log_means(self, values: Mapping[str, float]) -> None:
        """Log values of this step; TRL averages them between two entries of its log."""
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    def count_step(self) -> None:
        """Count a training step, as TRL's own does."""
        self._step += 1

    def log_probs_and_entropy(self, engine: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of each place of a micro batch. [1, N], float32."""
        output = self._scored(engine, micro)
        return output.log_probs.float(), output.entropy.float()

    def log_probs(self, engine: Any, micro: MicroBatch) -> Tensor:
        """Return the log-probability of each place, also of a reference model. [1, N], float32."""
        logp: Tensor = self._scored(engine, micro).log_probs.float()
        return logp

    def _scored(self, engine: Any, micro: MicroBatch) -> Any:
        """Run the forward pass of TRL's own steps: temperature, float32 head, soft capping."""
        assert micro.targets is not None  # the table has a column of tokens
        labels = micro.targets.masked_fill(~micro.loss_mask, -100)
        with self.accelerator.autocast():
            return engine(**micro.model_inputs(engine), shift_labels=labels, fused_lm_head=True)


def placeholder_prompts() -> Any:
    """Return a data set of one empty prompt, for a trainer that has its prompts from elsewhere."""
    return Dataset.from_dict({"prompt": [""]})


def scored_columns(scored: Mapping[str, Tensor], names: Iterable[str]) -> list[dict[str, Tensor]]:
    """Return the columns of each response of a scored generation batch, without padding.

    Args:
        scored: Tensors [B, T] by TRL's names, or [B].
        names: Columns of `SCORED` to return, as well.
    Returns:
        For each response: "tokens", "loss_mask" and the named columns [T], "score" [].
    Raises:
        ConfigError: A tensor has no packed form, such as images.
    """
    unknown = sorted(set(scored) - {*READ, *SCORED.values()})
    if unknown:
        rule = "must be text alone: these tensors have no packed form"
        remedy = "leave images and videos out of the data set, or train with TRL's GRPOTrainer"
        raise ConfigError("responses", rule, ", ".join(unknown), remedy)
    scored = {name: values.cpu() for name, values in scored.items()}
    prompts = scored["prompt_mask"].bool()
    mask = scored["completion_mask"].bool()
    old = scored.get(SCORED["old_logp"], torch.tensor(math.nan))
    absent = {"old_logp": old, "sampling_logp": old, "is_ratio": torch.tensor(1.0)}
    # Of completions first; nothing is trained or known at the tokens of a prompt.
    values: dict[str, Tensor] = {"loss_mask": mask & scored.get("tool_mask", mask).bool()}
    for name in names:
        own = scored[SCORED[name]] if SCORED[name] in scored else absent[name]
        values[name] = own.expand(mask.shape)
    columns = {
        name: torch.cat([value.new_zeros(prompts.shape), value], 1)
        for name, value in values.items()
    }
    columns["tokens"] = torch.cat([scored["prompt_ids"], scored["completion_ids"]], 1).int()
    is_there = torch.cat([prompts, mask], 1)
    return [
        {name: column[row][kept] for name, column in columns.items()}
        | {"score": scored["advantages"][row]}
        for row, kept in enumerate(is_there)
    ]
