"""Runs one rank's list of actions, over any transport."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_autopipe.core.errors import AutoPipeError, PlanError
from lightning_autopipe.core.schedule import Action, ActionType, Schedule
from lightning_autopipe.runtime.backward import run_backward, run_input_backward, run_weight_backward
from lightning_autopipe.runtime.errors import CommunicationError, StageError
from lightning_autopipe.runtime.rank_program import RankAction, RankProgram, rank_program
from lightning_autopipe.runtime.split_backward import DeferredBackward
from lightning_autopipe.runtime.stage import StageForward, StageOutput
from lightning_autopipe.runtime.transport import Crossing, Direction, SignatureTable, StepPlan, Transport
from lightning_autopipe.runtime.units import unit_name

_MAX_UNRELEASED_SENDS = 4
"""How many messages whose tensors no stash keeps (gradients, activations in evaluation) may be under way at once."""
_FORWARD, _BACKWARD = ActionType.FORWARD, ActionType.BACKWARD
_FORWARDS, _BACKWARDS = Direction.FORWARD, Direction.BACKWARD
_MAX_PROGRAMS = 8
"""How many schedules stay written out; batches of another size have others."""


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
class _Live:
    """What a unit keeps alive on a stage between its forward and its backward, or the second part of that."""

    received: tuple[Tensor, ...]
    output: StageOutput
    rest: DeferredBackward | None = None


class StageExecutor:
    """Runs the forwards and backwards of one rank's stages in the order of a schedule.

    Between two actions it receives what the next one needs and sends what the last one gave. A unit's tensors are let
    go right after its backward, or right after its forward where the schedule has no backward for it.

    Gradients go where autograd puts them (`parameter.grad`, on top of what is there); the caller sets them aside first.
    """

    def __init__(self, *, stage_index: int, num_stages: int, transport: Transport) -> None:
        """Make the executor of one rank of a pipeline.

        Args:
            stage_index: The rank's (first) stage, which is its place in the pipeline.
            num_stages: Of the pipeline.
            transport: Its connections.
        """
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.current_action: Action | None = None
        """The action that runs, waits or failed; None between steps."""
        self.peak_live_microbatches = 0
        """The largest number of units between forward and the end of their backward at a time, in the last step."""
        self.observer: ExecutionObserver | None = None
        """Told of every action; None: no cost."""
        self._transport = transport
        self._live: dict[int, _Live] = {}
        self._unsent: dict[Crossing, tuple[Tensor, ...]] = {}
        self._unreleased: deque[tuple[Direction, Crossing]] = deque()
        self._signatures = SignatureTable()
        self._programs: deque[RankProgram] = deque(maxlen=_MAX_PROGRAMS)

    def run(
        self,
        stages: StageForward | Mapping[int, StageForward],
        schedule: Schedule,
        *,
        before_last_backward: Callable[[], None] | None = None,
    ) -> None:
        """Run one step to its end, waiting in the transport for what other stages send.

        Args:
            stages: The rank's stage, or several by index; called once for each unit.
            schedule: For all stages, lowered or not. Units without a backward run under the caller's grad mode and keep
                nothing.
            before_last_backward: Called once, when the rank turns to the last action that gives parameter gradients;
                never where none does.

        Raises:
            StageError: The stage's forward or backward raised something else than an `AutoPipeError`.
            CommunicationError: A message did not get through within the transport's limit.
            PlanError: The schedule does not fit.
        """
        for action in self.advance(stages, schedule, before_last_backward):
            raise AssertionError(f"{action} has no input and this transport does not wait; use InProcessPipeline")

    def advance(
        self,
        stages: StageForward | Mapping[int, StageForward],
        schedule: Schedule,
        before_last_backward: Callable[[], None] | None = None,
    ) -> Iterator[Action]:
        """Like `run`, but yield the next action whenever its input has not arrived, so that other stages can run."""
        program = self._program(schedule)
        by_index = stages if isinstance(stages, Mapping) else {self.stage_index: stages}
        transport, observer = self._transport, self.observer
        receive_waits = transport.receive_waits
        self._unreleased.clear()
        self.peak_live_microbatches = 0
        try:
            transport.begin_step(_step_plan(program, by_index[self.stage_index], self._signatures))
            for position, step in enumerate(program.actions):
                self.current_action = action = step.action
                if observer is not None:
                    waited_from_s = time.perf_counter()
                if position == program.last_backward and before_last_backward is not None:
                    before_last_backward()
                values: tuple[Tensor, ...] = ()
                if step.takes is not None:
                    assert step.takes_from is not None
                    if not receive_waits:
                        while not transport.has_arrived(step.takes_from, step.takes):
                            yield action
                    values = transport.receive(step.takes_from, step.takes)
                if observer is not None:
                    started_s = time.perf_counter()
                try:
                    if action.type is _FORWARD:
                        self._forward(step, by_index[action.stage_index], values)
                    else:
                        self._backward(step, values)
                except Exception as error:
                    placed = self._placed(error, action)
                    if placed is error:
                        raise
                    raise placed from error
                values = ()  # while the rank waits for the next one
                if observer is not None:
                    observer.ran(action, waited_from_s, started_s, time.perf_counter())
            transport.end_step()
            self.current_action = None
        finally:
            self._live.clear()  # after an error: somebody may hold on to it, and to this generator
            self._unsent.clear()

    def _program(self, schedule: Schedule) -> RankProgram:
        for program in self._programs:
            if program.schedule is schedule:
                return program
        require_stages(schedule, self.num_stages)
        program = rank_program(schedule, self.stage_index)
        self._programs.appendleft(program)
        return program

    # One action ------------------------------------------------------------

    def _forward(self, step: RankAction, stage: StageForward, received: tuple[Tensor, ...]) -> None:
        output = stage.forward(step.unit_index, received)
        crossing = step.gives
        if crossing is None:
            assert not output.sent, "the last stage has nobody to send to"
        elif not step.sends:
            self._unsent[crossing] = output.sent
        else:
            earlier = [self._unsent.pop(sent) for sent in step.sends[:-1]]
            self._transport.send(_FORWARDS, step.sends, [*earlier, output.sent])
            if not step.has_backward and self._transport.is_loaded:
                for sent in step.sends:
                    self._release_later(_FORWARDS, sent)
        if step.has_backward:
            self._live[step.key] = _Live(received, output)
            if len(self._live) > self.peak_live_microbatches:
                self.peak_live_microbatches = len(self._live)

    def _backward(self, step: RankAction, gradients: tuple[Tensor, ...]) -> None:
        live = self._live[step.key]
        part = step.action.type
        if part is _BACKWARD:
            self._send_gradients(step, run_backward(live.received, live.output, gradients))
        elif part is ActionType.BACKWARD_WEIGHT:
            assert live.rest is not None
            run_weight_backward(live.rest)
        else:
            found, live.rest = run_input_backward(live.received, live.output, gradients)
            live.received, live.output = (), StageOutput()
            self._send_gradients(step, found)
        if step.ends_backward:
            del self._live[step.key]

    def _send_gradients(self, step: RankAction, gradients: tuple[Tensor, ...]) -> None:
        transport = self._transport
        if step.takes is not None and transport.is_loaded:
            transport.release(_FORWARDS, step.takes)
        if step.gives is not None and gradients:
            transport.send(_BACKWARDS, step.sends, (gradients,))
            if transport.is_loaded:
                self._release_later(_BACKWARDS, step.gives)

    def _release_later(self, direction: Direction, crossing: Crossing) -> None:
        self._unreleased.append((direction, crossing))
        if len(self._unreleased) > _MAX_UNRELEASED_SENDS:
            self._transport.release(*self._unreleased.popleft())

    def _placed(self, error: Exception, action: Action) -> Exception:
        """Say where an error happened: wrap what is not ours, complete what is."""
        if isinstance(error, CommunicationError):
            return error
        direction = Direction.FORWARD if action.type is ActionType.FORWARD else Direction.BACKWARD
        where = {
            "stage_index": action.stage_index,
            "microbatch_index": action.microbatch_index,
            "slice_index": action.slice_index,
            "direction": direction.value,
        }
        if isinstance(error, AutoPipeError):
            # A user's `except CaptureError` must go on to work, so these keep their type.
            for name, value in where.items():
                if getattr(error, name, None) is None:
                    setattr(error, name, value)
            return error
        return StageError(
            f"stage {action.stage_index} of {self.num_stages} failed in the {direction.value} of "
            f"{unit_name(action.unit)}: {type(error).__name__}: {error}",
            **where,  # type: ignore[arg-type]
        )


def require_stages(schedule: Schedule, num_stages: int) -> None:
    """Raise PlanError where a schedule is for another number of stages."""
    if schedule.num_stages != num_stages:
        raise PlanError(f"schedule {schedule.name!r} has {schedule.num_stages} stages, this pipeline {num_stages}")


def _step_plan(program: RankProgram, stage: StageForward, table: SignatureTable) -> StepPlan:
    # What crosses without a backward may differ in requires_grad alone.
    signatures = {
        unit: table.signature((unit in program.units_with_backward, stage.signature(unit_index)))
        for unit_index, unit in enumerate(program.units)
    }
    return StepPlan(
        activation_order=program.activation_order,
        gradient_order=program.gradient_order,
        activation_window=program.activation_window,
        gradient_window=program.gradient_window,
        signatures=signatures,
    )
