"""How a backend is chosen."""

import pytest
import torch

from deepspeed_gear.errors import BuildError, ConfigError
from deepspeed_gear.ops import load_backend


def test_backends() -> None:
    cpu = load_backend("cpu")
    assert load_backend("auto").draw_ is cpu.draw_
    assert load_backend().name == "cpu"
    with pytest.raises(ConfigError, match=r"gear\.backend must be auto, cpu or cuda, got 'gpu'"):
        load_backend("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_with_a_remedy() -> None:
    with pytest.raises(BuildError, match=r'gear\.backend is cuda, .* set gear\.backend to "cpu"'):
        load_backend("cuda")
