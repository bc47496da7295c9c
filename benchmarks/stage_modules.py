"""Stages as plain modules, for our executor and for peers alike: some that sleep, some with next to nothing to do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4


class StageMaker(Protocol):
    """Makes the stages of one model, anywhere."""

    def stage(self, stage_index: int, num_stages: int) -> nn.Module:
        """A module from ``[samples, width]`` to ``[samples, width]``, or to ``[samples, 1]`` on the last stage."""
        ...

    def inputs(self, num_samples: int) -> Tensor:
        """What the first stage takes."""
        ...


@dataclass(frozen=True, slots=True)
class Seconds:
    """What a stage takes for one micro-batch."""

    forward: float
    input: float
    """Of the backward for the gradient of what came in."""
    weight: float = 0.0
    """Of the backward for the gradients of parameters."""

    @property
    def backward(self) -> float:
        """The whole backward."""
        return self.input + self.weight

    def times(self, share: float) -> Seconds:
        """So many times as long."""
        return Seconds(share * self.forward, share * self.input, share * self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeping:
    """Stages that sleep for as long as layers would compute, and hand on tensors of the size that layers would give."""

    seconds: Mapping[int, Seconds]
    """Of every stage, by the samples in a micro-batch."""
    sample_bytes: int
    """Bytes of one sample's activations at a boundary."""

    def stage(self, stage_index: int, num_stages: int) -> nn.Module:
        is_first, is_last = stage_index == 0, stage_index == num_stages - 1
        return _SleepingStage(self, is_first=is_first, is_last=is_last)

    def inputs(self, num_samples: int) -> Tensor:
        return torch.zeros(num_samples, 1)

    @property
    def width(self) -> int:
        """Values of a sample at a boundary."""
        return max(1, round(self.sample_bytes / FLOAT_BYTES))


class _SleepingStage(nn.Module):
    """Its backward is a fork: a sum of two numbers, of which one leads to what came in, the other to the parameter.

    So whoever splits backwards in two sleeps for each part once. The fork, and the way from it to the parameter, are of
    torch's own operations: custom functions compute all their gradients at once.
    """

    def __init__(self, model: Sleeping, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self._seconds, self._width, self._is_first = model.seconds, 1 if is_last else model.width, is_first
        self.weight = nn.Parameter(torch.zeros(()))
        if is_first:
            # In place of the gradient that a stage in the middle makes: the first one is to take as long as the others.
            self.source = nn.Parameter(torch.zeros(()))

    def forward(self, values: Tensor) -> Tensor:
        num_samples = values.shape[0]
        seconds = self._seconds[num_samples]
        source = self.source if self._is_first else values
        to_weight = self.weight * 1.0
        if seconds.weight:
            to_weight.register_hook(partial(_sleep, seconds.weight))
        fork = _ToInput.apply(source, seconds.input) + to_weight
        output: Tensor = _Forward.apply(fork, seconds.forward, (num_samples, self._width))
        return output


def _sleep(seconds: float, gradient: Tensor) -> None:
    time.sleep(seconds)


class _ToInput(torch.autograd.Function):
    """Gives a number; sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, values.shape
        return values.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return _unread(gradients[0], ctx.shape), None


class _Forward(torch.autograd.Function):
    """Sleeps in its forward; its backward takes no time."""

    @staticmethod
    def forward(ctx: Any, fork: Tensor, seconds: float, shape: tuple[int, ...]) -> Tensor:
        time.sleep(seconds)
        return _unread(fork, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].new_zeros(()), None, None


def _unread(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a shape; nobody reads the numbers of large ones."""
    return like.new_empty(shape) if shape and shape[-1] > 1 else like.new_zeros(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """Stages that really compute, but so little that the runtime is what takes time: they multiply by a parameter."""

    width: int = 16

    def stage(self, stage_index: int, num_stages: int) -> nn.Module:
        return _Scale(self.width, is_last=stage_index == num_stages - 1)

    def inputs(self, num_samples: int) -> Tensor:
        return torch.linspace(-1, 1, num_samples * self.width).reshape(num_samples, self.width)


class _Scale(nn.Module):
    def __init__(self, width: int, *, is_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self._is_last = is_last

    def forward(self, values: Tensor) -> Tensor:
        scaled = values * self.weight
        return scaled.mean(-1, keepdim=True) if self._is_last else scaled
