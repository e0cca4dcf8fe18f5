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

# Columns of a trajectory's steps, and a mask of the steps of the response.
Response = tuple[dict[str, np.ndarray], np.ndarray]
Rewards = Callable[[Mapping[str, Any], Sequence[np.ndarray]], Sequence[Mapping[str, Any]]]


class GearRollout(RolloutEngine):
    """Leases prompts, generates their groups with another RolloutEngine, and commits them.

    `GearRollout(HybridEngineRollout(engine, tokenizer), engine.gear.rollout_worker(), rewards,
    pad=0)`. `generate` is the generator's, so programs written for DeepSpeed's interface need no
    change.

    Args:
        generator: Engine that generates the responses.
        worker: Worker that leases prompts and commits groups.
        rewards: Function of the prompt's columns and the token ids of each response, [n]; returns
            the other columns of each trajectory of the group: `lambda prompt, responses:
            [{"reward": 1.0} for _ in responses]`.
        pad: Token id of padding, which the attention mask leaves out.
        prompt: Column of the prompt's token ids in the data set of prompts.
        logp: Column for the log-probabilities of the response's tokens under `generator.engine`, at
            the temperature and without top-p and top-k; 0 for the prompt. None: no such column.
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
                f"the schema of table {spec.name}",
                "must have a column of the role token",
                remedy='give a column of token ids "role": "token"',
            )
        self._tokens = tokens.name
        self._mask = None if mask is None else mask.name

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate with the generator; nothing is added to the table."""
        return self.generator.generate(request, sampling)

    def sync_weights(self, step: int) -> None:
        """Pass new weights to the generator."""
        self.generator.sync_weights(step)

    def shutdown(self) -> None:
        """Return the leases, and release the generator."""
        self.worker.close()
        self.generator.shutdown()

    def collect(self, count: int, sampling: SamplingConfig, timeout_s: float = 60.0) -> int:
        """Lease up to `count` prompts, generate their groups and commit them.

        Each rank generates for `count` prompts, even if it leases fewer: ranks with divided
        parameters (ZeRO-3) must run the same forward passes.

        Returns:
            Number of leased prompts.
        Raises:
            ConfigError: `sampling.n_samples_per_prompt` is not the size of a group.
            DataError, StoreError: As `Lease.commit`; the remaining leases are failed.
        """
        if sampling.n_samples_per_prompt != self._size:
            rule = f"must be group.size = {self._size}: a lease commits a whole group"
            raise ConfigError(
                "sampling.n_samples_per_prompt",
                rule,
                sampling.n_samples_per_prompt,
                f"set it to {self._size}",
            )
        leases = self.worker.lease(arguments.count("count", count), timeout_s)
        num_committed = 0
        try:
            prompts = [
                torch.as_tensor(np.asarray(lease.prompt[self._prompt], np.int64))
                for lease in leases
            ]
            batch = self.generator.generate(self._request(prompts, count), sampling)
            # All groups at once, also those of padding: every rank runs this forward pass.
            groups = list(self._groups(batch, sampling))
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
        """Iterate over the groups of a generated batch, without padding."""
        is_token = batch.attention_mask.bool()
        at = torch.arange(batch.seq_len, device=batch.input_ids.device)
        is_response = at >= batch.response_start_idx[:, None]
        last = (is_token * at).amax(1, keepdim=True)
        # A padding id before the last token of a response was generated, so it is a token.
        is_token |= is_response & (at < last)
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
        """Return prompts padded on the left, and prompts of one token up to `count`. [count, T]."""
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
        """Return the log-probability of each token after the first, and 0 for the first.

        Args:
            ids: Token ids. [B, T].
            mask: Which are tokens, not padding. [B, T].
            temperature: Temperature of generation.
        Returns:
            [B, T], float32.
        """
        model = self.generator.engine.module
        positions = (mask.cumsum(-1) - 1).clamp(0)  # padding on the left has position 0
        logits = model(
            input_ids=ids, use_cache=False, position_ids=positions, attention_mask=mask.long()
        ).logits
        # The logits at step t predict the token at t + 1.
        scaled = logits[:, :-1].float().transpose(1, 2) / max(temperature, 1e-8)
        losses = nn.functional.cross_entropy(scaled, ids[:, 1:], reduction="none")
        return nn.functional.pad(-losses, (1, 0))
