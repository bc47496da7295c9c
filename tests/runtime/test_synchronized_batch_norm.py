"""The operation of synchronized batch normalization, by itself: with one replica it is the plain one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.planner import make_plan
from lightning_autopipe.runtime.synchronized_batch_norm import (
    SynchronizedForward,
    refuse_unlike_replicas,
    synchronized_batch_norm,
)
from tests.runtime.pipelines import make_pipeline

EPS = 1e-3


def normalize(x: Tensor, statistics: list[Tensor], weight: Any, bias: Any, exchange: Any) -> Tensor:
    return synchronized_batch_norm(x, *statistics, weight, bias, True, 0.3, EPS, exchange)


def alone(kind: str, values: Tensor) -> list[Tensor]:
    assert kind in ("forward", "backward")
    return [values]


class Together:
    """Exchanges among threads, each of which has a share of the samples."""

    def __init__(self, num_replicas: int) -> None:
        self._barrier = threading.Barrier(num_replicas, timeout=30)
        self._values: list[Any] = [None] * num_replicas

    def exchange_of(self, index: int) -> Any:
        def exchange(kind: str, values: Tensor) -> list[Tensor]:
            self._values[index] = values
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return exchange


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 2e-2),  # as under autocast
        (torch.bfloat16, torch.bfloat16, 2e-2),
    ],
)
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 4, 3, 3)])
def test_one_replica_is_plain(
    dtype: torch.dtype, parameter_dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], affine: bool
) -> None:
    torch.manual_seed(0)
    values = 100 + torch.randn(shape) if dtype is not torch.bfloat16 else 1 + torch.randn(shape)
    if len(shape) == 4:
        values = values.contiguous(memory_format=torch.channels_last)
    found = []
    for exchange in (alone, None):
        x = values.to(dtype).requires_grad_()
        weight, bias = (
            (torch.linspace(0.5, 2, 4, dtype=parameter_dtype).requires_grad_() if affine else None) for _ in range(2)
        )
        statistics = [torch.zeros(4, dtype=parameter_dtype), torch.ones(4, dtype=parameter_dtype)]
        y = normalize(x, statistics, weight, bias, exchange)
        (y.float() * torch.linspace(-1, 1, y.numel()).view(shape)).square().mean().backward()
        found.append((y, *statistics, x.grad, *(() if weight is None else (weight.grad, bias.grad))))
        assert y.stride() == x.stride()
    for one, plain in zip(*found, strict=True):
        assert one.dtype == plain.dtype
        scale = float(plain.detach().abs().max())
        torch.testing.assert_close(one, plain, rtol=tolerance, atol=tolerance * scale)


def test_replicas_with_unlike_shares_are_one_batch() -> None:
    torch.manual_seed(0)
    x = 1e3 + torch.randn(9, 4, 2, dtype=torch.float64)
    factors = torch.randn_like(x)
    weight = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    plain_x, plain_weight, plain_statistics = (
        x.clone().requires_grad_(),
        weight.clone().requires_grad_(),
        [
            torch.zeros(4, dtype=torch.float64),
            torch.ones(4, dtype=torch.float64),
        ],
    )
    plain = F.batch_norm(plain_x, *plain_statistics, plain_weight, None, True, 0.3, EPS)
    (plain * factors).sin().sum().backward()

    parts = [slice(0, 5), slice(5, 7), slice(7, 9)]
    together = Together(len(parts))
    found: list[Any] = [None] * len(parts)

    def run(index: int, part: slice) -> None:
        own_x, own_weight = x[part].clone().requires_grad_(), weight.clone().requires_grad_()
        statistics = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
        y = normalize(own_x, statistics, own_weight, None, together.exchange_of(index))
        (y * factors[part]).sin().sum().backward()
        found[index] = y, own_x.grad, own_weight.grad, statistics

    threads = [threading.Thread(target=run, args=item) for item in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs, gradients, of_weight, statistics = zip(*found, strict=True)
    torch.testing.assert_close(torch.cat(outputs), plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat(gradients), plain_x.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(sum(of_weight), plain_weight.grad, rtol=1e-9, atol=1e-9)
    for own in statistics:
        torch.testing.assert_close(own, plain_statistics, rtol=1e-12, atol=1e-12)


@contextlib.contextmanager
def a_run() -> Iterator[None]:
    change = SynchronizedForward()
    change.install()
    try:
        yield
    finally:
        change.remove()


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()


def test_replicas_with_unlike_numbers_of_micro_batches_are_refused() -> None:
    before = nn.SyncBatchNorm.forward
    module, batch = Normalized(), torch.randn(8, 4)
    with a_run():
        pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=2)
        profile = pipeline.profile("training_step", (batch, 0), {})
    assert nn.SyncBatchNorm.forward is before
    plan = make_plan(
        profile,
        num_stages=2,
        num_replicas=2,
        num_microbatches=2,
        schedule="1f1b",
        module_fingerprint=pipeline.module_fingerprint,
    )
    refuse_unlike_replicas(plan, module)
    unlike = replace(plan, replica_microbatches=(3, 1))
    with pytest.raises(PlanError, match=r"\(3, 1\) micro-batches, but layers.1 is a SyncBatchNorm"):
        refuse_unlike_replicas(unlike, module)
    refuse_unlike_replicas(unlike, module.eval())
