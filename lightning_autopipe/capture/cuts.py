"""Where a traced step may be cut, and where it should be."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction

from lightning_autopipe.capture.records import CutKey, Layer, Operation, StepTrace
from lightning_autopipe.core.errors import CaptureError, ConfigurationError, PlanError

_NEED_WHOLE_GRADIENT = frozenset({Tensor.register_hook, Tensor.retain_grad})
_NEGLIGIBLE_SHARE = 1e-3  # of the work and of the parameters: not worth a layer of its own
_HEAVY_SHARE = 1 / 6  # of the work: worth a cut at which more values cross
_MORE_BYTES = 2.5  # how much more may cross there than at the ends of the piece


class CutTable:
    """For every position of a trace: which values cross it, and whether a cut there keeps the step's meaning.

    A cut is refused inside a checkpointed region or a module with full backward hooks, across a value that cannot be
    handed over (its size depends on the data, no operation shows it, or a hook needs its place in the graph), across a
    buffer or parameter that the step writes and that is used on both sides, between the uses of a value and a hook or
    a call that needs its whole gradient, and where two crossing values share memory that is written later (copies
    would sever the alias).
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        num_positions = len(trace.operations) + 1
        starts: list[list[int]] = [[] for _ in range(num_positions + 1)]
        ends: list[list[int]] = [[] for _ in range(num_positions + 1)]
        for value in trace.values:
            if value.last_use > value.maker:
                starts[value.maker + 1].append(value.index)
                ends[value.last_use + 1].append(value.index)
        self._last_write: dict[int, int] = {}
        for op in trace.operations:
            for storage in op.written_storages:
                self._last_write[storage] = op.index
        self._whole_spans = (*self._find_state_spans(), *self._find_gradient_spans())
        self._region_paths = self._find_region_paths()
        # Behind the last operation that takes a parameter there is nothing to share out.
        self.last_useful = max((op.index for op in trace.operations if op.parameters), default=0)
        self.crossing: list[tuple[int, ...]] = []
        live: dict[int, None] = {}
        for position in range(num_positions):
            for index in ends[position]:
                live.pop(index, None)
            for index in starts[position]:
                live[index] = None
            self.crossing.append(tuple(sorted(live)))
        self.legal = [self._is_legal(position) for position in range(num_positions)]
        self.num_bytes = [sum(trace.values[v].num_bytes for v in crossing) for crossing in self.crossing]

    def written_after(self, value_index: int, position: int) -> bool:
        """Tell whether the memory of a value is written by an operation at or after `position`."""
        return self._last_write.get(self.trace.values[value_index].storage, -1) >= position

    def _find_state_spans(self) -> Iterable[tuple[int, int, str]]:
        """From first to last use of what must live on one stage: what the step writes, parameters that it hooks."""
        hooked = {n for op in self.trace.operations if op.function in _NEED_WHOLE_GRADIENT for n in op.parameters}
        whole = self.trace.written_parameters | hooked
        spans: dict[str, tuple[int, int]] = {}
        for op in self.trace.operations:
            for name in (*op.buffers, *whole.intersection(op.parameters)):
                first, _ = spans.get(name, (op.index, op.index))
                spans[name] = (first, op.index)
        for name, (first, last) in spans.items():
            yield first, last, f"{name}, which the step writes or hooks, is used on both sides"

    def _find_gradient_spans(self) -> Iterable[tuple[int, int, str]]:
        """From the first use of a value to where its whole gradient is asked for: by a hook on it or by the step."""
        for op in self.trace.operations:
            if op.function in _NEED_WHOLE_GRADIENT and op.reads:
                first = min(self.trace.values[v].reads[0] for v in op.reads)
                yield first, op.index, f"{op.name} in {_place(op)} needs the whole gradient of a value used before"
            elif op.function is torch.autograd.grad:
                yield 0, op.index, f"torch.autograd.grad in {_place(op)} needs all that comes before it"

    def _is_legal(self, position: int) -> bool:
        if position == len(self.trace.operations):
            return True
        return position <= self.last_useful and self.keeps_meaning(position)

    def keeps_meaning(self, position: int) -> bool:
        """Tell whether the step could be left here and gone on with, whether or not that is of use."""
        return self.obstacle(position) is None

    def obstacle(self, position: int) -> str | None:
        """Tell what keeps the step from being left here and gone on with; None where nothing does."""
        operations = self.trace.operations
        if position in (0, len(operations)):
            return None
        region = operations[position].region
        if region is not None and region == operations[position - 1].region:
            where = ".".join(self._region_paths[region]) or "the LightningModule"
            return f"what runs in {where} is one checkpointed region, or a module with full backward hooks"
        for first, last, reason in self._whole_spans:
            if first < position <= last:
                return reason
        storages: set[int] = set()
        for index in self.crossing[position]:
            value = self.trace.values[index]
            maker = operations[value.maker]
            if value.sized_by_data:
                return f"the size of what {maker.name} in {_place(maker)} gives depends on the data"
            if value.slot is None or maker.function is BackwardHookFunction:
                return f"what {maker.name} in {_place(maker)} gives cannot be handed over"
            if value.storage in storages and self.written_after(index, position):
                return f"what {maker.name} in {_place(maker)} gives shares memory that is written later"
            storages.add(value.storage)
        return None

    def _find_region_paths(self) -> dict[int, list[str]]:
        """By region what the paths of its modules have in common."""
        paths: dict[int, list[str]] = {}
        for op in self.trace.operations:
            if op.region is not None:
                own = op.module_path.split(".")
                known = paths.setdefault(op.region, own)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, own, strict=False))
                paths[op.region] = [part for part, _ in same]
        return paths


