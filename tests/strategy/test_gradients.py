from __future__ import annotations

import torch
from torch import nn

from lightning_autopipe.strategy.gradients import GradientLedger


class TwoReplicas:
    """Stands for the reduction: as if the other replica had the same gradients."""

    def __init__(self) -> None:
        self.num_reductions = 0

    def reduce(self, parameters: dict[str, nn.Parameter]) -> None:
        self.num_reductions += 1
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad *= 2


def parameters() -> dict[str, nn.Parameter]:
    return {"used": nn.Parameter(torch.ones(2)), "unused": nn.Parameter(torch.ones(2))}


def step(
    ledger: GradientLedger, named: dict[str, nn.Parameter], value: float, *, reduce: bool, batches: int, weight: float
) -> None:
    ledger.set_aside()
    assert all(parameter.grad is None for parameter in named.values())
    named["used"].grad = torch.full((2,), value)
    ledger.take_new(reduce=reduce)
    ledger.commit(divisor=weight * batches, reduce=reduce)


def test_zero_grad_between_schedule_and_backward_loses_nothing() -> None:
    named = parameters()
    ledger = GradientLedger(named, replicas=None, ties=None)
    named["used"].grad = torch.full((2,), 99.0)
    ledger.set_aside()
    named["used"].grad = torch.full((2,), 6.0)
    ledger.take_new(reduce=True)
    assert float(named["used"].grad[0]) == 99.0
    for parameter in named.values():
        parameter.grad = None
    ledger.commit(divisor=3.0 * 2, reduce=True)
    assert torch.equal(named["used"].grad, torch.ones(2))
    assert named["unused"].grad is None


def test_one_reduction_for_each_optimizer_step() -> None:
    named = parameters()
    replicas = TwoReplicas()
    ledger = GradientLedger(named, replicas=replicas, ties=None)  # type: ignore[arg-type]
    step(ledger, named, 4.0, reduce=True, batches=1, weight=2.0)
    assert replicas.num_reductions == 1
    assert float(named["used"].grad[0]) == 4.0  # type: ignore[index]
    for parameter in named.values():
        parameter.grad = None
    step(ledger, named, 4.0, reduce=False, batches=2, weight=2.0)
    assert replicas.num_reductions == 1
    step(ledger, named, 8.0, reduce=True, batches=2, weight=4.0)
    assert replicas.num_reductions == 2
    assert float(named["used"].grad[0]) == 2 * (4.0 / 2 / 2 + 8.0 / 4 / 2)  # type: ignore[index]
    assert named["unused"].grad is None
