"""A plain module as a stage of our executor, without capture and replay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable

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
        units: the batch's share of each unit (micro-batch, slice), on all stages: others than the first count samples.
    """

    def __init__(self, module: nn.Module, *, loss: Loss | None, units: dict[tuple[int, int | None], Tensor]) -> None:
        self.module, self._loss, self._units = module, loss, units
        self._num_samples = sum(len(share) for share in units.values())

    def signature(self, microbatch_index: int, slice_index: int | None = None) -> Hashable:
        return len(self._units[microbatch_index, slice_index])

    def forward(
        self, microbatch_index: int, received: tuple[Tensor, ...], slice_index: int | None = None
    ) -> StageOutput:
        share = self._units[microbatch_index, slice_index]
        output = self.module(received[0] if received else share)
        if self._loss is None:
            return StageOutput(sent=(output,))
        loss = self._loss(output, torch.zeros(len(share), 1))
        return StageOutput(loss=loss * (len(share) / self._num_samples))


def split_units(
    batch: Tensor, num_microbatches: int, sliced: Callable[[int], int]
) -> dict[tuple[int, int | None], Tensor]:
    """The batch's share of each unit.

    Args:
        batch: ``[samples, ...]``.
        num_microbatches: of equal size.
        sliced: how many slices a micro-batch has; 1 for none.
    """
    units: dict[tuple[int, int | None], Tensor] = {}
    for index, microbatch in enumerate(batch.chunk(num_microbatches)):
        number = sliced(index)
        if number == 1:
            units[index, None] = microbatch
        else:
            units.update(((index, part), share) for part, share in enumerate(microbatch.chunk(number)))
    return units


def seconds_alone(module: nn.Module, *, inputs: Tensor, is_first: bool, loss: Loss | None, num_repeats: int) -> Seconds:
    """What a stage takes for a micro-batch of some size, by medians of runs without others."""
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
    return Seconds(statistics.median(forward_s), statistics.median(backward_s))