def _place(operation: Operation) -> str:
    return operation.module_path or "the LightningModule"


def find_layers(
    trace: StepTrace, table: CutTable, also_at: Sequence[int] = (), *, before: int | None = None
) -> tuple[Layer, ...]:
    """Split a trace into layers at its good cuts.

    Good cuts are where the fewest values cross: one after each residual addition, say, which gives the attention half
    and the feed-forward half of a transformer block. Where a piece between two of them is still more than a sixth of
    the work (the inside of a U-Net, whose outermost skip spans nearly everything), it is split again at the fewest
    values that cross inside it. Within a run of positions where equally many cross, good ones lie before an operation
    that takes a parameter. Layers with no parameters, or next to no work and parameters, join their neighbours. Layers
    also begin at the positions `also_at`, and none begins at or behind `before`.
    """
    operations = trace.operations
    work = [0.0]
    for op in operations:
        work.append(work[-1] + op.flops)
    bounds = {0, len(operations)}

    def split(start: int, stop: int, most_bytes: float) -> None:
        takers = [p for p in range(start, stop) if operations[p].parameters] or [start]  # each side must have some
        between = range(takers[0] + 1, takers[-1] + 1)
        inside = [p for p in between if table.legal[p] and table.num_bytes[p] <= most_bytes]
        if not inside:
            return
        fewest = min(len(table.crossing[p]) for p in inside)
        chosen = _before_parameters(trace, [p for p in inside if len(table.crossing[p]) == fewest])
        bounds.update(chosen)
        for a, b in itertools.pairwise([start, *chosen, stop]):
            if work[b] - work[a] > _HEAVY_SHARE * work[-1] and b - a < stop - start:
                split(a, b, _MORE_BYTES * max(table.num_bytes[a], table.num_bytes[b]))

    split(0, min(table.last_useful + 1, len(operations) if before is None else before), math.inf)
    joined = sorted({*_join_negligible(trace, sorted(bounds)), *also_at})
    bounds_of_layers = itertools.pairwise(joined)
    return tuple(_layer(trace, table, index, a, b) for index, (a, b) in enumerate(bounds_of_layers))


def positions_after(trace: StepTrace, table: CutTable, module_paths: Sequence[str]) -> list[int]:
    """Find the positions right after the last calls of modules.

    Raises:
        ConfigurationError: a module is not called by the step, or a cut behind it is not possible; or they are not
            named in the order in which they are called.
    """
    positions: list[int] = []
    for path in module_paths:
        calls = [call for call in trace.calls if call.module_path == path and call.start < call.stop]
        if not calls:
            called = sorted({call.module_path for call in trace.calls if not call.is_own})
            raise ConfigurationError(
                f"cut_after names {path!r}, but the step calls no such module. Modules that it calls: "
                f"{', '.join(called[:12])}{', …' if len(called) > 12 else ''}"
            )
        position = max(call.stop for call in calls)
        if position >= len(trace.operations) or not table.legal[position]:
            raise ConfigurationError(
                f"cut_after names {path!r}, but the step cannot be cut behind it: what crosses there cannot be handed "
                "over, no parameter is used behind it, or it lies within a checkpointed region"
            )
        if positions and position <= positions[-1]:
            raise ConfigurationError(
                f"cut_after names {path!r} behind {module_paths[len(positions) - 1]!r}, but the step calls it before; "
                "name modules in the order of their calls, each once"
            )
        positions.append(position)
    return positions


