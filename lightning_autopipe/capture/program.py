"""A stage's part of a traced step, made once and run for every micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture.compiled_calls import REPLACES, Compilation, CompiledCallChoice
from lightning_autopipe.capture.cuts import CutTable
from lightning_autopipe.capture.draws import DrawKey, kept_generators
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.capture.replay import Replay, StageRun
from lightning_autopipe.capture.treatment import Treatment, choose_treatments, draw_keyed_modules


@dataclass(slots=True, eq=False)
class _CallTable:
    """What to do with the calls of one module, by the position at which they begin, in the place of its forward."""

    program: StageProgram
    module: nn.Module
    calls: dict[int, Treatment] = field(default_factory=dict)
    layer_index: int | None = None  # keys the draws of this layer when the module is called by an unwatched one
    before: Any = None  # the module's own attribute `forward`, where it has one
    forward: Any = None

    def build(self) -> None:
        """Make the forward; again where the module's own has changed since."""
        self.before = self.module.__dict__.get("forward")
        program, calls, layer_index, original = self.program, self.calls, self.layer_index, self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            replay = program.active
            assert replay is not None
            if replay.is_paused:
                if layer_index is not None:
                    replay.key_draws(layer_index)
                return original(*args, **kwargs)
            treatment = calls.get(replay.position)
            if treatment is None:
                return original(*args, **kwargs)
            return replay.treated_call(treatment, original, args, kwargs)

        setattr(forward, REPLACES, self.before)
        self.forward = forward


class StageProgram:
    """Replays the operations `[start, stop)` of a trace.

    Made once per trace and stage; :meth:`run` replays one micro-batch. `stop=None` is the last stage: it runs to the
    end of the step. `layer_starts` are positions at which the random draws are keyed anew.
    """

    def __init__(
        self,
        trace: StepTrace,
        table: CutTable,
        module: nn.Module,
        *,
        start: int,
        stop: int | None,
        device: torch.device,
        refused_stubs: frozenset[tuple[str, int]] = frozenset(),
        use_treatments: bool = True,
        compilation: Compilation | None = None,
    ) -> None:
        self.trace = trace
        self.module = module
        self.device = device
        self.start = start
        self.is_last = stop is None
        self.stop = len(trace.operations) if stop is None else stop
        self.received_values = table.crossing[start] if start > 0 else ()
        self.sent_values = () if self.is_last else table.crossing[self.stop]
        written = {name for op in trace.operations[start : self.stop] for name in op.buffers}
        self._written_memory = {module.get_buffer(name).untyped_storage().data_ptr() for name in written}
        self.cloned = frozenset(v for v in self.received_values if table.written_after(v, start))
        self.layer_of_start = {
            layer.start: layer.index
            for layer in trace.layers
            if layer.has_random and layer.stop > start and layer.start < self.stop
        }
        self.state_ids = frozenset(trace.state_names)
        self.generators = kept_generators(module)
        self.parameter_names = frozenset(n for op in trace.operations[start : self.stop] for n in op.parameters)
        keyed_modules = draw_keyed_modules(trace, self.layer_of_start) if use_treatments else {}
        submodules = dict(module.named_modules())
        compiled_calls = CompiledCallChoice(
            trace, submodules, compilation if use_treatments else None, self.layer_of_start
        )
        self.treatments: list[Treatment] = choose_treatments(
            trace,
            module,
            start=start,
            stop=self.stop,
            watched=self._watched(),
            boundaries=[p for p in self.layer_of_start if p not in keyed_modules],
            compiled_calls=compiled_calls,
            refused=refused_stubs,
            opaque_only=not use_treatments,
        )
        self.uncompiled = compiled_calls.uncompiled
        """Modules of this stage that the user has compiled and that run uncompiled, by path: why."""
        self.compiled: dict[str, Callable[..., Any]] = {}
        """By path of a module, what runs its calls that are compiled."""
        tables: dict[str, _CallTable] = {}

        def table_of(path: str) -> _CallTable:
            return tables.setdefault(path, _CallTable(self, submodules[path]))

        for treatment in self.treatments:
            path = treatment.call.module_path
            table_of(path).calls[treatment.call.start] = treatment
            if compilation is not None and treatment.compiler is not None and path not in self.compiled:
                self.compiled[path] = compilation.compiled(path, submodules[path], treatment.compiler)
        for position, path in keyed_modules.items():
            table_of(path).layer_index = self.layer_of_start[position]
        self._tables = list(tables.values())
        self.active: Replay | None = None  # the run whose calls the modules' forwards serve

    def treated_forwards(self, *, passed_over_only: bool = False) -> Iterator[tuple[dict[str, Any], Any, Any]]:
        """Give, for each module that is not called as usual, its attributes, its own `forward` there and the other.

        `passed_over_only`: of those modules alone which are passed over where only shapes are computed.
        """
        for table in self._tables:
            attributes = table.module.__dict__
            if table.forward is None or attributes.get("forward") is not table.before:
                table.build()
            if not passed_over_only or any(t.is_stub or t.call.is_opaque for t in table.calls.values()):
                yield attributes, table.before, table.forward

    def apart(self, tensor: Tensor) -> Tensor:
        """What is sent, not in the memory of a buffer: the next micro-batch may write that before it is out."""
        if self._written_memory and type(tensor) is Tensor and tensor.layout is torch.strided:
            return tensor.clone() if tensor.untyped_storage().data_ptr() in self._written_memory else tensor
        return tensor

    def _watched(self) -> dict[int, frozenset[int] | None]:
        """Positions of own operations that replay has to see one by one, with the crossing values that they show."""
        sent = set(self.sent_values)
        watched: dict[int, frozenset[int] | None] = {}
        for op in self.trace.operations[self.start : self.stop]:
            shown = {*op.made.values(), *(v for _, v in op.written_arguments)}
            if op.aliases:
                shown.update(op.reads)
            if op.function == "counted_call" or (self.is_last and op.is_mean_loss):
                watched[op.index] = None
            elif shown & sent:
                watched[op.index] = None if op.written_arguments else frozenset(shown & sent)
        return watched

    def run(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Sequence[Tensor],
        key: DrawKey,
    ) -> StageRun:
        """Replay one micro-batch.

        `received` are the values that cross the stage's start, in the order of `received_values`.

        Raises:
            TraceMismatchError: the step took another path than the traced one.
        """
        replay = Replay(self, received, key)
        return replay.run(step, args, kwargs)


def bounds_to_ranges(positions: Sequence[int]) -> list[tuple[int, int | None]]:
    """Turn the cuts between stages into each stage's `(start, stop)`; the last one has no stop."""
    starts = [0, *positions]
    return list(itertools.zip_longest(starts, positions))
