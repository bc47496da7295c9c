from __future__ import annotations

import torch
from torch import nn

from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.strategy.clipping import clip_grad_norm
from lightning_autopipe.strategy.communicator import Communicator
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
    ledger.commit(total_weight=weight, accumulated_batches=batches, reduce=reduce)


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
    ledger.commit(total_weight=3.0, accumulated_batches=2, reduce=True)
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


def test_no_weight_at_all_leaves_zeros() -> None:
    named = parameters()
    ledger = GradientLedger(named, replicas=None, ties=None)
    step(ledger, named, 0.0, reduce=True, batches=1, weight=0.0)
    assert torch.equal(named["used"].grad, torch.zeros(2))  # type: ignore[arg-type]


def test_clipping_equals_torch() -> None:
    communicator = Communicator(
        layout=ParallelLayout(num_stages=1, num_replicas=1), global_rank=0, device=torch.device("cpu")
    )
    torch.manual_seed(0)
    for max_norm in (0.1, 1000.0):
        gradients = [torch.randn(3, dtype=torch.float64), torch.randn(2, 2)]
        pairs = [[nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2)]
        for pair in pairs:
            for parameter, gradient in zip(pair, gradients, strict=True):
                parameter.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(pairs[0], max_norm)
        norm = clip_grad_norm(pairs[1], max_norm, counts=lambda _: True, communicator=communicator)
        assert abs(norm - float(expected)) < 1e-6
        for plain, clipped in zip(*pairs, strict=True):
            assert torch.allclose(plain.grad, clipped.grad, rtol=1e-6)  # type: ignore[arg-type]
    assert clip_grad_norm([], 1.0, counts=lambda _: True, communicator=communicator) == 0.0