def _before_parameters(trace: StepTrace, positions: list[int]) -> list[int]:
    """Of each run of neighbouring positions keep those before an operation that takes a parameter, else the last."""
    kept: list[int] = []
    for _, group in itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        run = [position for _, position in group]
        kept.extend([p for p in run if trace.operations[p].parameters] or run[-1:])
    return kept


def _join_negligible(trace: StepTrace, bounds: list[int]) -> list[int]:
    """Drop bounds so that every layer has parameters and a part of the work or of the parameters worth naming."""
    sizes = trace.parameter_elements
    total_flops = sum(op.flops for op in trace.operations) or 1.0
    total_elements = sum(sizes.values()) or 1

    def is_negligible(start: int, stop: int) -> bool:
        names = {name for op in trace.operations[start:stop] for name in op.parameters}
        flops = sum(op.flops for op in trace.operations[start:stop])
        elements = sum(sizes[name] for name in names)
        return not names or (flops < _NEGLIGIBLE_SHARE * total_flops and elements < _NEGLIGIBLE_SHARE * total_elements)

    kept = [0]
    for bound in bounds[1:]:
        if not is_negligible(kept[-1], bound) or bound == len(trace.operations):
            kept.append(bound)
    if len(kept) > 2 and is_negligible(kept[-2], kept[-1]):
        del kept[-2]
    return kept


@dataclass(frozen=True, slots=True)
class PlannedLayers:
    """What is kept of the planned trace: where its layers begin, and which calls it has (path and index)."""

    keys: tuple[CutKey, ...]
    calls: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, trace: StepTrace) -> PlannedLayers:
        """Those of a trace, without its tensors."""
        calls = frozenset((call.module_path, call.call_index) for call in trace.calls)
        return cls(tuple(layer.key for layer in trace.layers), calls)


def layers_as_planned(trace: StepTrace, table: CutTable, planned: PlannedLayers) -> tuple[Layer, ...]:
    """Split a trace where the layers of the planned one begin, as far as it has such places, in this order.

    What is drawn in a layer must not depend on the trace: each shape and path has the layers of the planned one. Calls
    that the planned path does not make are layers of their own, so that a stage may begin with one.
    """
    starts = _starts_of_keys(trace, planned.keys)
    known = planned.calls
    for call in trace.calls:
        is_new = (call.module_path, call.call_index) not in known
        if is_new and call.parent is not None and (call.parent.module_path, call.parent.call_index) in known:
            key = CutKey(call.module_path, call.call_index, 0)
            starts.setdefault(call.start, (_number(f"{key}"), key))
            starts.setdefault(call.stop, (_number(f"behind {key}"), CutKey(key.module_path, key.call_index, -1)))
    starts.pop(len(trace.operations), None)
    return _layers(trace, table, starts)


def layers_from_keys(trace: StepTrace, table: CutTable, keys: Sequence[CutKey]) -> tuple[Layer, ...]:
    """Split a trace where layers of these names begin, as far as it has such places, in this order."""
    return _layers(trace, table, _starts_of_keys(trace, keys))


def _starts_of_keys(trace: StepTrace, keys: Sequence[CutKey]) -> dict[int, tuple[int, CutKey]]:
    starts = {0: (0, keys[0])}  # by position: number and name of the layer
    last = 0
    for index, key in enumerate(keys[1:], 1):
        position = trace.position_of(key)
        if position is not None and position > last:
            starts[position] = index, key
            last = position
    return starts


def _layers(trace: StepTrace, table: CutTable, starts: Mapping[int, tuple[int, CutKey]]) -> tuple[Layer, ...]:
    bounds = itertools.pairwise([*sorted(starts), len(trace.operations)])
    return tuple(_layer(trace, table, starts[start][0], start, stop, starts[start][1]) for start, stop in bounds)


