"""Modules that read values of activations: one operation each, never cut inside, run for real where they are owned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autopipe.capture.records import OPAQUE_CALL
from lightning_autopipe.core.errors import CaptureError
from tests.capture.models import WIDTH, features
from tests.capture.support import Traced, assert_same_at_every_cut, traced


@torch.library.custom_op("autopipe_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """An operation without a kernel for shapes."""
    return torch.from_numpy(x.detach().numpy() ** 3)


cube.register_autograd(
    lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class RoutedExperts(nn.Module):
    """Each token goes to one expert; a loop over those that have tokens."""

    def __init__(self, num_experts: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        best, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            if rows.numel() == 0:
                continue
            if self.load is not None:
                with torch.no_grad():
                    self.load[index] += rows.numel()
            out = out.index_add(0, rows, self.dropout(expert(x[rows])) * best[rows, None])
        return x + out, weights.mean(0).square().sum()


class Mixture(nn.Module):
    """Dense blocks between mixtures, whose auxiliary losses are summed at the end."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.backs = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(3))
        self.mixtures = nn.ModuleList(RoutedExperts(dropout=dropout) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        auxiliary = []
        for index, (block, back) in enumerate(zip(self.blocks, self.backs, strict=True)):
            batch = batch + back(torch.relu(block(batch)))
            if index < len(self.mixtures):
                batch, loss = self.mixtures[index](batch)
                auxiliary.append(loss)
        return batch.square().mean() + 0.1 * torch.stack(auxiliary).sum()


def _opaque(found: Traced) -> list[str]:
    return [op.module_path for op in found.trace.operations if op.function == OPAQUE_CALL]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mixture_that_reads_its_routing_is_one_operation(dropout: float) -> None:
    torch.manual_seed(0)
    found = assert_same_at_every_cut(Mixture(dropout).double(), (features(6).double(), 0))
    assert _opaque(found) == ["mixtures.0", "mixtures.1"]
    assert len(found.layer_cuts) >= 2
    names = {name for op in found.trace.operations if op.function == OPAQUE_CALL for name in op.buffers}
    assert names == {"mixtures.0.load", "mixtures.1.load"}


def test_a_mixture_under_recomputation() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Mixture):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for index, (block, back) in enumerate(zip(self.blocks, self.backs, strict=True)):
                batch = batch + back(torch.relu(block(batch)))
                if index < len(self.mixtures):
                    batch, _ = checkpoint(self.mixtures[index], batch, use_reentrant=False)
            return batch.square().mean()

    torch.manual_seed(0)
    module = Recomputed().double()
    for mixture in module.mixtures:
        mixture.load = None  # recomputation would count twice, here and on one device
    assert _opaque(assert_same_at_every_cut(module, (features(6).double(), 0))) == ["mixtures.0", "mixtures.1"]


def test_what_a_module_returns_as_it_got_it_stays_the_same_tensor() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, extra: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
            changed = self.linear(x) if float(x.detach().sum()) > -1e9 else x
            return changed, extra["kept"], extra["kept"][:2].t()

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.skips = Skips()
            self.last = nn.Linear(WIDTH, 2 * WIDTH)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.first(batch)
            y, kept, part = self.skips(x, extra={"kept": x})
            assert kept is x
            return self.last(y).square().mean() + kept.mean() + part.mean()

    torch.manual_seed(0)
    assert _opaque(assert_same_at_every_cut(Module().double(), (features().double(), 0))) == ["skips"]


class Chosen(nn.Module):
    """Gives rows that its own values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scores(x)[:, 0] > 0).nonzero()[:, 0]


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = Chosen()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.chosen(x)
        return x.index_add(0, rows, self.linear(x[rows]))


def test_a_result_sized_by_values_makes_the_caller_opaque() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, 2 * WIDTH)
            self.choosing = Choosing()
            self.last = nn.Linear(2 * WIDTH, WIDTH)
            self.end = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.end(self.choosing(self.last(self.first(batch)))).square().mean()

    torch.manual_seed(0)
    assert _opaque(assert_same_at_every_cut(Module().double(), (features(8).double(), 0))) == ["choosing"]


def _refusal(module: nn.Module) -> str:
    with pytest.raises(CaptureError) as refused:
        traced(module.double(), (features().double(), 0))
    return str(refused.value)


def test_a_branch_between_the_layers_is_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.sum() > 0:
                    x = x.relu()
            return x

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Branches()
            self.end = nn.Linear(WIDTH, 2)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.end(self.net(batch)).square().mean()

    text = _refusal(Module())
    assert "in net, at" in text
    assert "if x.sum() > 0" in text


class WritesItsArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            pass
        x.mul_(2)
        return self.linear(x)


class ReturnsANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), int(x.argmax())


class KeepsAStatistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            pass
        self.kept = x.detach().abs().mean()
        return self.linear(x)


class WritesAStatistic(KeepsAStatistic):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            pass
        self.kept.fill_(1.0)
        return self.linear(x)


class AppendsAStatistic(KeepsAStatistic):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            pass
        self.kept = self.kept if isinstance(self.kept, list) else []
        self.kept.append(float(x.detach().sum()))
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WritesItsArgument, "writes into an argument"),
        (ReturnsANumber, "returns a int"),
        (KeepsAStatistic, "sets self.kept, which other stages would not see"),
        (WritesAStatistic, "sets self.kept, which"),
        (AppendsAStatistic, "sets self.kept, which"),
    ],
)
def test_what_cannot_be_one_operation_is_refused(kind: type[nn.Module], reason: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.inner = kind()
            self.last = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.inner(self.first(batch))
            x = x[0] if isinstance(x, tuple) else x
            return self.last(x).square().mean()

    assert reason in _refusal(Module())


def test_functional_code_outside_any_module_is_refused() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.first(batch)
            scale = x.detach().abs().max().item()
            return F.mse_loss(self.last(x) / scale, batch)

    assert "in the LightningModule" in _refusal(Module())


def test_an_operation_without_a_kernel_for_shapes() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for layer in self.layers:
                batch = cube(layer(batch))
            return batch.square().mean()

    torch.manual_seed(0)
    found = assert_same_at_every_cut(Module().double(), (features().double(), 0))
    assert _opaque(found) == []
    assert len(found.legal_cuts) >= 4
