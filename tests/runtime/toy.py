"""A small model cut by hand: what the capture layer does for real modules, written out for tests of the runtime."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from lightning_autopipe.core.schedule import Schedule
from lightning_autopipe.runtime.in_process import InProcessPipeline
from lightning_autopipe.runtime.stage import StageOutput

NUM_BLOCKS = 4
VOCABULARY = 11
WIDTH = 6


class Toy(nn.Module):
    """Embedding, four blocks, head.

    Block 0's output is added again in block 3, `phase` needs no gradient, the mask is bool, one value nobody reads.
    """

    def __init__(self, *, frozen_blocks: Sequence[int] = (), seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(NUM_BLOCKS))
            self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        for index in frozen_blocks:
            self.blocks[index].requires_grad_(False)

    def start(self, ids: Tensor) -> dict[str, Tensor]:
        h = self.embedding(ids)
        phase = torch.linspace(0, 1, ids.shape[1], dtype=h.dtype)[None, :, None].expand(ids.shape[0], -1, WIDTH)
        return {"h": h, "phase": phase, "mask": ids != 0, "unused": h.detach().sum().round().int()}

    def block(self, index: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        h = values["h"] + torch.tanh(self.blocks[index](values["h"]) + values["phase"]) * values["mask"][..., None]
        if index == 1:
            h = h.transpose(1, 2).contiguous().transpose(1, 2)  # crosses in another memory order
        if index == 3:
            h = h + values["skip"]
        values = {**values, "h": h}
        if index == 0:
            values["skip"] = h
        return values

    def end(self, ids: Tensor, values: dict[str, Tensor]) -> Tensor:
        """The mean of a per-sample loss over [batch]."""
        logits = self.head(values["h"])
        return nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(dim=1).mean()

    def forward(self, ids: Tensor) -> Tensor:
        values = self.start(ids)
        for index in range(NUM_BLOCKS):
            values = self.block(index, values)
        return self.end(ids, values)


class ToyStage:
    """A `StageForward`: blocks [first, last) of a `Toy` on the micro-batches of one batch of ids[batch, length]."""

    def __init__(
        self, toy: Toy, *, first: int, last: int, microbatches: Sequence[Tensor], total: int, train: bool = True
    ) -> None:
        self.toy = toy
        self.blocks = range(first, last)
        self.microbatches = microbatches
        self.total = total
        self.train = train
        self.losses: dict[int, Tensor] = {}

    def signature(self, microbatch_index: int) -> Hashable:
        flags = tuple(parameter.requires_grad for parameter in self.toy.parameters())
        return (tuple(self.microbatches[microbatch_index].shape), flags)

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        ids = self.microbatches[microbatch_index]
        if self.blocks.start == 0:
            assert received == ()
            values = self.toy.start(ids)
        else:
            names = ["h", "phase", "mask", "unused", "skip"]
            assert all(tensor.is_leaf for tensor in received)
            values = dict(zip(names, received, strict=True))
        for index in self.blocks:
            values = self.toy.block(index, values)
        if self.blocks.stop < NUM_BLOCKS:
            return StageOutput(sent=tuple(values.values()))
        loss = self.toy.end(ids, values)
        self.losses[microbatch_index] = loss.detach()
        return StageOutput(loss=loss * (len(ids) / self.total) if self.train else None)


def cut(
    toys: Sequence[Toy], ids: Tensor, num_microbatches: int, *, total: int | None = None, train: bool = True
) -> list[ToyStage]:
    """One stage for each toy (the same one or copies), over ids[batch, length] split into uneven micro-batches."""
    num_stages = len(toys)
    bounds = [round(NUM_BLOCKS * index / num_stages) for index in range(num_stages + 1)]
    microbatches = ids.tensor_split(num_microbatches)
    return [
        ToyStage(
            toys[index],
            first=bounds[index],
            last=bounds[index + 1],
            microbatches=microbatches,
            total=total or len(ids),
            train=train,
        )
        for index in range(num_stages)
    ]


def weighted_loss(stage: ToyStage) -> Tensor:
    """The loss of the whole batch from the last stage's micro-batches."""
    parts = [stage.losses[i] * (len(ids) / stage.total) for i, ids in enumerate(stage.microbatches)]
    return torch.stack(parts).sum()


def batch(num_samples: int, length: int = 5, seed: int = 1) -> Tensor:
    """ids[num_samples, length]."""
    return torch.randint(VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(seed))


def gradients(toy: nn.Module) -> dict[str, Tensor | None]:
    """Every parameter's gradient by name."""
    return {name: parameter.grad for name, parameter in toy.named_parameters()}


def reference(toy: Toy, ids: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of the uncut model on the whole batch."""
    loss = toy(ids)
    loss.backward()
    result = gradients(toy)
    for parameter in toy.parameters():
        parameter.grad = None
    return loss.detach(), result


def assert_same_gradients(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Equal names, equal None, numbers within 1e-12."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        other = actual[name]
        assert (other is None) == (gradient is None), name
        if gradient is not None and other is not None:
            torch.testing.assert_close(
                other, gradient, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def run_in_process(stages: Sequence[ToyStage], schedule: Schedule) -> InProcessPipeline:
    """One step of all stages in this process."""
    pipeline = InProcessPipeline(len(stages))
    pipeline.run(stages, schedule)
    return pipeline
