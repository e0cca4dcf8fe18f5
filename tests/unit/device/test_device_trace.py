"""Steps with a table in the memory of one device, here the host's, as torch.compile traces them."""

from typing import Any

import pytest
import torch
from ring_cases import PRIORITIZED, SAMPLERS, add_some, assert_traced, online, trajectories
from torch import Tensor
from torch.torch_version import TorchVersion

from deepspeed_gear import DeviceReplay


def test_old_batches_fail_in_a_late_backward_pass() -> None:
    scale = torch.nn.Parameter(torch.ones(3))
    with DeviceReplay(online(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(5, 6))
        batch = replay.new_batch()
        replay.sample_(batch)
        loss = (batch.is_weight * (batch["following"] * scale).sum(1)).sum()
        replay.sample_(batch)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.5", reason="torch 2.4 compiles no op that writes to a list"
)
@pytest.mark.parametrize(
    ("sampler", "most"),
    [(PRIORITIZED, 0), ({"kind": "top_k"}, 3), (SAMPLERS["prioritized trajectories"], 12)],
)
def test_a_whole_step_is_traced_without_a_break(sampler: dict[str, Any], most: int) -> None:
    """Adding, drawing, training and updating in one graph of torch.compile, against the same
    without.
    """
    weights = torch.nn.Parameter(torch.zeros(3))

    def step(replay: DeviceReplay, batch: Any, columns: dict[str, Tensor]) -> Tensor:
        replay.add_(columns)
        replay.sample_(batch)
        error = (batch["following"] @ weights - batch["return_n"]).abs()
        replay.update_priorities_(batch, error)
        return (batch.is_weight * batch.valid * error).sum()

    made = online(sampler, seed=3, batch_size=9, table={"max_times_sampled": most})
    assert_traced(made, step, 12, prepare=lambda _: None)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.5", reason="torch 2.4 compiles no op that writes to a list"
)
def test_a_step_of_epochs_is_traced_without_a_break() -> None:
    """Trajectories are added, drawn and removed."""
    weights = torch.nn.Parameter(torch.zeros(3))

    def step(replay: DeviceReplay, batch: Any, columns: dict[str, Tensor]) -> Tensor:
        replay.add_(columns)
        replay.sample_(batch)
        replay.remove_(batch.trajectory_id[:1])
        error = (batch["following"] @ weights - batch["return_n"]).abs()
        return (error * batch.epoch).sum()

    made = online({"kind": "epoch", "unit": "step"}, seed=3, batch_size=9)
    assert_traced(made, step, 12, prepare=lambda _: None)


def written_by(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Return what the ops of gear write to in a traced graph."""
    found = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and "gear." in str(node.target):
            for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    found |= set(given) if isinstance(given, (list, tuple)) else {given}
    return found


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.5", reason="torch 2.4 compiles no op that writes to a list"
)
@pytest.mark.parametrize(
    ("sampler", "accumulation", "num_envs"),
    [
        ("uniform steps", 1, 3),
        ("uniform steps", 2, None),
        ("prioritized", 2, 3),
        ("by the table", 1, None),
        ("epochs", 1, None),
        ("epochs", 2, 3),
    ],
)
def test_a_traced_step_writes_to_fixed_tensors_only(
    sampler: str, accumulation: int, num_envs: int | None
) -> None:
    """What mode="reduce-overhead" asks for: it makes no CUDA graph of a step that
    writes to others.
    """
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    table = {} if num_envs is None else {"num_envs": num_envs}
    kinds = {**SAMPLERS, "epochs": {"kind": "epoch", "unit": "step"}}
    section = online(kinds[sampler], gradient_accumulation_steps=accumulation, table=table)
    with DeviceReplay(section, "cpu") as replay:
        batches = [replay.new_batch() for _ in range(accumulation)]

        def step(columns: dict[str, Tensor]) -> None:
            add_some(replay, columns)
            for batch in batches:
                replay.sample_(batch)
                if replay.config.item_sampler.has_priorities:
                    replay.update_priorities_(batch, batch["reward"].abs())

        torch._dynamo.reset()
        run = torch.compile(step, fullgraph=True, backend=backend)
        for turn in range(3):
            run(trajectories(3, 4, 3 * turn))
    assert len(graphs) == 1, "nothing that a trace leaves behind makes the next call another one"
    for node in written_by(graphs[0]):
        facts = node.meta.get("tensor_dict", {})
        assert node.op != "placeholder" or "_dynamo_static_input_type" in facts, node.name
