"""The offline sequence model that both systems feed: the example's, on whole trajectories."""

from __future__ import annotations

import torch
from decision_transformer import DecisionTransformer
from speed import work
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

COLUMNS = {"observation": (work.OBSERVATION,), "action": (work.ACTION,), "reward": ()}  # float32
BYTES = 4 * (work.OBSERVATION + work.ACTION + 1) * work.EPISODE  # of a trajectory
MODES = {
    "gear": ("a part on each node", "the whole on each node"),
    "reverb": (
        "one server for all",
        "a server on each node, its own",
        "a server on each node, all of them",
    ),
}
# A token is the mean of so many steps; width, layers, heads.
SIZES = {"data": (250, 8, 1, 1), "compute": (50, 64, 2, 4)}
_LARGEST = 2.0**-21  # of the step numbers, which rewards and first elements of observations are


class Trainer:
    """A model, data parallel over all ranks by gloo."""

    def __init__(self, num_steps: int, width: int, layers: int, heads: int) -> None:
        torch.manual_seed(0)
        self._steps = num_steps
        self._tokens = work.EPISODE // num_steps
        sizes = (work.OBSERVATION, work.ACTION, self._tokens, width, layers, heads)
        self._model = DistributedDataParallel(DecisionTransformer(*sizes))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self._scale = torch.tensor([_LARGEST] + [1.0] * (work.OBSERVATION - 1))

    def step(self, rows: dict[str, Tensor]) -> Tensor:
        """Train on whole trajectories [B, 1000, ...]; return the loss."""
        lead = (len(rows["reward"]), self._tokens, self._steps)
        action = rows["action"].view(*lead, -1).mean(2)
        later = rows["reward"].view(lead).mean(2).flip(1).cumsum(1).flip(1)
        tokens = {
            "observation": rows["observation"].view(*lead, -1).mean(2) * self._scale,
            "action": action,
            "return_to_go": later * (_LARGEST / self._tokens),
            "timestep": (torch.arange(self._tokens) * self._steps).expand(lead[:2]),
        }
        loss = (
            (self._model(tokens, torch.ones(lead[:2], dtype=torch.bool)) - action).square().mean()
        )
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()
