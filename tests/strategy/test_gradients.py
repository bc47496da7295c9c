from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from lightning_autopipe.strategy.gradients import GradientLedger


class TwoReplicas:
    """Stands for the reduction: as if the other replica had the same gradients."""

    def __init__(self) -> None:
        self.num_reductions = 0
        self.num_armed = 0
        self._gradients: dict[str, Tensor] = {}

    def arm(self, parameters: dict[str, nn.Parameter], *, complete: list[str]) -> None:
        self.num_armed += 1

    def disarm(self) -> None:
        self.num_armed -= 1

    def start(self, parameters: dict[str, nn.Parameter]) -> None:
        self._gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}

    def finish(self) -> dict[str, Tensor]:
        self.num_reductions += 1
        return {name: 2 * gradient for name, gradient in self._gradients.items()}

    def reduce(self, parameters: dict[str, nn.Parameter]) -> None:
        self.start(parameters)
        for name, gradient in self.finish().items():
            parameters[name].grad = gradient


def parameters() -> dict[str, nn.Parameter]:
    return {"used": nn.Parameter(torch.ones(2)), "unused": nn.Parameter(torch.ones(2))}


def step(
    ledger: GradientLedger, named: dict[str, nn.Parameter], value: float, *, reduce: bool, batches: int, weight: float
) -> None:
    with ledger.schedule(reduce=reduce) as before_last_backward:
        assert all(parameter.grad is None for parameter in named.values())
        if before_last_backward is not None:
            before_last_backward()
        named["used"].grad = torch.full((2,), value)
    ledger.commit(divisors=[weight * batches], reduce=reduce)


def test_zero_grad_between_schedule_and_backward_loses_nothing() -> None:
    named = parameters()
    ledger = GradientLedger(named, replicas=None, ties=None)
    named["used"].grad = torch.full((2,), 99.0)
    with ledger.schedule(reduce=True) as before_last_backward:
        named["used"].grad = torch.full((2,), 6.0)
    assert before_last_backward is None
    assert float(named["used"].grad[0]) == 99.0
    for parameter in named.values():
        parameter.grad = None
    ledger.commit(divisors=[3.0 * 2], reduce=True)
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
    assert (replicas.num_reductions, replicas.num_armed) == (2, 1)  # never early where something was accumulated
    assert float(named["used"].grad[0]) == 2 * (4.0 / 2 / 2 + 8.0 / 4 / 2)  # type: ignore[index]
    assert named["unused"].grad is None


def test_batches_are_divided_by_numbers_of_their_own() -> None:
    named = parameters()
    ledger = GradientLedger(named, replicas=None, ties=None)
    step(ledger, named, 4.0, reduce=False, batches=4, weight=1.0)
    with ledger.schedule(reduce=False):
        for value in (6.0, 8.0, 10.0):
            named["used"].grad = torch.full((2,), value)
            if value < 10:
                ledger.next_batch()
                assert named["used"].grad is None
            if value == 8:
                ledger.add_oldest(2.0 * 4)  # what the first one weighs is known by now
    ledger.commit(divisors=[4.0 * 4, 5.0 * 4], reduce=True)
    assert torch.equal(named["used"].grad, torch.full((2,), (4 + 6 / 2 + 8 / 4 + 10 / 5) / 4))
    assert named["unused"].grad is None


def test_a_failed_schedule_leaves_nothing_watched() -> None:
    replicas = TwoReplicas()
    ledger = GradientLedger(parameters(), replicas=replicas, ties=None)  # type: ignore[arg-type]
    with contextlib.suppress(ValueError), ledger.schedule(reduce=True) as before_last_backward:
        assert before_last_backward is not None
        before_last_backward()
        raise ValueError("in a backward")
    assert replicas.num_armed == 0
