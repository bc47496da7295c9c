"""Every cut of steps that do something around their model: metrics, branches, precision, evaluation."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.replay import TraceMismatchError
from tests.capture.models import WIDTH, Blocks, Sequence, SharedParts, WrittenBuffers, features, token_ids
from tests.capture.support import Outcome, assert_same_at_every_cut, run_placed, run_stages, stage_programs, traced


class Metrics(Blocks):
    """A metric, Python numbers and a branch on the loss, all behind the model."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, target = batch
        h = x
        for block in self.blocks:
            h = block(h).tanh()
        loss = F.cross_entropy(h, target)
        self.accuracy.reset()
        accuracy = self.accuracy(h, target)
        self.accuracy.reset()
        if loss.item() > 0:
            loss = loss * 2
        return {"loss": loss, "accuracy": accuracy, "number": float(loss.detach())}


class MixedPrecision(Blocks):
    """An autocast region of the user's own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.blocks[1](h)
            assert h.dtype is torch.bfloat16 or is_absent(h)
        return self.blocks[2](h.float()).softmax(-1)


class Chain(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.float()


class GradientPenalty(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        out = self.blocks[1](x.tanh()).pow(2).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        return self.blocks[2](x) + gradient


class HookOnReadValue(Blocks):
    """A hook on a value that was read before: it has to see the whole gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        early = self.blocks[1](h)
        h.register_hook(lambda gradient: gradient * 3)
        return self.blocks[2](early) + h


class KeptGenerators(Blocks):
    """Generators that live as long as the module: by torch and by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x * torch.rand(WIDTH, generator=self.generator))
        h = self.blocks[1](h) * self.random.uniform(1, 2)
        return self.blocks[2](h) * torch.rand(WIDTH, generator=self.generator)


class OwnGenerator(Blocks):
    """Draws from a generator of the module's own, before and behind the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 3

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        h = self.blocks[0](x * torch.rand(WIDTH, generator=generator))
        h = self.blocks[1](h) * torch.rand(WIDTH, generator=generator)
        return self.blocks[2](h) + torch.rand(WIDTH, generator=generator)


class SizedByData(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](h)[h > 0]


def labelled() -> tuple[Tensor, Tensor]:
    return features(), torch.tensor([0, 1, 2, 3])


def test_metrics_and_a_branch_on_the_loss() -> None:
    found = assert_same_at_every_cut(Metrics().double(), (labelled(), 0))
    assert found.trace.end_reason is not None
    assert "test_replay_steps.py" in found.trace.end_reason
    assert len(found.layer_cuts) == 2


@pytest.mark.parametrize("model", [MixedPrecision, Chain])
def test_bfloat16(model: type[Blocks]) -> None:
    around = torch.autocast("cpu", torch.bfloat16) if model is Chain else contextlib.nullcontext()
    assert_same_at_every_cut(model(), (features().float(), 0), context=lambda: around)


def test_a_value_sized_by_data_crosses_no_cut() -> None:
    found = assert_same_at_every_cut(SizedByData().double(), (features(), 0))
    assert len(found.layer_cuts) == 2


@pytest.mark.parametrize("model", [GradientPenalty, HookOnReadValue, OwnGenerator])
def test_autograd_inside_the_step(model: type[Blocks]) -> None:
    assert_same_at_every_cut(model().double(), (features(), 0))


def test_generators_that_the_module_keeps() -> None:
    """A stage that leaves early must not fall behind the draws of the others, and a trace must not draw."""
    module = KeptGenerators().double()
    assert_same_at_every_cut(module, (features(), 0))
    before = module.generator.get_state(), module.random.getstate()
    traced(module, (features(), 0))
    assert torch.equal(module.generator.get_state(), before[0])
    assert module.random.getstate() == before[1]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["encoder", "lstm", "shared parts"])
def test_evaluation_steps(name: str, guard: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module: nn.Module
    if name == "encoder":
        module = Sequence(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    else:
        module = Sequence(nn.LSTM(8, 8, 2, batch_first=True)) if name == "lstm" else SharedParts()
    module = module.double().eval()
    torch.backends.mha.set_fastpath_enabled(False)  # as it is in stages: its sums have another order
    try:
        # What crosses is packed and lies elsewhere: a matrix product may then sum in another order, on some processors.
        tolerance = 0.0 if name == "lstm" else 1e-12
        assert_same_at_every_cut(
            module, (token_ids(), 0), step_name="validation_step", context=guard, tolerance=tolerance
        )
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_batch_norm_evaluates_with_its_statistics() -> None:
    class Evaluated(WrittenBuffers):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.blocks[1](self.norm(self.blocks[0](batch))).mean()

    module = Evaluated().double().eval()
    assert_same_at_every_cut(module, (features(), 0), step_name="validation_step", context=torch.no_grad)


def test_micro_batches_follow_one_another() -> None:
    """A program is made once and run many times: buffers go on, and attributes that the step assigns do no harm."""

    class Reassigned(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(WIDTH))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
            self.last = h
            return self.blocks[2](self.blocks[1](h) - self.average)

    torch.manual_seed(0)
    module = Reassigned().double()
    reference = [_plain_loss(module, features(size)) for size in (4, 4, 4)]
    module.average = torch.zeros(WIDTH, dtype=torch.float64)
    module.last = None
    found = traced(module, (features(), 0))
    for cut in found.legal_cuts:
        module.average = torch.zeros(WIDTH, dtype=torch.float64)
        programs = stage_programs(module, found, [cut], (features(), 0))
        outcomes: list[Outcome] = [run_stages([module] * 2, programs, (features(), 0)) for _ in range(3)]
        assert [float(outcome.result) for outcome in outcomes] == reference


def _plain_loss(module: Any, x: Tensor) -> float:
    return float(module.training_step(x, 0).detach())


def test_another_path_is_an_error() -> None:
    class Branching(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.blocks[0](x)
            h = self.blocks[1](h).tanh() if x.sum() > 0 else self.blocks[1](h).relu()
            return self.blocks[2](h)

    module = Branching().double()
    args = (features().abs(), 0)
    found = traced(module, args)
    programs = stage_programs(module, found, [3], args)
    run_stages([module] * 2, programs, args)
    with pytest.raises(TraceMismatchError, match=r"tanh.*relu"):
        run_stages([module] * 2, programs, (-args[0], 0))


def test_a_step_without_stubs_or_with_them_gives_the_same_when_each_stage_is_alone() -> None:
    module = Metrics().double()
    found = traced(module, (labelled(), 0))
    outcomes = [run_placed(module, found, found.layer_cuts, (labelled(), 0)) for _ in range(2)]
    assert outcomes[0].result["number"] == outcomes[1].result["number"]
