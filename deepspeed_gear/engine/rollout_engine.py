"""GearRollout: a generator with DeepSpeed's RolloutEngine interface as a rollout worker."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.rollout import RolloutBatch, RolloutEngine, RolloutRequest, SamplingConfig
from torch import nn

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import ConfigError, GearError, LeaseExpiredError
from deepspeed_gear.writer.rollout_worker import RolloutWorker

Response = tuple[
    dict[str, np.ndarray], np.ndarray
]  # columns of steps, and which are of the response
Rewards = Callable[[Mapping[str, Any], Sequence[np.ndarray]], Sequence[Mapping[str, Any]]]


class GearRollout(RolloutEngine):
    """Leases prompts, generates their groups with another RolloutEngine, and commits them.

    `GearRollout(HybridEngineRollout(engine, tokenizer), engine.gear.rollout_worker(), rewards,
    pad=0)`. `generate` is that of the generator, so a program of DeepSpeed's interface goes on as
    it is.

    Args:
        rewards: Returns the other columns of a group's trajectories, given the prompt's columns and
            the token ids of each response, [n]: `lambda prompt, responses: [{"reward": 1.0} for _
            in responses]`.
        pad: Token id of padding, which the attention mask leaves out.
        prompt: Column of the prompt's token ids in the data set of prompts.
        logp: Column for the log-probabilities of the response's tokens under `generator.engine`, at
            the temperature and without top-p and top-k; 0 for the prompt. None: there is none.
    """

    name = "gear"

    def __init__(
        self,
        generator: RolloutEngine,
        worker: RolloutWorker,
        rewards: Rewards,
        pad: int = 0,
        prompt: str = "tokens",
        logp: str | None = "logp",
    ) -> None:
        self.generator = generator
        self.worker = worker
        self._rewards = rewards
        self._pad = pad
        self._prompt = prompt
        self._logp = logp
        spec = worker.spec
        schema = worker.spec.schema
        assert spec.group is not None
        self._size = spec.group.size
        mask = schema.role("loss_mask")
        tokens = schema.role("token")
        if tokens is None:
            raise ConfigError(
                f"the schema of table {spec.name}", "must have a column of the role token"
            )
        self._tokens = tokens.name
        self._mask = None if mask is None else mask.name

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate with the generator; nothing is added to the table."""
        return self.generator.generate(request, sampling)

    def sync_weights(self, step: int) -> None:
        self.generator.sync_weights(step)

    def shutdown(self) -> None:
        """Return the leases, and release the generator."""
        self.worker.close()
        self.generator.shutdown()

    def collect(self, count: int, sampling: SamplingConfig, timeout_s: float = 60.0) -> int:
        """Lease up to `count` prompts, generate their groups and commit them; return how many there
        were.

        Each rank generates `count` prompts, also where it leases fewer, so ranks with divided
        parameters (ZeRO-3) go on together. `sampling.n_samples_per_prompt` must be the size of a
        group.

        Raises:
            ConfigError: It is not.
            DataError, StoreError: As `Lease.commit`; the leases that are left return.
        """
        if sampling.n_samples_per_prompt != self._size:
            rule = f"must be group.size = {self._size}: a lease commits a whole group"
            raise ConfigError("sampling.n_samples_per_prompt", rule, sampling.n_samples_per_prompt)
        leases = self.worker.lease(arguments.count("count", count), timeout_s)
        num_committed = 0
        try:
            prompts = [
                torch.as_tensor(np.asarray(lease.prompt[self._prompt], np.int64))
                for lease in leases
            ]
            batch = self.generator.generate(self._request(prompts, count), sampling)
            groups = list(self._groups(batch, sampling))  # its forward pass is one of every rank
            for lease, group in zip(leases, groups, strict=False):
                others = self._rewards(
                    lease.prompt, [one[self._tokens][mask] for one, mask in group]
                )
                with contextlib.suppress(LeaseExpiredError):
                    lease.commit(
                        [{**one, **more} for (one, _), more in zip(group, others, strict=True)]
                    )
                num_committed += 1
        except BaseException:
            for lease in leases[num_committed:]:
                with contextlib.suppress(GearError):
                    lease.fail("generation failed")
            raise
        return len(leases)

    def _groups(self, batch: RolloutBatch, sampling: SamplingConfig) -> Iterator[list[Response]]:
        is_token = batch.attention_mask.bool()
        at = torch.arange(batch.seq_len, device=batch.input_ids.device)
        is_response = at >= batch.response_start_idx[:, None]
        last = (is_token * at).amax(1, keepdim=True)
        is_token |= is_response & (at < last)  # padding ids that were generated
        values = {self._tokens: batch.input_ids}
        if self._mask is not None:
            values[self._mask] = is_response
        if self._logp is not None:
            logp = self._log_probabilities(batch.input_ids, is_token, sampling.temperature)
            values[self._logp] = logp * is_response
        for first in range(0, batch.batch_size, self._size):
            group = []
            for row in range(first, first + self._size):
                mask = is_token[row]
                columns = {name: value[row][mask].cpu().numpy() for name, value in values.items()}
                group.append((columns, is_response[row][mask].cpu().numpy()))
            yield group

    def _request(self, prompts: Sequence[torch.Tensor], count: int) -> RolloutRequest:
        """Return prompts padded on the left, and as many of one token as there are too few. ->
        [count, T].
        """
        prompts = [*prompts, *[torch.full((1,), self._pad)] * (count - len(prompts))]
        pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        ids = pad(prompts, padding_value=self._pad)
        mask = pad([torch.ones(len(prompt), dtype=torch.int64) for prompt in prompts])
        device = next(self.generator.engine.module.parameters()).device
        return RolloutRequest(ids.to(device), mask.to(device))

    @torch.no_grad()
    def _log_probabilities(
        self, ids: torch.Tensor, mask: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Return the log-probability of each token after the first. [B, T], [B, T] -> [B, T],
        float32.
        """
        places = {"position_ids": (mask.cumsum(-1) - 1).clamp(0), "attention_mask": mask.long()}
        logits = self.generator.engine.module(input_ids=ids, use_cache=False, **places).logits[
            :, :-1
        ]
        scaled = logits.float().transpose(1, 2) / max(temperature, 1e-8)
        return nn.functional.pad(
            -nn.functional.cross_entropy(scaled, ids[:, 1:], reduction="none"), (1, 0)
        )
