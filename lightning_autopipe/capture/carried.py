"""Finding what a step carries from one call to the next in plain attributes.

A stage leaves the step at its last cut: an attribute that the step sets behind it (`self.n = i` after the loss) keeps
its old value there. That matters where the next call uses it before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.draws import seed_python, seed_torch
from lightning_autopipe.capture.preserve import PreservedState, preserved_state
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.proof import Proof, same_constants
from lightning_autopipe.capture.records import StepTrace


@dataclass(frozen=True, slots=True)
class CarriedState:
    """Attributes that a step sets behind its first operation, and where the next call first differs by them."""

    names: tuple[str, ...]
    first_use: int


def find_carried_state(
    trace: StepTrace,
    table: CutTable,
    module: nn.Module,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
) -> CarriedState | None:
    """Replay a step twice on shapes, the second time with the attributes that the first has set late, and compare.

    What both calls set before their first operation is set on every stage. A tensor that the second call has in store
    (a mask made once) leaves out operations on the batch, which changes nothing.
    """
    if not trace.modules_changed:
        return None
    program = StageProgram(trace, table, module, start=0, stop=None, device=device, use_treatments=False)
    with preserved_state(module) as initial:
        first = _History(program)
        first.run_to_its_end(step, args, kwargs)
        if first.early is None:
            return None
        late = initial.restore_early_changes(first.early)
        if not late:
            return None
        second = _History(program)
        second.run_to_its_end(step, args, kwargs)
    may_leave_out = any(isinstance(value, Tensor) for value in late.values())
    position = _first_difference(first, second, may_leave_out=may_leave_out)
    return None if position is None else CarriedState(tuple(late), position)


class _History(Proof):
    """A replay of shapes alone that notes what it computes from the batch, and the state at its first operation."""

    def __init__(self, program: StageProgram) -> None:
        super().__init__(program)
        self.early: PreservedState | None = None
        self.outside: dict[int, list[tuple[Any, list[Any]]]] = {}
        self.reached = 0

    def run_to_its_end(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seed_python(0)  # both runs draw alike
        seed_torch(0, self.program.device)
        with contextlib.suppress(Exception):  # where the trace ended early, or where the path is another one
            self.run(step, args, kwargs)
        self.reached = self.position

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        position = self.position
        result = super().operation(function, args, kwargs, run)
        if self.early is None and self.position > 0 and position == 0:
            self.early = PreservedState(self.program.module)
        return result

    def _outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        constants = [leaf for _, leaf in tree.walk((args, kwargs)) if not isinstance(leaf, Tensor)]
        self.outside.setdefault(self.position, []).append((function, constants))
        return super()._outside(function, args, kwargs, run)


def _first_difference(first: _History, second: _History, *, may_leave_out: bool) -> int | None:
    for position in range(min(first.reached, second.reached) + 1):
        before, now = first.outside.get(position, []), second.outside.get(position, [])
        same_functions = [function for function, _ in before] == [function for function, _ in now]
        if not same_functions:
            if not may_leave_out:
                return position
        elif any(not same_constants(b, tuple(a)) for (_, a), (_, b) in zip(before, now, strict=True)):
            return position
    return second.reached if second.reached < first.reached else None
