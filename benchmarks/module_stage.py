"""A plain module as a stage of our executor, without capture and replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.stage_modules import Seconds
from lightning_autopipe.runtime.stage import StageOutput

Loss = Callable[[Tensor, Tensor], Tensor]


class ModuleStage:
    """A `StageForward` that calls a module, on the first stage with its share of a batch.

    Args:
        module: the stage.
        loss: of a unit's result and its targets; None: not the last stage.
        slices: in how many slices each micro-batch runs; 1 for whole ones.
        num_samples: of a micro-batch.
    """

    def __init__(self, module: nn.Module, *, loss: Loss | None, slices: Sequence[int], num_samples: int) -> None:
        self._module, self._loss, self._slices = module, loss, slices
        self._sizes = [size for number in slices for size in _sizes(num_samples, number)]
        self._shares: Sequence[Tensor] = ()
        self._targets = {size: torch.zeros(size, 1) for size in set(self._sizes)} if loss is not None else {}
        whole = num_samples * len(slices)
        self._weights = {size: torch.tensor(size / whole) for size in self._targets}

    def begin(self, batch: Tensor) -> None:
        """Takes a step's batch, ``[samples, ...]``, on the first stage."""
        self._shares = unit_shares(batch, self._slices)

    def signature(self, unit_index: int) -> Hashable:
        return self._sizes[unit_index]

    def forward(self, unit_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        output = self._module(received[0] if received else self._shares[unit_index])
        if self._loss is None:
            return StageOutput(sent=(output,))
        size = self._sizes[unit_index]
        loss = self._loss(output, self._targets[size])
        # The weight goes in as the loss's gradient: a product would be one operation more than torch has.
        return StageOutput(roots=lambda: ((loss,), (self._weights[size],)))


def _sizes(num_samples: int, number: int) -> list[int]:
    return [len(part) for part in torch.empty(num_samples).chunk(number)]


def unit_shares(batch: Tensor, slices: Sequence[int]) -> list[Tensor]:
    """The batch's share of each unit: of micro-batches of equal size, or of their slices.

    Args:
        batch: ``[samples, ...]``.
        slices: in how many slices each micro-batch runs; 1 for whole ones.
    """
    return [
        share
        for microbatch, number in zip(batch.chunk(len(slices)), slices, strict=True)
        for share in ((microbatch,) if number == 1 else microbatch.chunk(number))
    ]


def seconds_alone(
    module: nn.Module, *, inputs: Tensor, is_first: bool, loss: Loss | None, num_repeats: int, weight_share: float
) -> Seconds:
    """What a stage takes for a micro-batch of some size, by medians of runs without others.

    Args:
        module: the stage.
        inputs: of that size.
        is_first: whether it hands no gradient on.
        loss: of the last stage.
        num_repeats: runs.
        weight_share: what share of the backward is known to be for gradients of parameters.
    """
    forward_s: list[float] = []
    backward_s: list[float] = []
    for _ in range(num_repeats):
        received = inputs if is_first else inputs.detach().requires_grad_()
        begin = time.perf_counter()
        output = module(received)
        root = output if loss is None else loss(output, torch.zeros(len(inputs), 1))
        middle = time.perf_counter()
        torch.autograd.backward([root], [torch.zeros_like(root)])
        forward_s.append(middle - begin)
        backward_s.append(time.perf_counter() - middle)
    whole_s = statistics.median(backward_s)
    return Seconds(statistics.median(forward_s), (1 - weight_share) * whole_s, weight_share * whole_s)
