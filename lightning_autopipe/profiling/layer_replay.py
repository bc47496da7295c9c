"""Running one layer by itself: the step's own code, with what lies outside the layer skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.replay import Replay
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.profiling.stopwatch import Stopwatch
from lightning_autopipe.runtime.split_backward import backward_of_leaves

_KEY = DrawKey(seed=0, step=0, replica_index=0, microbatch_index=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutput:
    """What crosses the layer's end, and the loss where the step ended in it."""

    sent: tuple[Tensor, ...]
    loss: Tensor | None

    def roots(self) -> list[Tensor]:
        """Give the tensors that a backward begins at; a value that only passes through the layer is none of them."""
        found = [tensor for tensor in self.sent if tensor.grad_fn is not None]
        if self.loss is not None and self.loss.grad_fn is not None:
            found.append(self.loss)
        return found


class LayerRunner:
    """Runs forward and backward of the layer that a program holds, on one micro-batch."""

    def __init__(
        self, program: StageProgram, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.program = program
        self._step = step
        self._args = args
        self._kwargs = kwargs

    def forward(self, batch: Any, received: Sequence[Tensor], stopwatch: Stopwatch) -> LayerOutput:
        """Run the layer; `stopwatch` measures from its first operation to its last.

        Raises:
            TraceMismatchError: the step took another path than the traced one.
        """
        replay = _LayerReplay(self.program, received, stopwatch)
        args, kwargs = batch
        run = replay.run(replay.timed(self._step), args, kwargs)
        return LayerOutput(sent=run.sent, loss=_loss(run.result) if self.program.is_last else None)

    def fresh_batch(self) -> Any:
        """Give a copy of the micro-batch, which the step may write."""
        return tree.map_tensors(_copy, (self._args, self._kwargs))

    def backward(
        self,
        output: LayerOutput,
        gradients: Sequence[Tensor | None],
        stopwatch: Stopwatch,
    ) -> None:
        """Back-propagate from the roots of an output."""
        roots = output.roots()
        if not roots:
            return
        with _without_autocast():
            stopwatch.start()
            torch.autograd.backward(roots, list(gradients))
            stopwatch.stop()

    def split_backward(
        self,
        output: LayerOutput,
        gradients: Sequence[Tensor | None],
        received: Sequence[Tensor],
        stopwatches: tuple[Stopwatch, Stopwatch],
    ) -> None:
        """Back-propagate in two parts: to what was received, and then to the parameters."""
        first, second = stopwatches
        leaves = [tensor for tensor in received if tensor.requires_grad]
        with _without_autocast():
            first.start()
            _, rest = backward_of_leaves(output.roots(), list(gradients), leaves)
            first.stop()
            second.start()
            rest.run()
            second.stop()


class _LayerReplay(Replay):
    """A replay that tells a stopwatch where the layer begins and ends, logs nothing, and knows what itself costs."""

    def __init__(self, program: StageProgram, received: Sequence[Tensor], stopwatch: Stopwatch) -> None:
        super().__init__(program, received, _KEY)
        self._stopwatch = stopwatch
        self._has_begun = False

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if self._stopwatch.is_running:
                self._stopwatch.stop()
            return result

        return timed_step

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if not self._has_begun:
            return super().operation(function, args, kwargs, run)
        inside_s = 0.0

        def timed_run(*run_args: Any, **run_kwargs: Any) -> Any:
            nonlocal inside_s
            begin = Stopwatch.host_clock()
            try:
                return run(*run_args, **run_kwargs)
            finally:
                inside_s += Stopwatch.host_clock() - begin

        begin = Stopwatch.host_clock()
        try:
            return super().operation(function, args, kwargs, timed_run)
        finally:
            # A stage of several layers sees few of their operations: what seeing them costs is not the layer's.
            self._stopwatch.excluded_s += Stopwatch.host_clock() - begin - inside_s

    def _arrive(self) -> None:
        if not self._has_begun:
            if self.position >= self.start:
                super()._arrive()
                self._has_begun = True
                self._stopwatch.start()
                return
        elif self.position >= self.stop and not self.program.is_last and self._stopwatch.is_running:
            self._stopwatch.stop()
        super()._arrive()

    def _call(self, function: Callable[..., None]) -> None:
        pass  # nothing is logged


def _loss(result: Any) -> Tensor | None:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        return None
    if loss.dim() != 0 and loss.requires_grad:
        raise CaptureError(f"The step returned a loss of shape {tuple(loss.shape)}; return a scalar tensor.")
    return loss if loss.dim() == 0 else None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Backward in the dtypes that forward chose, as the executor runs it."""
    with contextlib.ExitStack() as contexts:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                contexts.enter_context(torch.autocast(device_type, enabled=False))
        yield
