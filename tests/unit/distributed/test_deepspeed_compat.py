"""What DeepSpeed must have for us: a version that moves one of these names fails here, by the name."""

from __future__ import annotations

import importlib
import inspect

import pytest

from deepspeed_gear.distributed import deepspeed_compat
from deepspeed_gear.errors import ConfigError


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, names in deepspeed_compat.CONTRACT.items() for name in names]
)
def test_deepspeed_has_what_is_used(where: str, name: str) -> None:
    module, _, kind = where.partition(":")
    holder = importlib.import_module(module)
    holder = getattr(holder, kind) if kind else holder
    assert hasattr(holder, name), f"{where.rstrip(':')} has no {name} any more: see compat.py"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in deepspeed_compat.ATTRIBUTES.items() for name in names]
)
def test_engines_set_what_is_used(kind: str, name: str) -> None:
    """Attributes of instances, by the source of what sets them."""
    modules = {"DeepSpeedEngine": "runtime.engine", "PipelineEngine": "runtime.pipe.engine"}
    module = importlib.import_module(f"deepspeed.{modules[kind]}")
    source = inspect.getsource(getattr(module, kind))
    assert f"self.{name}" in source, f"{kind} sets no {name} any more: see compat.py"


def test_an_engine_with_a_schedule_of_its_own_is_refused() -> None:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    deepspeed_compat.check_engine(PipelineEngine.__new__(PipelineEngine))
    with pytest.raises(ConfigError, match="must be a PipelineEngine or no pipeline, got 'DualPipeVEngine'"):
        deepspeed_compat.check_engine(DualPipeVEngine.__new__(DualPipeVEngine))


def test_the_pipeline_engine_is_known_by_its_name() -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    assert PipelineEngine.__name__ == deepspeed_compat.PIPELINE
    assert list(inspect.signature(PipelineEngine.train_batch).parameters)[:2] == ["self", "data_iter"]
    assert "num_micro_batches" in inspect.signature(PipelineEngine.eval_batch).parameters
