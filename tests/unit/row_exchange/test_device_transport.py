"""Rows between nodes over their devices: the values, and on which stream memory of the device is
used.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_stub import DEVICE, DeviceStub, StubStream
from torch import Tensor

from deepspeed_gear.row_exchange import device_transport
from deepspeed_gear.row_exchange.device_transport import DeviceTransport

SIZES = (0, 3, 5000, 7, 20_000, 20_000)  # words from each node; the buffers grow twice


def answer(
    back: Tensor, there: Tensor, coming: Sequence[int], out: Sequence[int], group: object
) -> None:
    """Receive from each node what is sent to it."""
    assert list(coming) == list(out)
    back.copy_(there)


@pytest.mark.parametrize("device", [torch.device("cpu"), DEVICE], ids=["host", "device"])
def test_rows_are_exchanged_in_memory_of_the_stream_that_sends_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = DeviceStub()
    channel: Any = SimpleNamespace(
        ranks=[2, 0],
        timeout_s=1.0,
        naming_lost_ranks=nullcontext,
        count_bytes=lambda sent, received: None,
    )
    monkeypatch.setattr(device_transport, "purpose_group", lambda *arguments: None)
    monkeypatch.setattr(device_transport.dist, "all_to_all_single", answer)
    if device == DEVICE:
        monkeypatch.setattr(device_transport, "lane_of", lambda device: StubStream(stub))
    with stub:
        transport = DeviceTransport(channel, device)
        for turn, size in enumerate(SIZES):
            messages = [np.arange(size) + turn, np.arange(2 * size) - turn]
            received = transport.exchange(messages, [size, 2 * size])
            for got, sent in zip(received, messages, strict=True):
                np.testing.assert_array_equal(got, sent)
    assert stub.crossings == []
    assert stub.waits == []  # the event after the last copy is the only wait
