"""A loss whose weighted mean over parts is not that of the whole is found before training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.strategy.loss_check import check_loss
from tests.runtime.pipelines import make_pipeline

Loss = Callable[[Tensor, Tensor], Any]


class Network(nn.Module):
    def __init__(self, loss: Loss, has_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.loss = loss
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        hidden, target = batch
        for layer in self.layers:
            hidden = self.dropout(layer(hidden).relu())
        return self.loss(self.norm(hidden), target)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, 8, (size,), generator=generator)
    target[0] = -100
    return torch.randn(size, 8, generator=generator), target


def checked(loss: Loss, *, size: int = 8, num_microbatches: int = 2, **options: Any) -> Network:
    module, batch = Network(loss, has_norm=size > 1), batch_of(size)
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=num_microbatches, **options)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes = [sub.training for sub in module.modules()]
    check_loss(pipeline, step_name="training_step", args=(batch, 0), kwargs={}, num_microbatches=num_microbatches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [sub.training for sub in module.modules()] == modes
    assert module.calls == 0
    return module


def summed(h: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(h, target, reduction="sum")


def masked(h: Tensor, target: Tensor) -> Tensor:
    return (F.cross_entropy(h, target, reduction="none")).sum() / (target != -100).sum()


def contrastive(h: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(h @ h.t() / 8, torch.arange(len(h)))


def root(h: Tensor, target: Tensor) -> Tensor:
    scale = torch.arange(len(h)) + 1.0
    return (h.square().mean(1) * scale / scale.mean()).mean().sqrt()


@pytest.mark.parametrize("loss", [summed, contrastive])
def test_another_loss_is_an_error_with_the_ways_out(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"no mean over samples: 8 of them .* loss_over='batch'.* verify=False"):
        checked(loss)


@pytest.mark.parametrize("loss", [root, masked])
def test_a_loss_that_differs_a_little_is_warned_of(loss: Loss) -> None:
    with pytest.warns(UserWarning, match=r'no mean over samples: .*"loss_weight": n'):
        checked(loss)


@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        lambda h, target: F.mse_loss(h, torch.zeros_like(h)),
        lambda h, target: {"loss": masked(h, target), "loss_weight": (target != -100).sum()},
        lambda h, target: h.square().mean() * torch.rand(()),  # another one each time
        lambda h, target: h.square().sum() if torch.is_grad_enabled() else None,  # none in evaluation
    ],
)
@pytest.mark.parametrize("size", [2, 7, 8])
def test_nothing_is_said(loss: Loss, size: int) -> None:
    checked(loss, size=size)


def test_a_loss_over_the_batch_is_that_of_the_whole() -> None:
    checked(contrastive, loss_over="batch", schedule="gpipe")


def test_a_loss_over_the_batch_of_layers_that_mix_samples_is_an_error() -> None:
    class Mixes(Network):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.layers[0](batch[0])
            return contrastive(self.layers[1](hidden - hidden.mean(0)), batch[1])

    module, batch = Mixes(contrastive, has_norm=False), batch_of(8)
    options: Any = {"num_microbatches": 2, "schedule": "gpipe", "loss_over": "batch"}
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, **options)
    with pytest.raises(CaptureError, match=r"where its layers run in 2 parts: some layer mixes"):
        check_loss(pipeline, step_name="training_step", args=(batch, 0), kwargs={}, num_microbatches=2)


def test_parts_without_a_finite_loss_are_found() -> None:
    def variance(h: Tensor, target: Tensor) -> Tensor:
        return h.square().mean() + h.var(0).mean()  # of one sample: NaN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says so
        with pytest.raises(CaptureError, match="no mean over samples"):
            checked(variance, size=3)


class Attends(nn.Module):
    """Attention's kernels are marked as drawing, also where they drop nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.inner = {
            "lstm": nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1),
            "attention": nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True),
        }.get(kind)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.layers[0](batch[0])[:, None, :].expand(-1, 3, -1)
        if isinstance(self.inner, nn.LSTM):
            h = self.inner(h)[0]
        elif self.inner is not None:
            h = self.inner(h, h, h)[0]
        else:
            h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return F.cross_entropy(self.layers[2](h.mean(1)), batch[1], reduction="sum")


@pytest.mark.parametrize("kind", ["lstm", "attention", "function"])
def test_attention_draws_nothing_in_evaluation(kind: str) -> None:
    module, batch = Attends(kind), batch_of(8)
    pipeline = make_pipeline(module, (batch, 0), num_stages=2, num_microbatches=4)
    with pytest.raises(CaptureError, match="no mean over samples"):
        check_loss(pipeline, step_name="training_step", args=(batch, 0), kwargs={}, num_microbatches=4)


def test_one_sample_has_no_halves() -> None:
    checked(summed, size=1, num_microbatches=1)
