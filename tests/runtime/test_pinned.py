"""Pinned memory, here without a GPU: what goes in comes out, in its dtype and no further."""

from __future__ import annotations

import torch

from octavo.runtime.pinned import PinnedBuffer

CPU = torch.device("cpu")


def test_from_the_host() -> None:
    buffer = PinnedBuffer(64, CPU)
    buffer.host.copy_(torch.arange(64, dtype=torch.uint8))
    goal = torch.full((80,), 255, dtype=torch.uint8)
    buffer.put_into(goal, 24)
    assert torch.equal(goal[:24], torch.arange(24, dtype=torch.uint8))
    assert (goal[24:] == 255).all()


def test_to_the_host() -> None:
    buffer = PinnedBuffer(32, CPU)
    tokens = torch.tensor([-(2**62), 2**62 + 1, 7])
    assert torch.equal(buffer.take_from(tokens), tokens)
    fault = torch.tensor([0, -1, 5], dtype=torch.int32)
    taken = buffer.take_from(fault)
    assert taken.dtype == torch.int32
    assert torch.equal(taken, fault)
