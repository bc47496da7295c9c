"""State that a step carries to its next call in plain attributes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopipe.core.errors import CaptureError
from tests.runtime.pipelines import assert_close, make_pipeline, run_once, run_plain

Step = Callable[["Carrying", Tensor], Tensor]


class Carrying(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.step = step
        self.n = 0
        self.flag = False
        self.hidden: Tensor | None = None
        self.cached: Tensor | None = None
        self.outputs: list[Tensor] = []

    def network(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.step(self, batch)


def late_counter(self: Carrying, x: Tensor) -> Tensor:
    loss = self.network(x * (1 + 0.5 * self.n)).pow(2).mean()
    self.n += 1
    return loss


def late_flag(self: Carrying, x: Tensor) -> Tensor:
    loss = self.network(x * 2 if self.flag else x).pow(2).mean()
    self.flag = True
    return loss


def late_hidden(self: Carrying, x: Tensor) -> Tensor:
    h = self.network(x if self.hidden is None else x + self.hidden)
    self.hidden = h.detach()
    return h.pow(2).mean()


def early_counter(self: Carrying, x: Tensor) -> Tensor:
    self.n += 1
    return self.network(x * (1 + 0.5 * self.n)).pow(2).mean()


def late_and_used_late(self: Carrying, x: Tensor) -> Tensor:
    loss = self.network(x).pow(2).mean() * (1 + self.n * 0)
    self.n += 1
    self.outputs.append(loss.detach())
    return loss


def made_once(self: Carrying, x: Tensor) -> Tensor:
    h = self.layers[0](x)
    if self.cached is None:
        self.cached = torch.arange(4, dtype=x.dtype) * 2
    for layer in self.layers[1:]:
        h = layer(h + self.cached).tanh()
    return h.pow(2).mean()


def drawing(self: Carrying, x: Tensor) -> Tensor:
    random.random()
    loss = self.network(x).pow(2).mean()
    self.outputs.append(loss.detach())
    return loss


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("step", [late_counter, late_flag, late_hidden])
def test_what_stages_would_not_see_is_refused(step: Step) -> None:
    module = Carrying(step).double()
    with pytest.raises(CaptureError, match=r"The step sets (n|flag|hidden) and uses it in its next call.*num_stages=1"):
        make_pipeline(module, (batch(), 0), num_stages=2, num_microbatches=1)
    make_pipeline(module, (batch(), 0), num_stages=1, num_microbatches=1)
    assert (module.n, module.flag, module.hidden) == (0, False, None), "finding out changes nothing"


@pytest.mark.parametrize("step", [early_counter, late_and_used_late, made_once, drawing])
def test_what_every_stage_sees_is_not(step: Step) -> None:
    torch.manual_seed(0)
    module: Any = Carrying(step).double()
    run = run_once(module, batch(), num_stages=3, num_microbatches=1)
    reference = Carrying(step).double()
    reference.load_state_dict(module.state_dict())
    if step is not early_counter:  # in one process all stages count on one module
        assert_close(run, run_plain(reference, batch()))
