"""Runs one stage's list of actions, over any transport."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_autopipe.core.errors import AutoPipeError, PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.runtime.errors import CommunicationError, StageError
from lightning_autopipe.runtime.stage import StageForward, StageOutput
from lightning_autopipe.runtime.tensor_spec import TensorSpec
from lightning_autopipe.runtime.transport import Direction, StepPlan, Transport

_MAX_UNRELEASED_SENDS = 4
"""How many messages whose tensors no stash keeps (gradients, activations in evaluation) may be under way at once."""


class ExecutionObserver(Protocol):
    """Is told what an executor did, and when."""

    def ran(self, action: Action, waited_from_s: float, started_s: float, ended_s: float) -> None:
        """Take note of one action; called on the executor's thread right after it.

        Args:
            action: A forward or backward, or a part of a backward.
            waited_from_s: `time.perf_counter()` when the rank turned to the action.
            started_s: When its input was there.
            ended_s: When it had ended, with its sends started.
        """
        ...


@dataclass(slots=True)
class _LiveMicrobatch:
    """What a micro-batch keeps alive on this stage between its forward and its backward."""

    received: tuple[Tensor, ...]
    output: StageOutput


class StageExecutor:
    """Runs the forwards and backwards of one stage in the order of a schedule.

    Between two actions it receives what the next one needs and sends what the last one gave. A micro-batch's tensors
    are let go right after its backward, or right after its forward where the schedule has no backward for it.

    Gradients go where autograd puts them (`parameter.grad`, on top of what is there); the caller sets them aside first.
    """

    def __init__(self, *, stage_index: int, num_stages: int, transport: Transport) -> None:
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.current_action: Action | None = None
        """The action that runs, waits or failed; None between steps."""
        self.peak_live_microbatches = 0
        """The largest number of micro-batches between forward and backward at a time, in the last step."""
        self.observer: ExecutionObserver | None = None
        """Told of every action; None: no cost."""
        self._transport = transport
        self._live: dict[int, _LiveMicrobatch] = {}
        self._unreleased: deque[tuple[Direction, int]] = deque()

    def run(
        self, stage: StageForward, schedule: Schedule, *, before_last_backward: Callable[[], None] | None = None
    ) -> None:
        """Run one step to its end, waiting in the transport for what other stages send.

        Args:
            stage: Called once for each micro-batch.
            schedule: For all stages, lowered or not. Micro-batches without a backward run under the caller's grad mode
                and keep nothing.
            before_last_backward: Called once, when the rank turns to the last action that gives parameter gradients;
                never where none does.

        Raises:
            StageError: The stage's forward or backward raised something else than an `AutoPipeError`.
            CommunicationError: A message did not get through within the transport's limit.
            PlanError: The schedule does not fit.
        """
        for action in self.advance(stage, schedule, before_last_backward):
            raise AssertionError(f"{action} has no input and this transport does not wait; use InProcessPipeline")

    def advance(
        self, stage: StageForward, schedule: Schedule, before_last_backward: Callable[[], None] | None = None
    ) -> Iterator[Action]:
        """Like `run`, but yield the next action whenever its input has not arrived, so that other stages can run."""
        actions = self._actions(schedule)
        with_backward = {action.microbatch_index for action in actions if action.type is ActionType.BACKWARD}
        self._unreleased.clear()
        self.peak_live_microbatches = 0
        indices = sorted({action.microbatch_index for action in actions})
        plan = StepPlan(
            activation_order=_order(schedule, self.stage_index - 1, ActionType.FORWARD),
            gradient_order=_order(schedule, self.stage_index + 1, ActionType.BACKWARD),
            # What crosses without a backward may differ in requires_grad alone.
            signatures={index: (index in with_backward, stage.signature(index)) for index in indices},
        )
        observer = self.observer
        last_backward = max((i for i, action in enumerate(actions) if action.type.ends_backward), default=None)
        try:
            self._transport.begin_step(plan)
            for position, action in enumerate(actions):
                self.current_action = action
                waited_from_s = time.perf_counter() if observer is not None else 0.0
                if position == last_backward and before_last_backward is not None:
                    before_last_backward()
                while not self._input_has_arrived(action):
                    yield action
                values = self._receive(action)
                started_s = time.perf_counter() if observer is not None else 0.0
                if action.type is ActionType.FORWARD:
                    self._forward(stage, action.microbatch_index, values, keep=action.microbatch_index in with_backward)
                else:
                    self._backward(action.microbatch_index, values)
                if observer is not None:
                    observer.ran(action, waited_from_s, started_s, time.perf_counter())
            self._transport.end_step()
            self.current_action = None
        finally:
            self._live.clear()  # after an error: somebody may hold on to it, and to this generator

    def _actions(self, schedule: Schedule) -> list[Action]:
        if schedule.num_stages != self.num_stages:
            raise PlanError(
                f"schedule {schedule.name!r} has {schedule.num_stages} stages, this pipeline {self.num_stages}"
            )
        # A lowered list has its sends right behind the computation that gives the value and its receives before the one
        # that takes it. That happens here anyway, only that receives are posted earlier and no send blocks.
        actions = [action for action in schedule.actions_by_rank[self.stage_index] if action.type.is_compute]
        if any(action.slice_index is not None for action in actions):
            raise PlanError(f"schedule {schedule.name!r} has sliced micro-batches; the executor cannot run them yet")
        return actions

    @property
    def _is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def _is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def _input_has_arrived(self, action: Action) -> bool:
        if action.type is ActionType.FORWARD:
            return self._is_first or self._transport.has_arrived(Direction.FORWARD, action.microbatch_index)
        return self._is_last or self._transport.has_arrived(Direction.BACKWARD, action.microbatch_index)

    # One action ------------------------------------------------------------

    def _receive(self, action: Action) -> tuple[Tensor, ...]:
        """The activations or gradients that an action takes from a neighbour; nothing at the ends of the pipeline."""
        if action.type is ActionType.FORWARD:
            return () if self._is_first else self._transport.receive(Direction.FORWARD, action.microbatch_index)
        return () if self._is_last else self._transport.receive(Direction.BACKWARD, action.microbatch_index)

    def _forward(self, stage: StageForward, microbatch_index: int, received: tuple[Tensor, ...], *, keep: bool) -> None:
        with self._named_errors(microbatch_index, Direction.FORWARD):
            output = stage.forward(microbatch_index, received)
        if self._is_last:
            assert not output.sent, "the last stage has nobody to send to"
        else:
            with self._named_errors(microbatch_index, Direction.FORWARD):
                self._transport.send(Direction.FORWARD, microbatch_index, output.sent)
        if not keep:
            if not self._is_last:
                self._release_later(Direction.FORWARD, microbatch_index)
            return
        if not self._is_last:
            specs = [TensorSpec.of(tensor) for tensor in output.sent if tensor.requires_grad]
            self._transport.expect_gradients(microbatch_index, specs)
        self._live[microbatch_index] = _LiveMicrobatch(received, output)
        self.peak_live_microbatches = max(self.peak_live_microbatches, len(self._live))

    def _backward(self, microbatch_index: int, gradients: tuple[Tensor, ...]) -> None:
        live = self._live.pop(microbatch_index)
        with self._named_errors(microbatch_index, Direction.BACKWARD):
            input_gradients = _run_backward(live, gradients)
        if not self._is_last:
            self._transport.release(Direction.FORWARD, microbatch_index)
        if not self._is_first and input_gradients:
            self._transport.send(Direction.BACKWARD, microbatch_index, input_gradients)
            self._release_later(Direction.BACKWARD, microbatch_index)

    def _release_later(self, direction: Direction, microbatch_index: int) -> None:
        self._unreleased.append((direction, microbatch_index))
        if len(self._unreleased) > _MAX_UNRELEASED_SENDS:
            self._transport.release(*self._unreleased.popleft())

    @contextlib.contextmanager
    def _named_errors(self, microbatch_index: int, direction: Direction) -> Iterator[None]:
        """Say where an error happened: wrap what is not ours, complete what is."""
        where = {"stage_index": self.stage_index, "microbatch_index": microbatch_index, "direction": direction.value}
        try:
            yield
        except CommunicationError:
            raise
        except AutoPipeError as error:
            # A user's `except CaptureError` must go on to work, so these keep their type.
            for name, value in where.items():
                if getattr(error, name, None) is None:
                    setattr(error, name, value)
            raise
        except Exception as error:
            raise StageError(
                f"stage {self.stage_index} of {self.num_stages} failed in the {direction.value} of micro-batch "
                f"{microbatch_index}: {type(error).__name__}: {error}",
                stage_index=self.stage_index,
                microbatch_index=microbatch_index,
                direction=direction.value,
            ) from error


def _order(schedule: Schedule, stage_index: int, action_type: ActionType) -> tuple[int, ...]:
    if not 0 <= stage_index < schedule.num_stages:
        return ()
    actions = schedule.actions_by_rank[stage_index]
    return tuple(action.microbatch_index for action in actions if action.type is action_type)


def _run_backward(live: _LiveMicrobatch, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Back-propagate a micro-batch; give the gradients of the received leaves that require one."""
    roots = [tensor for tensor in live.output.sent if tensor.requires_grad]
    root_gradients: list[Tensor | None] = list(gradients)
    assert len(roots) == len(root_gradients), (len(roots), len(root_gradients))
    loss = live.output.loss
    if loss is not None and loss.requires_grad:
        roots.append(loss)
        root_gradients.append(None)
    if live.output.roots is not None:
        more_roots, more_gradients = live.output.roots()
        roots.extend(more_roots)
        root_gradients.extend(more_gradients)
    if roots:
        with without_autocast():
            torch.autograd.backward(roots, root_gradients)
    input_gradients = []
    for leaf in live.received:
        if not leaf.requires_grad:
            continue
        input_gradients.append(torch.zeros_like(leaf) if leaf.grad is None else _in_layout_of(leaf, leaf.grad))
        leaf.grad = None
    return tuple(input_gradients)


def _in_layout_of(leaf: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the memory order of its leaf, in which the other end expects it."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != leaf.stride():
        gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    return gradient


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Backward in the dtypes that forward chose; nested, so that the outer cache of cast weights stays."""
    with contextlib.ExitStack() as contexts:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                contexts.enter_context(torch.autocast(device_type, enabled=False))
        yield
