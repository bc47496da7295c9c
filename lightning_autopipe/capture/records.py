"""What a trace holds: numbered operations, the values that flow between them, module calls, layers.

Positions are counted like slice bounds: position `p` lies before operation `p`, a stage owns `[start, stop)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_autopipe.capture.absent import AbsentTensor
from lightning_autopipe.capture.losses import KEEPS_COUNT
from lightning_autopipe.capture.tree import LeafPath, walk

STEP = "<step>"
"""The path of the outermost module call: the step itself."""

OPAQUE_CALL = "opaque_call"
"""In the place of a function: an operation that is the whole call of a module that reads values of activations."""


def function_name(function: Any) -> str:
    """Give a readable name of a torch function, or of a custom autograd function (a class)."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or str(function)
    return f"{name}.apply" if isinstance(function, type) else str(name)


class ValueIndex(int):
    """The index of a value, in the place of its tensor in a recorded result."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor object that an activation operation made or wrote.

    `maker` is the position of the operation that made it (for a tensor of the user's that an operation wrote: the
    first write), `slot` says where that operation shows it: a path into its result, or into its arguments when
    `in_arguments`; None when the operation shows it nowhere (a view taken before its base was written).
    `storage` identifies the memory that it shares with its views.
    """

    index: int
    maker: int
    slot: LeafPath | None
    in_arguments: bool
    storage: int
    absent: AbsentTensor
    reads: list[int] = field(default_factory=list)
    sized_by_data: bool = False

    @property
    def last_use(self) -> int:
        """Position of the last operation that reads it, -1 when none does."""
        return self.reads[-1] if self.reads else -1

    @property
    def num_bytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.absent.numel() * self.absent.element_size()


@dataclass(slots=True, eq=False)
class Operation:
    """One activation operation of a step.

    `result` is what a stage that skips it gives to the user's code: the operation's result with absent tensors;
    `aliases` maps result paths to argument paths where the operation gives an argument back. `takes_data` tells whether
    it takes real tensors: the batch, or what was computed from it.
    """

    index: int
    function: Any
    reads: tuple[int, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    result: Any
    made: dict[LeafPath, int]
    aliases: dict[LeafPath, LeafPath]
    written_arguments: tuple[tuple[LeafPath, int], ...]
    written_storages: tuple[int, ...]
    constants: tuple[Any, ...]
    is_random: bool
    flops: float
    module_path: str
    region: int | None
    takes_data: bool = False
    is_mean_loss: bool = False
    ignores_targets: bool = False

    @property
    def name(self) -> str:
        """Readable name of the function."""
        return function_name(self.function)


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module's forward: operations `[start, stop)` and what it returned."""

    module_path: str
    call_index: int
    start: int
    stop: int
    result: Any
    parent: ModuleCall | None
    children: list[ModuleCall] = field(default_factory=list)
    _activations: tuple[tuple[LeafPath, int], ...] | None = None
    num_free_draws: int = 0
    draws_python: bool = False
    is_opaque: bool = False
    source: str = ""
    """The line that makes the call, where the step or the LightningModule's own forward does."""

    @property
    def is_own(self) -> bool:
        """Whether it is the step itself, or the LightningModule's own forward."""
        return self.module_path in (STEP, "")

    @property
    def activations(self) -> tuple[tuple[LeafPath, int], ...]:
        """Where the result holds which values (other tensors in it depend on batch data alone)."""
        if self._activations is None:
            self._activations = tuple((p, int(leaf)) for p, leaf in walk(self.result) if isinstance(leaf, ValueIndex))
        return self._activations


@dataclass(frozen=True, slots=True)
class CutKey:
    """Where a position lies in the user's terms, in traces of all shapes: `offset` operations into a call."""

    module_path: str
    call_index: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> CutKey:
        """Give the key that `str` wrote."""
        rest, _, offset = text.partition("+")
        path, _, call_index = rest.partition("#")
        return cls("" if path == "<module>" else path, int(call_index or 0), int(offset or 0))

    def __str__(self) -> str:
        call = f"#{self.call_index}" if self.call_index else ""
        return f"{self.module_path or '<module>'}{call}" + (f"+{self.offset}" if self.offset else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The operations `[start, stop)` between two neighbouring good cuts; the `index`-th layer of the planned trace."""

    index: int
    key: CutKey
    start: int
    stop: int
    parameters: tuple[str, ...]
    forward_flops: float
    boundary_bytes: int
    has_random: bool


@dataclass(slots=True, eq=False)
class StepTrace:
    """The record of one run of a step on shapes.

    `end_reason` is None when the step returned; otherwise why the trace ended early (after the last parameter's use).
    `used_at_end` are the values in what the step returned, `loss_index` the one that is its loss without a weight of
    its own. `inputs_read` are the `id`s of the batch tensors that it computed with, `written_parameters` those that the
    step itself writes (a clamp, a moving average), `reassigned_buffers` those in whose place it puts other tensors.
    """

    operations: list[Operation]
    values: list[Value]
    calls: list[ModuleCall]
    metadata_functions: frozenset[Any]
    draw_functions: frozenset[Any]
    used_at_end: frozenset[int]
    loss_index: int | None
    end_reason: str | None
    modules_changed: bool
    parameter_elements: dict[str, int]
    state_names: dict[int, str]
    inputs_read: frozenset[int]
    reassigned_buffers: tuple[str, ...]
    written_parameters: frozenset[str] = frozenset()
    layers: tuple[Layer, ...] = ()
    seconds: float = 0.0

    def unweighted_loss(self, loss_index: int) -> Operation | None:
        """Find a loss that ignores some targets where the step's loss does not tell over how many terms it is a mean.

        `loss_index` is the value that the step returned as its loss: its number of terms is known where it comes from
        a known mean loss through scalings by constants alone.
        """
        value = self.values[loss_index]
        while True:
            maker = self.operations[value.maker]
            writers = [op for op in self.operations[value.maker + 1 :] if value.storage in op.written_storages]
            if any(op.function not in KEEPS_COUNT or len(op.reads) != 1 for op in writers):
                break
            if maker.is_mean_loss:
                return None
            if maker.function not in KEEPS_COUNT or len(maker.reads) != 1:
                break
            value = self.values[maker.reads[0]]
        return next((op for op in self.operations if op.ignores_targets), None)

    def position_of(self, key: CutKey) -> int | None:
        """Give the position that `key` names, None where this trace has no such place."""
        for call in self.calls:
            if call.module_path == key.module_path and call.call_index == key.call_index:
                position = call.start + key.offset
                return position if position < call.stop else None
        return None

    def key_of(self, position: int, stop: int) -> CutKey:
        """Name `position`, where a layer that ends at `stop` begins: by a call inside the layer or an offset."""
        innermost = self.calls[0]
        for call in self.calls:  # in the order in which they began: outer calls come first
            if call.start == position < call.stop <= stop:
                return CutKey(call.module_path, call.call_index, 0)
            if call.start <= position < call.stop:
                innermost = call
        return CutKey(innermost.module_path, innermost.call_index, position - innermost.start)
