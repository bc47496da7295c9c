"""Small modules, each with something that breaks a naive cut."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 6
DOUBLE = torch.float64


def features(num_samples: int = 4, width: int = WIDTH) -> Tensor:
    return torch.randn(num_samples, width, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)


def token_ids(num_samples: int = 2, length: int = 5, vocabulary: int = 11) -> Tensor:
    return torch.randint(0, vocabulary, (num_samples, length), generator=torch.Generator().manual_seed(1))


class Blocks(nn.Module):
    """Three linear layers; the step is given by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).pow(2).mean()


class Getters(Blocks):
    """Getters that give tensors, and getters that do not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = h.T.T.mT.H + h.real
        assert h.shape == x.shape
        assert h.ndim == 2
        assert h.device == x.device
        assert not h.is_sparse
        pairs = torch.view_as_complex(self.blocks[1](h).view(-1, WIDTH // 2, 2))
        h = (pairs.real * pairs.imag).repeat(1, 2) + h.data
        return self.blocks[2](h) + h.detach().max()


class WrittenTensors(Blocks):
    """Fresh tensors and batch tensors that operations write, through views and `out=` as well."""

    def forward(self, x: Tensor) -> Tensor:
        record = torch.zeros(3, *x.shape, dtype=x.dtype)
        row = torch.zeros(WIDTH, dtype=x.dtype)
        part = row[2:4]
        scratch = torch.empty_like(x)
        h = x
        for index, block in enumerate(self.blocks):
            h = block(h)
            record[index] = h
            part.add_(h.mean())
            h = h.tanh()
        torch.mul(h.detach(), 2, out=scratch)
        total = torch.zeros_like(x).index_add_(0, torch.arange(len(x)), h)
        shift = torch.zeros_like(x)
        shift += total.detach()
        h = self.blocks[0](total + record.sum(0) + row + scratch + shift)
        return self.blocks[1](h)


class InPlace(Blocks):
    """In-place operations right before and right after any cut."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h[:, 0] = 0
        h = F.relu(self.blocks[1](h), inplace=True)
        h = h * 3
        h.mul_(2)
        h = F.relu(self.blocks[2](h), inplace=True)
        base = h + 1
        h = self.blocks[0](base)
        h += base
        h[1:, 1:3].mul_(-1)
        return h.add_(1)