def _number(name: str) -> int:
    """A layer's number that no layer of the planned trace has."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "little") + 2**32


def _layer(trace: StepTrace, table: CutTable, index: int, start: int, stop: int, key: CutKey | None = None) -> Layer:
    operations = trace.operations[start:stop]
    return Layer(
        index=index,
        key=key or trace.key_of(start, stop),
        start=start,
        stop=stop,
        parameters=tuple(dict.fromkeys(name for op in operations for name in op.parameters)),
        forward_flops=sum(op.flops for op in operations),
        boundary_bytes=table.num_bytes[stop] if stop < len(trace.operations) else 0,
        has_random=any(op.is_random for op in operations),
    )


def positions_from_keys(trace: StepTrace, table: CutTable, keys: Sequence[CutKey]) -> list[int] | None:
    """Find the cuts with these names in a trace; None unless each is there, in order and legal."""
    positions: list[int] = []
    for key in keys:
        position = trace.position_of(key)
        if position is None or not table.legal[position] or (positions and position < positions[-1]):
            return None
        positions.append(position)
    return positions


def is_same_path(a: StepTrace, b: StepTrace, stop: int | None = None) -> bool:
    """Tell whether two traces have the same operations, up to a position."""
    if stop is None and len(a.operations) != len(b.operations):
        return False
    return [_what(op) for op in a.operations[:stop]] == [_what(op) for op in b.operations[:stop]]


def crossing_meaning(trace: StepTrace, table: CutTable, position: int) -> list[tuple[Hashable, ...]]:
    """Describe the values that cross a position by the operations that made and wrote them."""
    meaning: list[tuple[Hashable, ...]] = []
    for index in table.crossing[position]:
        value = trace.values[index]
        writers = [op for op in trace.operations[value.maker : position] if value.storage in op.written_storages]
        maker = trace.operations[value.maker]
        meaning.append((_what(maker), value.slot, tuple(value.absent.shape), tuple(_what(op) for op in writers)))
    return meaning


def _what(op: Operation) -> Hashable:
    return op.function, op.module_path, op.parameters, op.buffers


def check_owners(
    trace: StepTrace, bounds: Sequence[int], owners: Mapping[str, frozenset[int]], last_stage: int
) -> bool:
    """Tell whether each operation's parameters and written buffers lie on the stage that the bounds give it to."""
    for stage_index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        for op in trace.operations[start:stop]:
            for name in (*op.parameters, *op.buffers):
                if stage_index not in owners.get(name, frozenset({last_stage})):
                    return False
    return True


def positions_from_owners(
    trace: StepTrace, table: CutTable, owners: Mapping[str, frozenset[int]], num_stages: int, step_name: str
) -> list[int]:
    """Cut a trace so that every parameter is used where it lives, with the fewest bytes crossing; stages may be empty.

    Raises:
        PlanError: the step uses the parameters in an order that contradicts the stages.
    """
    num_positions = len(trace.operations) + 1
    last_stage = num_stages - 1
    cost = [b if legal else math.inf for b, legal in zip(table.num_bytes, table.legal, strict=True)]
    best: list[float] = [math.inf] * num_positions
    best[0] = 0.0
    came_from: list[list[int]] = []
    for stage_index in range(num_stages):
        allowed = [
            all(stage_index in owners.get(name, frozenset({last_stage})) for name in (*op.parameters, *op.buffers))
            for op in trace.operations
        ]
        reached: list[float] = [math.inf] * num_positions
        source = [-1] * num_positions
        start, start_cost = -1, math.inf
        for position in range(num_positions):
            if position > 0 and not allowed[position - 1]:
                start, start_cost = -1, math.inf
            if best[position] < start_cost:
                start, start_cost = position, best[position]
            ending = (
                cost[position] if stage_index < last_stage else (0.0 if position == num_positions - 1 else math.inf)
            )
            if start_cost + ending < math.inf:
                reached[position] = start_cost + ending
                source[position] = start
        best = reached
        came_from.append(source)
    if best[num_positions - 1] == math.inf:
        raise PlanError(
            f"{step_name} uses the module's parameters in an order that the plan's {num_stages} stages do not allow "
            "(stages are cut by the step that was planned first). Use fewer stages (num_stages=), or let the step call "
            "the submodules in the same order."
        )
    positions: list[int] = []
    position = num_positions - 1
    for stage_index in range(last_stage, 0, -1):
        position = came_from[stage_index][position]
        positions.append(position)
    return positions[::-1]


def require_cuts(trace: StepTrace, table: CutTable, step_name: str) -> None:
    """Explain why a step has no place to be cut.

    Raises:
        CaptureError: no position inside the step is legal.
    """
    if len(trace.operations) > 1 and not any(table.legal[1:-1]):
        raise CaptureError(f"{step_name} can be cut nowhere: every position lies inside a region that must stay whole.")
