"""What one stage with sleeping layers does: it sleeps where layers would compute, and gives tensors of their size."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.planner.workload import StageWork
from lightning_autopipe.runtime.stage import StageOutput

FLOAT_BYTES = 4
_PR_SET_TIMERSLACK = 29


def be_prompt() -> None:
    """Lets this thread, and those that it starts, run as soon as a sleep is over, as far as the system allows that.

    A device that computes does not wait for a core: others' work on this machine is to disturb as little as it can.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class _Sleep(torch.autograd.Function):
    """Sleeps, and gives a tensor of its own instead of what it gets; the same backwards."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_s: float, backward_s: float, output: Tensor) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s, ctx.gradient = backward_s, values.detach()
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(ctx.backward_s)
        return ctx.gradient, None, None, None


class SleepingStage:
    """A `StageForward` of one stage, for any number of micro-batches.

    What it sends is the same memory each time, and the gradient of what it received has that one's memory: nobody
    reads the numbers.

    Args:
        work: seconds to sleep and bytes to send.
        is_last: whether it ends with a loss.
    """

    def __init__(self, work: StageWork, *, is_last: bool) -> None:
        unit = work.units[0]
        self._forward_s, self._backward_s = unit.forward_s, unit.backward_s
        self._is_last = is_last
        self._source = torch.zeros((), requires_grad=True)
        num_values = 1 if is_last else max(1, round(unit.sent_bytes / FLOAT_BYTES))
        self._output = torch.zeros(num_values)

    def signature(self, microbatch_index: int) -> Hashable:
        return ()

    def forward(self, microbatch_index: int, received: tuple[Tensor, ...]) -> StageOutput:
        values = received[0] if received else self._source
        output: Tensor = _Sleep.apply(values, self._forward_s, self._backward_s, self._output)  # type: ignore[no-untyped-call]
        return StageOutput(loss=output.sum()) if self._is_last else StageOutput(sent=(output,))

    def alone(self, work: StageWork, num_repeats: int) -> StageWork:
        """The stage with the seconds that its forward and its backward really take, by medians of runs without others.

        Args:
            work: the stage.
            num_repeats: runs.
        """
        forward_s, backward_s = [], []
        for _ in range(num_repeats):
            received = torch.zeros(1, requires_grad=True)
            begin = time.perf_counter()
            output = self.forward(0, (received,))
            middle = time.perf_counter()
            root = output.loss if output.loss is not None else output.sent[0]
            torch.autograd.backward([root], [torch.zeros_like(root)])
            forward_s.append(middle - begin)
            backward_s.append(time.perf_counter() - middle)
        unit = replace(work.units[0], forward_s=statistics.median(forward_s), backward_s=statistics.median(backward_s))
        return replace(work, units=(unit,))
