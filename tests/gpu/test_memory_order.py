"""What blocks of one launch pass to each other, replayed until a missing fence would show.

Neither the host's run of the kernels, which has no memory order, nor racecheck, which sees shared
memory alone, can find one.
"""

import pytest
import torch
from memory_order import Draws

from deepspeed_gear.ops import load_backend

# The first test builds both ops, where that has not been done before.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
REPLAYS = 100_000
AT_ONCE = 1000  # replays between two products of the other stream, and two comparisons


class Busy:
    """Products of matrices on a stream of their own, which keep other multiprocessors busy."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.rand(2048, 2048, device="cuda")
        self._ended = [torch.cuda.Event(), torch.cuda.Event()]

    def go_on(self, turn: int) -> None:
        """Queue some more, at most two turns ahead of the device."""
        ended = self._ended[turn % 2]
        ended.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(16):
                torch.mm(self._matrix, self._matrix)
            ended.record()


@pytest.mark.parametrize(
    ("count", "is_weighed"),
    [
        pytest.param(1024, True, id="the last of 128 blocks weighs"),
        pytest.param(8192, False, id="the last of 1,024 blocks advances the state"),
    ],
)
def test_replays_beside_a_busy_kernel_equal_the_cpu(count: int, is_weighed: bool) -> None:
    expected = Draws(load_backend("cpu"), "cpu", count, is_weighed)
    got = Draws(load_backend("cuda"), "cuda", count, is_weighed)
    expected.draw()
    got.draw()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got.draw()
    busy = Busy()
    for turn in range(REPLAYS // AT_ONCE):
        busy.go_on(turn)
        for _ in range(AT_ONCE):
            graph.replay()
        for _ in range(AT_ONCE):
            expected.draw()
        assert int(got.digest) == int(expected.digest), f"of replays up to {(turn + 1) * AT_ONCE}"
