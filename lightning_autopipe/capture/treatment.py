"""Which module calls a stage may pass over in one go, so that replay is nearly free.

A call that lies wholly before the stage is *stubbed*: the module's recorded result is given without running its
Python. A call that lies wholly inside runs *unwatched*: at full speed, with no interception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.call_log import is_replayable_leaf
from lightning_autopipe.capture.compiled_calls import CompiledCallChoice, Compiler
from lightning_autopipe.capture.records import STEP, ModuleCall, StepTrace, ValueIndex


@dataclass(frozen=True, slots=True)
class Treatment:
    """What a stage does with one module call."""

    call: ModuleCall
    is_stub: bool
    compiler: Compiler | None = None
    """With which it runs compiled."""


def choose_treatments(
    trace: StepTrace,
    module: nn.Module,
    *,
    start: int,
    stop: int,
    watched: Mapping[int, frozenset[int] | None],
    boundaries: Collection[int],
    compiled_calls: CompiledCallChoice,
    refused: Collection[tuple[str, int]] = (),
    opaque_only: bool = False,
) -> list[Treatment]:
    """Choose the largest calls that the stage `[start, stop)` may stub or run unwatched.

    `watched` are positions of operations that must be seen: they show values that cross the stage's end (which a call
    may also show by returning them), or None for one that must be seen in any case. `boundaries` are positions at which
    replay must be watching. `refused` names calls `(module_path, call_index)` whose stub was found wrong.
    Opaque calls, whose inside was not traced, are always treated: `opaque_only` chooses no others. `compiled_calls`
    says what runs compiled, which comes before what would run unwatched as a whole.
    """
    submodules = dict(module.named_modules())
    with_hooks = _paths_with_hooks(submodules)
    escapes = _EscapeCheck(trace)
    stubs_allowed = trace.end_reason is None or not trace.modules_changed

    def visit(calls: Iterable[ModuleCall], compiler: Compiler | None) -> list[Treatment]:
        chosen: list[Treatment] = []
        for call in calls:
            if call.start == call.stop:
                continue
            inner = compiler or compiled_calls.compiler_of(call.module_path)
            if call.is_opaque:
                if inner is not None and start <= call.start < stop:
                    compiled_calls.note_opaque(call)
                chosen.append(Treatment(call, is_stub=not start <= call.start < stop))
            elif opaque_only:
                chosen.extend(visit(call.children, None))
            elif call.stop <= start and stubs_allowed and can_stub(call):
                chosen.append(Treatment(call, is_stub=True))
            elif call.start >= start and call.stop <= stop:
                chosen.extend(own_call(call, inner))
            else:
                chosen.extend(visit(call.children, inner))
        return chosen

    def own_call(call: ModuleCall, compiler: Compiler | None) -> list[Treatment]:
        is_unwatched = can_run_unwatched(call)
        if is_unwatched and not compiled_calls.is_wanted:
            return [Treatment(call, is_stub=False)]
        if is_unwatched and compiler is not None and compiled_calls.can_compile(call):
            return [Treatment(call, is_stub=False, compiler=compiler)]
        inside = visit(call.children, compiler)
        has_compiled = any(treatment.compiler is not None for treatment in inside)
        if compiler is not None:
            compiled_calls.note_inside(call, is_unwatched=is_unwatched, has_compiled=has_compiled)
        return [Treatment(call, is_stub=False)] if is_unwatched and not has_compiled else inside

    def can_stub(call: ModuleCall) -> bool:
        return (
            (call.module_path, call.call_index) not in refused
            and call.module_path not in with_hooks
            and call.result is not None
            and call.num_free_draws == 0
            and not call.draws_python
            and all(is_replayable_leaf(leaf) for _, leaf in tree.walk(call.result))
            and not escapes(call)
        )

    def can_run_unwatched(call: ModuleCall) -> bool:
        return (
            call.num_free_draws == 0
            and not any(call.start < position < call.stop for position in boundaries)
            and all(
                shown is not None and shown <= returned_values(call)
                for position, shown in watched.items()
                if call.start <= position < call.stop
            )
            and not escapes(call)
        )

    return _without_ambiguous(visit(trace.calls[0].children, compiled_calls.compiler_of(STEP)))


def returned_values(call: ModuleCall) -> set[int]:
    """Give the indices of the values that a call returns."""
    return {int(leaf) for _, leaf in tree.walk(call.result) if isinstance(leaf, ValueIndex)}


def draw_keyed_modules(trace: StepTrace, positions: Iterable[int]) -> dict[int, str]:
    """Find, for positions where the random draws are keyed anew, a module whose only call begins there.

    Its forward can key the draws by itself, also where it is called by a module that runs unwatched. Not inside a
    checkpointed region: recomputation begins with the random state that the region began with.
    """
    num_calls = Counter(call.module_path for call in trace.calls)
    wanted = {position for position in positions if trace.operations[position].region is None}
    return {
        call.start: call.module_path
        for call in trace.calls
        if call.start in wanted and call.start < call.stop and num_calls[call.module_path] == 1 and call.parent
    }


class _EscapeCheck:
    """Tells whether a call makes a value that is used after it and not returned (a list, a hook's capture)."""

    def __init__(self, trace: StepTrace) -> None:
        self._by_maker: dict[int, list[tuple[int, int]]] = {}
        for value in trace.values:
            self._by_maker.setdefault(value.maker, []).append((value.index, value.last_use))
        self._trace = trace

    def __call__(self, call: ModuleCall) -> bool:
        returned = returned_values(call)
        for position in range(call.start, call.stop):
            operation = self._trace.operations[position]
            if operation.written_arguments:
                return True  # a tensor of the caller's is written: it may be an argument that nobody returns
            for index, last_use in self._by_maker.get(position, ()):
                if last_use >= call.stop and index not in returned:
                    return True
        return False


def _paths_with_hooks(submodules: dict[str, nn.Module]) -> set[str]:
    """Paths of modules that have forward hooks, or hold a module that has."""
    found: set[str] = set()
    for path, sub in submodules.items():
        if sub._forward_hooks or sub._forward_pre_hooks or sub._backward_hooks or sub._backward_pre_hooks:
            parts = path.split(".") if path else []
            found.update(".".join(parts[:count]) for count in range(len(parts) + 1))
    return found


def _without_ambiguous(treatments: list[Treatment]) -> list[Treatment]:
    """A replayed call is recognised by its module and position: drop those that share both."""
    seen: dict[tuple[str, int], int] = {}
    for treatment in treatments:
        key = treatment.call.module_path, treatment.call.start
        seen[key] = seen.get(key, 0) + 1
    return [t for t in treatments if seen[t.call.module_path, t.call.start] == 1]
