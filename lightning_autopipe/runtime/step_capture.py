"""Captures of one module's steps: traces by shape, cut where the plan says."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.carried import CarriedState, find_carried_state
from lightning_autopipe.capture.compiled_calls import Compilation
from lightning_autopipe.capture.cuts import (
    CutTable,
    PlannedLayers,
    check_owners,
    crossing_meaning,
    find_layers,
    is_same_path,
    layers_as_planned,
    positions_after,
    positions_from_keys,
    positions_from_owners,
)
from lightning_autopipe.capture.draws import DrawKey
from lightning_autopipe.capture.program import StageProgram
from lightning_autopipe.capture.proof import proven_program
from lightning_autopipe.capture.records import CutKey, StepTrace
from lightning_autopipe.capture.trace import trace_step
from lightning_autopipe.core.errors import PlanError
from lightning_autopipe.runtime.deferred_batch_norm import without_cumulative_momentum

_MAX_CAPTURES = 64  # shapes of micro-batches whose traces are kept
_MAX_PATHS = 8  # of one shape


@dataclass(slots=True, eq=False)
class StepCapture:
    """One traced step: its layers, and once a plan is known, where each stage begins and ends."""

    trace: StepTrace
    table: CutTable
    bounds: tuple[int, ...] = ()
    programs: dict[tuple[int, int | None], StageProgram] = field(default_factory=dict)

    def bounds_of(self, stage_index: int) -> tuple[int, int | None]:
        """Give the positions between which a stage's operations lie; the last stage runs to the end, None."""
        is_last = stage_index == len(self.bounds) - 2
        return self.bounds[stage_index], None if is_last else self.bounds[stage_index + 1]


