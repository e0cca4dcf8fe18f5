"""A rollout worker: leases prompts, generates groups of responses with a model of transformers,
commits them.

    python examples/rollout_worker.py runs/async/ds_config.json --task grpo_model

is one process of the node, beside the ranks, and ends with them; start as many as `writers` admits,
and end them as you like. `examples/grpo_async.py` starts its own. On another machine, with a copy
of the config and of the gateway's token, add

    --gateway grpc+tls://NODE:4711 --token-file token

Batches are continuous: in every step each running response gets one token, those that have ended
leave, and prompts that are leased then take their places. So leases end in any order. Weights are
those of the policy board, and may change between two steps. A token is stored with its
log-probability under the distribution that it was drawn from, and with the version of the weights
that were there: the number of the board, which is one more than the rollout batches that they have
trained.

`Generation` runs the model in this process; `HttpGeneration` of examples/http_generation.py has the
same methods, and sends prompts to a server of vLLM or SGLang.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deepspeed_gear import (
    Lease,
    LeaseExpiredError,
    LostNodeError,
    PolicyBoard,
    RemotePolicyBoard,
    RemoteRolloutWorker,
    RolloutWorker,
    StoreError,
)

IDLE_S = 0.01  # between looks for weights, where nothing is generated
LEASE_S = 1.0  # longest wait for a lease, where nothing is generated
Reward = Callable[[Mapping[str, Any], Sequence[int]], float]


@dataclass(eq=False)
class Response:
    """A response to a prompt.

    Attributes:
        key: Of its group.
        tokens: Its own tokens, without the prompt's; with the end.
        logp: Log-probability of each of them under the distribution that it was drawn from.
        versions: Version of the weights of each of them.
        has_ended: Whether its last token is the end; False: it has `max_tokens`.
    """

    key: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    has_ended: bool = False


class Generator(Protocol):
    """What a worker generates with."""

    version: int  # of the weights
    free: int  # responses that can begin

    def refresh(self) -> None: ...
    def start(self, key: int, prompt: Sequence[int], size: int) -> None: ...
    def step(self) -> list[Response]: ...
    def cancel(self, key: int) -> None: ...


class Generation:
    """Continuous batching with a model of transformers whose layers have full attention.

    The batch is padded on the left, so that the newest tokens of all rows lie in one column of the
    cache: rows leave by an index, and join by padding either side to the longer one.

    Args:
        places: Most responses at once.
        max_tokens: Of a response.
        temperature: 0: the most likely token.
        step_s: Added to each step: the time that a larger model would take.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        places: int,
        max_tokens: int,
        board: PolicyBoard | RemotePolicyBoard | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        step_s: float = 0.0,
    ) -> None:
        self._model = model.eval()
        self._board = board
        self._places = places
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._step_s = step_s
        self._device = model.device
        self._ends = np.atleast_1d(model.config.eos_token_id).tolist()  # one or several
        self._words = torch.Generator(self._device).manual_seed(seed)
        names = inspect.signature(model.forward).parameters
        self._cache_name = (
            "cache" if "cache" in names else "past_key_values"
        )  # before transformers 5.24
        self._new: list[tuple[list[int], list[Response]]] = []  # prompts that have no row yet
        self._rows: list[Response] = []
        self._cache: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer. [n, H, W, D]
        self._mask = torch.empty(
            0, 0, dtype=torch.int64, device=self._device
        )  # tokens of the cache. [n, W]
        self.version = 0

    @property
    def free(self) -> int:
        return self._places - len(self._rows) - sum(len(rows) for _, rows in self._new)

    def refresh(self) -> None:
        """Take the newest weights. Keys and values of earlier tokens stay: they are what was
        sampled with.
        """
        if self._board is not None:
            self.version = self._board.load_into(self._model)

    def start(self, key: int, prompt: Sequence[int], size: int) -> None:
        """Begin responses to a prompt with the next step."""
        self._new.append((list(prompt), [Response(key) for _ in range(size)]))

    def cancel(self, key: int) -> None:
        """Drop the responses of a key."""
        self._new = [(prompt, rows) for prompt, rows in self._new if rows[0].key != key]
        self._keep([row.key != key for row in self._rows])

    @torch.no_grad()
    def step(self) -> list[Response]:
        """Draw the next token of every response; return those that end with it."""
        self.refresh()
        logits = ([self._decode()] if self._rows else []) + ([self._prefill()] if self._new else [])
        if not logits:
            return []
        time.sleep(self._step_s)
        logp = torch.log_softmax(torch.cat(logits).float() / (self._temperature or 1.0), dim=1)
        drawn = logp.argmax(1, keepdim=True)
        if self._temperature > 0:
            drawn = torch.multinomial(logp.exp(), 1, generator=self._words)
        own = logp.gather(1, drawn)[:, 0].tolist()
        for row, token, value in zip(self._rows, drawn[:, 0].tolist(), own, strict=True):
            row.tokens.append(token)
            row.logp.append(value)
            row.versions.append(self.version)
            row.has_ended = token in self._ends
        goes_on = [not row.has_ended and len(row.tokens) < self._max_tokens for row in self._rows]
        ended = [row for row, on in zip(self._rows, goes_on, strict=True) if not on]
        self._keep(goes_on)
        return ended

    def _decode(self) -> Tensor:
        """Feed the newest token of each row; return the logits of the next ones. [n, V]."""
        newest = torch.tensor([[row.tokens[-1]] for row in self._rows], device=self._device)
        places = self._mask.sum(1, keepdim=True)
        self._mask = F.pad(self._mask, (0, 1), value=1)
        logits, self._cache = self._forward(newest, self._mask, places, DynamicCache(self._cache))
        return logits

    def _prefill(self) -> Tensor:
        """Feed the new prompts, once each, and join their rows to the batch; return their logits.
        [n, V].
        """
        longest = max(len(prompt) for prompt, _ in self._new)
        pads = [longest - len(prompt) for prompt, _ in self._new]
        ids = torch.tensor(
            [[0] * pad + prompt for pad, (prompt, _) in zip(pads, self._new, strict=True)]
        )
        mask = torch.arange(longest) >= torch.tensor(pads)[:, None]
        ids = ids.to(self._device)
        mask = mask.long().to(self._device)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits, cache = self._forward(ids, mask, places, DynamicCache())

        copies = torch.tensor([len(rows) for _, rows in self._new], device=self._device)
        spread = torch.repeat_interleave(copies)  # of [2, 1]: [0, 0, 1]
        mask = mask[spread]
        cache = [(keys[spread], values[spread]) for keys, values in cache]
        if self._rows:
            mask = _joined(self._mask, mask, dim=1)
            pairs = zip(self._cache, cache, strict=True)
            cache = [
                (_joined(k, key, dim=2), _joined(v, value, dim=2)) for (k, v), (key, value) in pairs
            ]
        self._mask = mask
        self._cache = cache
        self._rows += [row for _, rows in self._new for row in rows]
        self._new = []
        return logits[spread]

    def _forward(
        self, ids: Tensor, mask: Tensor, places: Tensor, cache: DynamicCache
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the logits after the last column, and the cache."""
        places = {"attention_mask": mask, "position_ids": places}
        result = self._model(input_ids=ids, use_cache=True, **places, **{self._cache_name: cache})
        return result.logits[:, -1], [(layer.keys, layer.values) for layer in cache.layers]

    def _keep(self, wanted: list[bool]) -> None:
        """Keep some rows, and the columns that they use."""
        if all(wanted):
            return
        index = torch.tensor(wanted, device=self._device).nonzero()[:, 0]
        self._rows = [row for row, keep in zip(self._rows, wanted, strict=True) if keep]
        mask = self._mask[index]
        first = (
            int(mask.any(0).long().argmax()) if self._rows else mask.size(1)
        )  # column with a token
        self._mask = mask[:, first:]
        self._cache = [
            (keys[index, :, first:], values[index, :, first:]) for keys, values in self._cache
        ]


def _joined(rows: Tensor, others: Tensor, dim: int) -> Tensor:
    """Concatenate rows; the shorter ones get zeros on the left of a dimension."""
    width = max(rows.size(dim), others.size(dim))
    after = [0, 0] * (rows.dim() - 1 - dim)
    return torch.cat([F.pad(one, (*after, width - one.size(dim), 0)) for one in (rows, others)])


@dataclass(eq=False)
class Group:
    """A lease, and the responses to its prompt that have ended. `key` is its number in
    this worker.
    """

    key: int
    lease: Lease
    has_begun: bool = False
    done: list[Response] = field(default_factory=list)


class Worker:
    """Keeps a generator full of leased prompts, and commits each group with its last response.

    Args:
        size: Responses of a group.
        reward: Reward of a response: of the prompt's columns, and its tokens.
        max_prompt: Tokens; longer prompts are dropped.
        drop_truncated: Drop a prompt of which a response has no end; False: it gets its reward.
        heartbeat_s: Between heartbeats of a lease, less than `prompts.lease_s`.
    """

    def __init__(
        self,
        worker: RolloutWorker | RemoteRolloutWorker,
        generator: Generator,
        reward: Reward,
        *,
        size: int,
        max_prompt: int,
        drop_truncated: bool = False,
        heartbeat_s: float = 30.0,
    ) -> None:
        self._worker = worker
        self._generator = generator
        self._reward = reward
        self._size = size
        self._max_prompt = max_prompt
        self._drops = drop_truncated
        self._heartbeat_s = heartbeat_s
        self._groups: dict[int, Group] = {}
        self._keys = count()
        self._heard = time.monotonic()
        self.num_groups = 0

    def turn(self) -> None:
        """Lease what there is room for, generate a token of each response, commit the groups that
        are whole.

        Raises:
            StoreError: The ranks have ended.
        """
        waiting = [group for group in self._groups.values() if not group.has_begun]
        room = self._generator.free // self._size - len(waiting)
        waiting += self._lease(room) if room > 0 else []
        self._generator.refresh()
        for group in waiting:
            if (
                group.lease.version < self._generator.version
            ):  # weights number v + 1 have trained v batches
                group.has_begun = True
                self._generator.start(group.key, group.lease.prompt["tokens"].tolist(), self._size)
        for response in self._generator.step():
            self._end(response)
        if not any(group.has_begun for group in self._groups.values()):
            time.sleep(IDLE_S)
        self._heartbeat()

    def _lease(self, room: int) -> list[Group]:
        groups = []
        for lease in self._worker.lease(room, timeout_s=0.0 if self._groups else LEASE_S):
            if len(lease.prompt["tokens"]) > self._max_prompt:
                lease.fail("prompt too long", retry=False)
            else:
                groups.append(Group(next(self._keys), lease))
        self._groups |= {group.key: group for group in groups}
        return groups

    def _end(self, response: Response) -> None:
        """Commit or drop the group of a response that has ended, if it is there still."""
        if (group := self._groups.get(response.key)) is None:
            return
        group.done.append(response)
        try:
            if self._drops and not response.has_ended:
                self._leave(group)
                group.lease.fail("too long", retry=False)
            elif len(group.done) == self._size:
                self._leave(group)
                group.lease.commit([self._trajectory(group, one) for one in group.done])
                self.num_groups += 1
        except LeaseExpiredError:
            pass  # too slow: another worker has the prompt

    def _leave(self, group: Group) -> None:
        del self._groups[group.key]
        self._generator.cancel(group.key)

    def _trajectory(self, group: Group, response: Response) -> dict[str, Any]:
        """Return the columns of a response: each value lies at its token, zeros at those of the
        prompt.
        """
        prompt = group.lease.prompt["tokens"]
        before = np.zeros(len(prompt))
        return {
            "tokens": np.append(prompt, response.tokens),
            "loss_mask": np.append(before, np.ones(len(response.tokens))) > 0,
            "logp": np.append(before, response.logp).astype(np.float32),
            "version": np.append(before, response.versions).astype(np.int32),
            "reward": np.float32(self._reward(group.lease.prompt, response.tokens)),
        }

    def _heartbeat(self) -> None:
        if (now := time.monotonic()) - self._heard < self._heartbeat_s:
            return
        self._heard = now
        for group in list(self._groups.values()):
            try:
                group.lease.heartbeat()
            except LeaseExpiredError:  # this process was stopped for longer than `lease_s`
                self._leave(group)


def connect(
    args: argparse.Namespace,
) -> tuple[RolloutWorker | RemoteRolloutWorker, PolicyBoard | RemotePolicyBoard]:
    """Return the leases and the weights of the run, on this node or through a gateway."""
    if args.gateway is None:
        return RolloutWorker.attach(args.config), PolicyBoard.attach(args.config)
    options = {"token": args.token_file, "ca": args.ca}
    leases = RemoteRolloutWorker.connect(args.gateway, **options)
    return leases, RemotePolicyBoard.connect(args.gateway, **options)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("config", type=Path, help="the ds_config of the ranks")
    parser.add_argument("--gateway", metavar="URL", help="of `gear serve`, on another machine")
    parser.add_argument("--token-file", type=Path, help="with the token of the gateway")
    parser.add_argument("--ca", type=Path, help="certificate of the gateway's authority")
    parser.add_argument(
        "--task", default="grpo_model", help="module: policy(), reward(), MOST_RESPONSE"
    )
    parser.add_argument("--places", type=int, default=256, help="responses at once")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument(
        "--drop-truncated", action="store_true", help="drop groups with an endless response"
    )
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds added to a batch of responses"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the samples; another one for each worker"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = importlib.import_module(args.task)
    tables = json.loads(args.config.read_text())["gear"]["tables"]
    table = next(table for table in tables.values() if "prompts" in table)
    most = task.MOST_RESPONSE
    size = table["group"]["size"]
    model = task.policy()
    leases, board = connect(args)
    sampling = {"temperature": args.temperature, "seed": args.seed, "step_s": args.latency / most}
    generation = Generation(model, board=board, places=args.places, max_tokens=most, **sampling)
    options = {
        "size": size,
        "max_prompt": table["max_length"] - most,
        "drop_truncated": args.drop_truncated,
    }
    options["heartbeat_s"] = min(30.0, table["prompts"].get("lease_s", 600.0) / 4)
    with board, leases:
        worker = Worker(leases, generation, task.reward, **options)
        try:
            while True:
                worker.turn()
        except (StoreError, LostNodeError) as error:
            print(f"{worker.num_groups} groups; {error}", flush=True)


if __name__ == "__main__":
    main()