class Aliases(Blocks):
    """Values that share memory cross together, and one of them is written."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.blocks[0](x)
        left, right = base[:, :2], base.narrow(1, 2, WIDTH - 2)
        flat = base.view(-1)
        middle = self.blocks[1](base.clone())
        base.mul_(middle.sigmoid())
        rows = middle.unbind(0)
        h = torch.cat([left * 2, right], 1) + flat.view_as(base) + torch.stack(rows)
        transposed = h.t()
        transposed.add_(1)
        return self.blocks[2](h) + transposed.t()


class Reversed(torch.autograd.Function):
    """Gives its input back; its gradient is reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class ScaledSquare(torch.autograd.Function):
    """Two results and a parameter; the gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, power: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y = x * weight
        return y.pow(power), y + 1

    @staticmethod
    def backward(ctx: Any, squared: Tensor, other: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return squared * 3 * weight + other * 0.5, (squared * x).sum(0), None


class Doubled(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


bound_early = Reversed.apply


class CustomFunctions(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = bound_early(self.blocks[0](x))
        squared, other = ScaledSquare.apply(h, self.weight, 2)
        h = Doubled.apply(self.blocks[1](squared))
        return self.blocks[2](h) + other


class Checkpointed(Blocks):
    """User checkpoints around dropout, nested in a module."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.dropout = nn.Dropout(0.5)

    def piece(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.dropout(self.blocks[1](self.blocks[0](x).relu())) * scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        h = h + checkpoint(self.piece, h, 2.0, use_reentrant=self.use_reentrant)
        h = checkpoint_sequential(
            nn.Sequential(self.blocks[1], nn.Tanh(), self.blocks[2]), 2, h, use_reentrant=self.use_reentrant
        )
        early = h.detach().sin()
        h = self.blocks[1](h)

        def with_early(x: Tensor) -> Tensor:  # uses a value that it is not given
            return self.piece(x) + early

        return self.blocks[2](h) + checkpoint(with_early, h, use_reentrant=self.use_reentrant)


class AuxiliaryBlock(nn.Module):
    def __init__(self, store: list[list[Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).relu()
        self.store[0].append(h.pow(2).mean())
        return x + h


class AuxiliaryLosses(nn.Module):
    """A list that blocks fill on the side; router logits on a module's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.store: list[list[Tensor]] = [[]]
        self.blocks = nn.ModuleList(AuxiliaryBlock(self.store) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.store[0].clear()
        h = batch
        for block in self.blocks:
            h = block(h)
            block.norm = h.norm()
        loss = h.pow(2).mean() + 0.1 * sum(self.store[0]) + self.blocks[1].norm
        self.store[0].clear()
        self.blocks.apply(lambda module: module.__dict__.pop("norm", None))
        return loss


class Hooks(Blocks):
    """Hooks that change and capture inputs, outputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[str, Tensor] = {}
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks[0].register_forward_hook(self.capture)
        self.blocks[1].register_forward_hook(self.twice)
        self.blocks[1].register_forward_pre_hook(self.shift)
        self.blocks[2].register_full_backward_hook(self.scale)
        self.block[0].register_forward_hook(self.twice)
        self.block.register_full_backward_pre_hook(self.scale_output)

    def capture(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.captured["output"] = output

    def twice(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 2

    def shift(self, module: nn.Module, args: Any) -> Any:
        return (args[0] + 1,)

    def scale(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return (grad_input[0] * 3,)

    def scale_output(self, module: nn.Module, grad_output: Any) -> Any:
        return (grad_output[0] * 5,)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.block(x) + self.captured.pop("output")


class SharedParts(nn.Module):
    """Tied, frozen and unused parameters, modules called several times, tables used outside modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(8, WIDTH))
        self.block = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        h = self.embedding(batch)
        h = torch.cat([self.class_token.expand(len(batch), -1, -1), h], 1) + self.positions[: batch.shape[1] + 1]
        h = self.norm(self.block(h)) * self.scale
        h = self.middle(self.frozen(h))
        h = self.norm(self.block(h).relu() + h)
        logits = self.head(h[:, 1:])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.flatten())
        return {"loss": loss, "hidden": h, "size": len(batch), "logits": [logits]}

    validation_step = training_step


class RandomParts(Blocks):
    """Draws in the step, in modules, by torch and by Python; dropout after them."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.masked_fill(torch.rand(x.shape) < 0.3, 0)
        for block in self.blocks:
            if torch.rand(()) < 2:
                h = F.dropout(block(h), 0.3) * random.uniform(1, 2)
            h = h + torch.randn(WIDTH) * 0.1
        noise = torch.randn_like(h)
        return F.dropout(h + noise, 0.1)


class DropBlock(nn.Module):
    """LayerDrop: skips its layer by a draw."""

    def __init__(self, by_python: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.by_python = by_python

    def forward(self, x: Tensor) -> Tensor:
        draw = random.random() if self.by_python else float(torch.rand(()))
        return x + self.linear(x) * (draw < 0.5)


class LayerDrop(nn.Module):
    def __init__(self, by_python: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DropBlock(by_python) for _ in range(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.pow(2).mean()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Sample:
    inputs: Tensor
    extra: dict[str, Any]


class Containers(Blocks):
    """Values travel in every kind of container, into and out of modules."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: Pair, *, sample: Sample, flag: bool = True) -> dict[str, Any]:
            h = self.linear(pair.first)
            return {"pair": Pair(h, pair.second + h), "sample": Sample(h * 2, {"x": [h, None]}), "flag": flag}

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sample, (pair, numbers) = batch["sample"], batch["rest"]
        h = self.blocks[0](sample.inputs)
        for part in self.parts:
            out = part(Pair(h, pair.second), sample=sample)
            pair, sample = out["pair"], out["sample"]
            h = pair.first + sample.extra["x"][0]
        return (h + pair.second).pow(2).mean() * len(numbers)


class MaskedIndexing(Blocks):
    """Indexing by a mask of the batch; where and scatter."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        h = self.blocks[0](x)
        h = self.blocks[1](h[mask]).sum(0) + h
        h = h.index_select(0, torch.tensor([1, 0])).where(x[:2] > 0, 0.0)
        out = torch.zeros(2, 12, dtype=x.dtype).scatter(1, torch.arange(WIDTH).expand(2, -1), self.blocks[2](h))
        return out[x[:2, :1].squeeze(1) != 7]


class WrittenBuffers(Blocks):
    """Statistics, a counter and a queue that the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(8, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.blocks[0](x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.queue[int(self.pointer) : int(self.pointer) + len(x)] = h
            self.pointer.add_(len(x)).remainder_(8)
        h = self.blocks[1](h - self.average)
        return self.blocks[2](h) @ self.queue.clone().t()


class WrittenParameters(Blocks):
    """A step that clamps a weight and follows it with a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[0](x)
        with torch.no_grad():
            self.blocks[1].weight.clamp_(-0.1, 0.1)
            self.blocks[1].bias.data.mul_(0.5)
        h = self.blocks[1](h.relu())
        h = self.blocks[2](h)
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.blocks[0].weight, alpha=0.5)
        return h.relu() + self.teacher(x)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.conv(3, 4), self.conv(4, 6, 2), self.conv(6, 6, 2)])
        self.up = nn.ModuleList([self.conv(12, 6), self.conv(10, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for block, skip in zip(self.up, (skips[1], skips[0]), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, target = batch
        return F.mse_loss(self(images), target)


class Sequence(nn.Module):
    """A module of torch's own between an embedding and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.inner = inner
        self.head = nn.Linear(8, 11)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.embedding(batch)
        if isinstance(self.inner, nn.TransformerEncoder):
            h = self.inner(h, src_key_padding_mask=batch == 3)
        else:
            h, _ = self.inner(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), batch.flatten())

    validation_step = training_step


class Normalised(nn.Module):
    """Weight norm and spectral norm, by parametrization and by hook."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations = nn.utils.parametrizations
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.third = parametrizations.weight_norm(nn.Conv1d(1, 3, 3, padding=1))
        self.head = nn.Linear(3 * WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.second(self.first(batch).relu())
        return self.head(self.third(h[:, None]).flatten(1)).pow(2).mean()