class CaptureStore:
    """Traces each kind of step once for every shape of its micro-batches, and cuts it by the plan.

    The plan's first trace names the cuts and the owner of each parameter; other shapes and other steps (validation,
    prediction) are cut at the places of the same names, or where the owners of the parameters they use allow it.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, is_cut: bool = False) -> None:
        self.module = module
        self.device = device
        self.is_cut = is_cut
        self.tracing = False
        self.while_silent: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """A context for what is traced: what the user's code tells the world there does not count."""
        self.compilation: Compilation | None = None
        """What of the module runs compiled; what is traced before is not changed by it."""
        self.num_stages = 1
        self.cut_keys: tuple[CutKey, ...] = ()
        self.owners: dict[str, frozenset[int]] = {}
        self._planned_step = ""
        self._planned: PlannedLayers | None = None
        self._captures: OrderedDict[Hashable, list[StepCapture]] = OrderedDict()  # the usual path first

    def trace(
        self,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        cut_after: Sequence[str] = (),
        is_planned_by: bool = False,
        key: DrawKey | None = None,
        draw_functions: frozenset[Any] = frozenset(),
    ) -> tuple[StepTrace, CutTable]:
        """Trace a step and find its layers: those of the planned trace, by their names, once there is one.

        Args:
            step_name: The method of the module.
            args: What it is called with.
            kwargs: Keyword arguments alike.
            cut_after: Paths of modules after whose last calls layers end.
            is_planned_by: Whether a plan will be made from this trace: it finds layers of its own.
            key: Of the micro-batch whose random draws decide on the path; None: whichever.
            draw_functions: What draws without an activation among its arguments.

        Raises:
            CaptureError: the step cannot be traced.
        """
        with self.silent():
            trace = trace_step(
                self.module,
                getattr(self.module, step_name),
                args,
                kwargs,
                step_name=step_name,
                state_buffers=frozenset(n for n, _ in self.module.named_buffers() if n in self.owners),
                device=self.device,
                is_cut=self.is_cut,
                draw_functions=draw_functions,
                **({} if key is None else {"key": key}),
            )
        table = CutTable(trace)
        if self._planned is not None and step_name == self._planned_step and not is_planned_by:
            trace.layers = layers_as_planned(trace, table, self._planned)
        else:
            trace.layers = find_layers(trace, table, positions_after(trace, table, cut_after))
        return trace, table

    def carried_state(
        self, trace: StepTrace, table: CutTable, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CarriedState | None:
        """Find what the step carries from one call to the next in plain attributes."""
        with self.silent():
            step = getattr(self.module, step_name)
            return find_carried_state(trace, table, self.module, step, args, kwargs, device=self.device)

    def set_cuts(self, step_name: str, trace: StepTrace, table: CutTable, names: Sequence[str]) -> list[int]:
        """Fix the cuts by the names of the layers that begin there, and with them the owner of every parameter.

        Gives their positions in this trace.

        Raises:
            PlanError: the traced step has no such place, or cannot be cut there.
        """
        self.num_stages = len(names) + 1
        self.cut_keys = tuple(CutKey.parse(name) for name in names)
        positions = positions_from_keys(trace, table, self.cut_keys)
        if positions is None:
            own = ", ".join(str(layer.key) for layer in trace.layers)
            raise PlanError(
                f"the plan cuts before {', '.join(names)}, which this step does not have in this order, or where it "
                f"cannot be cut. Its layers begin at: {own}. Make a new plan, or leave plan= unset"
            )
        bounds = [0, *positions, len(trace.operations)]
        owners: dict[str, set[int]] = {}
        for stage_index, (start, stop) in enumerate(itertools.pairwise(bounds)):
            for op in trace.operations[start:stop]:
                for name in (*op.parameters, *op.buffers):
                    owners.setdefault(name, set()).add(stage_index)
        self.owners = {name: frozenset(stages) for name, stages in owners.items()}
        self._planned_step, self._planned = step_name, PlannedLayers.of(trace)
        self._captures.clear()
        return positions

    def share_plan(self, other: CaptureStore, *, is_cut: bool) -> None:
        """Have the layers of another store of the same module, and cut as it does, or nowhere."""
        self._planned_step, self._planned = other._planned_step, other._planned
        if is_cut:
            self.num_stages, self.cut_keys, self.owners = other.num_stages, other.cut_keys, other.owners

    def rename(self, names: Mapping[str, str]) -> None:
        """Know parameters by other names, given by the ones before; traces are forgotten."""
        self.owners = {names.get(name, name): stages for name, stages in self.owners.items()}
        self.clear()

    def clear(self) -> None:
        """Forget all traces: the module's parameters are other objects now."""
        self._captures.clear()

    def capture(self, key: Hashable, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCapture:
        """Give the capture for this key, tracing on `args` where it is new."""
        known = self._captures.get(key)
        if known is not None:
            self._captures.move_to_end(key)
            return known[0]
        trace, table = self.trace(step_name, args, kwargs)
        bounds = (0, *self._locate(trace, table, step_name), len(trace.operations))
        capture = StepCapture(trace, table, bounds)
        self._captures[key] = [capture]
        if len(self._captures) > _MAX_CAPTURES:
            self._captures.popitem(last=False)
        return capture

    def other_path(
        self, key: Hashable, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], draws: DrawKey
    ) -> StepCapture | None:
        """Trace the path that the step takes on `args` and with these draws, where it is not the known one of this key.

        The stages notice another path each for itself, or not at all where it does not concern them. So the cuts must
        mean the same on both paths: equal makers of equally many crossing values. None where they do not.
        """
        known = self._captures[key]
        usual = known[0]
        draw_functions = frozenset().union(*(capture.trace.draw_functions for capture in known))
        trace, table = self.trace(step_name, args, kwargs, key=draws, draw_functions=draw_functions)
        for capture in known:
            if is_same_path(capture.trace, trace):
                return capture
        positions: list[int] = []
        for index, cut_key in enumerate(self.cut_keys):
            before = usual.bounds[index + 1]
            wanted = crossing_meaning(usual.trace, usual.table, before)
            likely = before if is_same_path(usual.trace, trace, before) else trace.position_of(cut_key)
            everywhere = range(positions[-1] if positions else 0, len(table.legal))
            for position in everywhere if likely is None else (likely, *everywhere):
                if table.legal[position] and crossing_meaning(trace, table, position) == wanted:
                    positions.append(position)
                    break
            else:
                return None
        bounds = (0, *positions, len(trace.operations))
        if sorted(bounds) != list(bounds) or not check_owners(trace, bounds, self.owners, self.num_stages - 1):
            return None
        capture = StepCapture(trace, table, bounds)
        known.insert(1, capture)
        del known[_MAX_PATHS:]
        return capture

    def program(
        self,
        capture: StepCapture,
        start: int,
        stop: int | None,
        step_name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StageProgram:
        """Give the program of a part of a capture, with stubs proven on `args` the first time."""
        program = capture.programs.get((start, stop))
        if program is None:
            with self.silent():
                program = proven_program(
                    capture.trace,
                    capture.table,
                    self.module,
                    getattr(self.module, step_name),
                    args,
                    kwargs,
                    start=start,
                    stop=stop,
                    device=self.device,
                    compilation=self.compilation,
                )
            if self.compilation is not None:
                self.compilation.tell(program.uncompiled)
            capture.programs[start, stop] = program
        return program

    def _locate(self, trace: StepTrace, table: CutTable, step_name: str) -> list[int]:
        positions = positions_from_keys(trace, table, self.cut_keys)
        last_stage = self.num_stages - 1
        if positions is not None:
            bounds = [0, *positions, len(trace.operations)]
            if check_owners(trace, bounds, self.owners, last_stage):
                return positions
        return positions_from_owners(trace, table, self.owners, self.num_stages, step_name)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Have `tracing` true for a while."""
        before, self.tracing = self.tracing, True
        try:
            with without_cumulative_momentum(self.module), self.while_silent():
                yield
        finally:
            self.tracing = before


def shape_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Give what the path of a step may depend on in its arguments: shapes, dtypes and the structure around them.

    Values do not count, and neither does the batch index; the index of a loader does.
    """
    leaves: list[Hashable] = []
    for path, leaf in tree.walk((args[:1], args[2:], dict(kwargs))):
        if isinstance(leaf, Tensor):
            leaves.append((path, tuple(leaf.shape), leaf.dtype))
        elif (
            leaf is None
            or isinstance(leaf, bool)
            or (path[0] != 0 and path[-1] != "batch_idx" and isinstance(leaf, int))
        ):
            leaves.append((path, leaf))
        else:
            leaves.append((path, type(leaf)))
    return tuple(leaves)


def state_key(module: nn.Module) -> Hashable:
    """Give what the path of a step may depend on besides its arguments: modes and flags."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        tuple(p.requires_grad for p in module.parameters()),
        tuple(sub.training for sub in module.modules()),
    )


def module_fingerprint(module: nn.Module) -> str:
    """Identify a module by the names, shapes, dtypes and ties of its parameters."""
    first_name: dict[int, str] = {}
    lines = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied_to = first_name.setdefault(id(parameter), name)
        lines.append(f"{name} {tuple(parameter.shape)} {parameter.dtype} {tied_to}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
