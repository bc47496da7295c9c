"""Proving stubs: a stage that passes over modules must still walk the traced path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentTensor
from lightning_autopipe.capture.compiled_calls import Compilation
from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.preserve import preserved_state
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.records import Operation, StepTrace
from lightning_autopipe.capture.replay import Replay
from lightning_autopipe.capture.treatment import Treatment
from lightning_autopipe.core.errors import CaptureError

_MAX_ATTEMPTS = 12


def proven_program(
    trace: StepTrace,
    table: CutTable,
    module: nn.Module,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    start: int,
    stop: int | None,
    device: torch.device,
    compilation: Compilation | None = None,
) -> StageProgram:
    """Make the program of the stage `[start, stop)` with only those stubs that keep the traced path.

    The whole step is replayed on shapes with the stage's stubs in place; each operation must be the recorded one, with
    the recorded inputs and constants. The stub that a difference follows is given up, its submodules are tried instead.
    What `compilation` names runs compiled where it can.
    """
    refused: frozenset[tuple[str, int]] = frozenset()

    def program_without(refused_stubs: frozenset[tuple[str, int]]) -> StageProgram:
        return StageProgram(
            trace,
            table,
            module,
            start=start,
            stop=stop,
            device=device,
            refused_stubs=refused_stubs,
            compilation=compilation,
        )

    for _ in range(_MAX_ATTEMPTS):
        program = program_without(refused)
        stubs = [t.call for t in program.treatments if t.is_stub and not t.call.is_opaque]
        if not stubs:
            return program
        difference = _first_difference(program, step, args, kwargs)
        if difference is None:
            return program
        guilty = [call for call in stubs if call.stop <= difference]
        refused |= {(call.module_path, call.call_index) for call in (guilty[-1:] or stubs)}
        if len(guilty) > 1:  # the culprit is the last one most often; where it is not, give up those before it, too
            again = program_without(refused)
            further = _first_difference(again, step, args, kwargs)
            if further is not None and further <= difference:
                refused |= {(call.module_path, call.call_index) for call in guilty}
    every_call = frozenset((call.module_path, call.call_index) for call in trace.calls)
    return program_without(every_call)


def _first_difference(
    program: StageProgram, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    proof = Proof(program)
    with preserved_state(program.module):
        try:
            proof.run(step, args, kwargs)
        except Exception:
            # Where the trace ended early, the step ends in the same place with the same kind of error.
            if proof.position == len(program.trace.operations) and program.trace.end_reason is not None:
                return None
            return proof.position
    return None if proof.position == len(program.trace.operations) else proof.position


class Proof(Replay):
    """A replay that owns nothing and compares each operation in full."""

    def __init__(self, program: StageProgram) -> None:
        super().__init__(program, (), _NO_DRAWS)
        self.start = self.num_operations + 1
        self.stop = self.num_operations + 1
        self.index_of = {id(value.absent): value.index for value in program.trace.values}

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        self.program.active = self
        for attributes, _, forward in self.program.treated_forwards(passed_over_only=True):
            attributes["forward"] = forward
        try:
            with self:  # the caller's preserved_state puts the forwards back
                step(*args, **kwargs)
        finally:
            self.program.active = None

    def treated_call(
        self, treatment: Treatment, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if treatment.call.is_opaque:
            treatment = replace(treatment, is_stub=True)
        if not treatment.is_stub:
            return original(*args, **kwargs)
        return super().treated_call(treatment, original, args, kwargs)

    def _skip(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = []
        constants = []
        for _, leaf in tree.walk((args, kwargs)):
            if not isinstance(leaf, Tensor):
                constants.append(leaf)
            elif isinstance(leaf, AbsentTensor) and id(leaf) in self.index_of:
                reads.append(self.index_of[id(leaf)])
        recorded = [
            v for v in op.reads if not self.trace.values[v].in_arguments and self.trace.values[v].slot is not None
        ]
        same_reads = [v for v in dict.fromkeys(reads) if v in op.reads] == recorded and set(reads) <= set(op.reads)
        if not same_reads or not same_constants(constants, op.constants):
            self.position = op.index
            raise CaptureError(f"operation {op.index} ({op.name}) has other inputs than when it was traced")
        return super()._skip(op, args, kwargs)

    def _call(self, function: Callable[..., None]) -> None:
        pass  # nothing may have an effect


_NO_DRAWS = DrawKey(seed=0, step=0, replica_index=0, microbatch_index=0)


def same_constants(now: list[Any], recorded: tuple[Any, ...]) -> bool:
    """Tell whether an operation's plain arguments are the recorded ones; objects of other kinds count as equal."""
    if len(now) != len(recorded):
        return False
    for a, b in zip(now, recorded, strict=True):
        if a is b or type(a) is not type(b):
            if a is not b:
                return False
            continue
        try:
            if isinstance(a, (bool, int, float, str, torch.dtype, torch.device, torch.Size)) and a != b:
                return False
        except Exception:
            return False
    return True
