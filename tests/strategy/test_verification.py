"""The proof on the user's own module: equal numbers pass and leave no trace, a wrong replay is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.capture.replay import Replay
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.planner import make_plan
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.strategy.verification import Verdict, verify_pipeline


class Network(nn.Module):
    """Dropout, batch normalization and a counter in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)
        self.calls: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(batch_idx)
        hidden, target = batch
        for layer in self.layers:
            hidden = F.dropout(layer(hidden).relu(), 0.3)
        return F.cross_entropy(self.norm(hidden), target)


def planned(module: nn.Module, batch: Any, num_stages: int) -> tuple[Pipeline, Any]:
    pipeline = Pipeline(
        module,
        layout=ParallelLayout(num_stages=num_stages),
        global_rank=0,
        transport=None,
        num_microbatches=2,
        make_schedule=get_schedule,
    )
    profile = pipeline.profile("training_step", (batch, 0), {})
    plan = make_plan(
        profile,
        num_stages=num_stages,
        num_replicas=1,
        num_microbatches=2,
        module_fingerprint=pipeline.module_fingerprint,
    )
    pipeline.set_plan(plan)
    return pipeline, plan


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 8, (size,), generator=generator)


def state_of(module: Network) -> Any:
    tensors = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return tensors, gradients, list(module.calls), torch.get_rng_state()


def test_equal_numbers_pass_and_nothing_changes() -> None:
    torch.manual_seed(0)
    module = Network()
    module.layers[0].weight.grad = torch.ones_like(module.layers[0].weight)
    batch = batch_of(8)
    pipeline, plan = planned(module, batch, 3)
    tensors, gradients, calls, random_state = state_of(module)
    verdict = verify_pipeline(pipeline, plan, step_name="training_step", args=(batch, 0), kwargs={})
    assert verdict.largest_difference == 0.0
    assert "bit for bit" in str(verdict)
    now, gradients_now, calls_now, random_state_now = state_of(module)
    assert all(torch.equal(now[name], tensor) for name, tensor in tensors.items())
    assert all(gradients_now[name] is gradient for name, gradient in gradients.items())
    assert calls_now == calls
    assert torch.equal(random_state_now, random_state)


def test_values_that_are_no_numbers_are_equal() -> None:
    """A batch may have them, and the first steps of a training in float16 may overflow."""
    torch.manual_seed(0)
    module = Network()
    hidden, target = batch_of(8)
    hidden[0, 0] = float("nan")
    batch = hidden, target
    pipeline, plan = planned(module, batch, 3)
    verdict = verify_pipeline(pipeline, plan, step_name="training_step", args=(batch, 0), kwargs={})
    assert verdict.largest_difference == 0.0


def test_a_wrong_replay_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch = batch_of(8)
    module = Network()
    pipeline, plan = planned(module, batch, 2)
    original = Replay.__init__

    def scaled(self: Replay, program: Any, received: Any, key: Any) -> None:
        wrong = (tensor.detach().cumsum(0).requires_grad_() for tensor in received)
        original(self, program, tuple(wrong), key)

    monkeypatch.setattr(Replay, "__init__", scaled)
    with pytest.raises(CaptureError, match=r"the loss differs from the uncut step .* verify=False"):
        verify_pipeline(pipeline, plan, step_name="training_step", args=(batch, 0), kwargs={})


def test_rounding_is_told() -> None:
    assert "order of sums (relative difference 2.0e-16)" in str(Verdict(seconds=1.0, largest_difference=2e-16))
