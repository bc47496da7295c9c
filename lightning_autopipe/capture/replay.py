"""Running one stage's part of a step by running the step's own Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import AbsentTensor
from lightning_autopipe.capture.draws import (
    DrawKey,
    PlacedDraws,
    layer_seed,
    seed_generator,
    seed_torch,
)
from lightning_autopipe.capture.interception import RECOMPUTATION, SETS_FLAG, OperationMode, value_arguments
from lightning_autopipe.capture.losses import KEEPS_COUNT, MEAN_LOSSES, num_terms
from lightning_autopipe.capture.records import ModuleCall, Operation, ValueIndex
from lightning_autopipe.capture.treatment import Treatment
from lightning_autopipe.core.errors import CaptureError

if TYPE_CHECKING:
    from lightning_autopipe.capture.program import StageProgram

_RUN = "_autopipe_run"  # on each activation that a stage computed: which run made it
_TERMS = "_autopipe_terms"  # on known mean losses: the number of terms
_run_numbers = itertools.count()


class StageExit(BaseException):
    """Raised through the user's code at a stage's end; holds nothing, so that no frame keeps a tensor alive."""


class TraceMismatchError(CaptureError):
    """The step took another path than the one that was traced.

    `can_retry` tells that the failed run has left nothing behind: no buffer written, nothing logged.
    """

    can_retry = True


@dataclass(frozen=True, slots=True)
class StageRun:
    """What one replay gave: the values that cross the stage's end, or what the step returned on the last stage."""

    sent: tuple[Tensor, ...]
    result: Any


class Replay(OperationMode):
    """One run of a stage's program: what each torch function and each passed-over module call does."""

    def __init__(self, program: StageProgram, received: Sequence[Tensor], key: DrawKey) -> None:
        super().__init__()
        self.program = program
        self.trace = program.trace
        self.operations = program.trace.operations
        self.num_operations = len(self.operations)
        self.start, self.stop = program.start, program.stop
        self.key = key
        self.microbatch_seed = key.derive("layers")
        self.keyed_layer = -1
        self.position = 0
        self.run_number = next(_run_numbers)
        self.state_ids = program.state_ids
        self.reassigned: list[tuple[dict[str, Any], str, Any]] = []
        for name in program.trace.reassigned_buffers:
            path, _, attribute = name.rpartition(".")
            buffers = program.module.get_submodule(path)._buffers
            self.reassigned.append((buffers, attribute, buffers[attribute]))
            self.state_ids |= {id(buffers[attribute])}
        self.draws = PlacedDraws(key, program.device, program.trace.draw_functions)
        self.received: dict[int, Tensor] = {}
        for index, tensor in zip(program.received_values, received, strict=bool(received)):
            if index in program.cloned:  # a leaf cannot be written in place
                with torch.enable_grad():
                    tensor = tensor.clone()
            self._tag(tensor)
            self.received[index] = tensor
        self.held: dict[int, Tensor] = {v: self.received[v] for v in program.sent_values if v in self.received}
        self.sent_values = frozenset(program.sent_values)

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageRun:
        program = self.program
        replaced: list[tuple[dict[str, Any], Any]] = []
        result = None
        finished = False
        try:
            for attributes, before, forward in program.treated_forwards():
                replaced.append((attributes, before))
                attributes["forward"] = forward
            program.active = self
            self.draws.begin(program.generators)
            seed_torch(self.key.derive("start", self.start), program.device)
            with self:
                self._arrive()
                if self.stop == 0 and not program.is_last:
                    raise StageExit
                result = step(*args, **kwargs)
                finished = True
        except StageExit:
            pass
        finally:
            program.active = None
            for attributes, before in replaced:
                if before is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = before
            for buffers, attribute, value in self.reassigned:
                if type(buffers[attribute]) is AbsentTensor:  # another stage has its new value
                    buffers[attribute] = value
        if program.is_last:
            if self.position < self.start:
                raise self._mismatch(f"it ended after operation {self.position} of {self.start} before the last stage")
            return StageRun((), result)
        if finished:
            raise self._mismatch(f"it ended after operation {self.position}, before the stage's end at {self.stop}")
        missing = [v for v in program.sent_values if v not in self.held]
        if missing:
            raise self._mismatch(f"values {missing} that cross the cut at {self.stop} were not made")
        return StageRun(tuple(program.apart(self.held[v]) for v in program.sent_values), None)

    # ----- module calls

    def treated_call(
        self, treatment: Treatment, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Pass over one module call: give its recorded result, or run it unwatched."""
        call = treatment.call
        if treatment.is_stub:
            self.position = call.stop
            result = self._recorded_result(call)
        else:
            if treatment.compiler is not None and self._can_compile(args, kwargs):
                original = self.program.compiled[call.module_path]
            result = self.unwatched(original, args, kwargs)
            self.position = call.stop
            for path, index in call.activations:
                tensor = tree.get(result, path)
                self._tag(tensor)
                if index in self.sent_values:
                    self.held[index] = tensor
        self._arrive()
        return result

    def _can_compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether torch can see what a call does: not another mode, nor a value that only other stages know."""
        return self.is_innermost and not any(type(tensor) is AbsentTensor for _, tensor in tree.tensors((args, kwargs)))

    def _recorded_result(self, call: ModuleCall) -> Any:
        values, received = self.trace.values, self.received
        if type(call.result) is ValueIndex:
            tensor = received.get(call.result)
            return values[call.result].absent if tensor is None else tensor

        def leaf(_: tree.LeafPath, obj: Any) -> Any:
            if isinstance(obj, ValueIndex):
                tensor = received.get(int(obj))
                return values[obj].absent if tensor is None else tensor
            return obj

        return tree.map_leaves(leaf, call.result)

    # ----- operations

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if function in SETS_FLAG and id(args[0]) in self.state_ids:
            return run(*args, **kwargs)
        if function is not RECOMPUTATION and not self._takes_activation(value_arguments(function, args, kwargs)):
            return self._outside(function, args, kwargs, run)
        if function in self.trace.metadata_functions:
            return run(*args, **kwargs)
        position = self.position
        if position >= self.num_operations:
            return self._compute(function, args, kwargs, run)
        op = self.operations[position]
        if (op.function is not function and op.function != function) or self._has_other_parameters(op, args):
            mismatch = self._mismatch(f"operation {position} was {op.name}, now it is {function}")
            if position < self.start or not self.program.is_last or (mismatch.can_retry and self._draws_behind()):
                raise mismatch
            return self._compute(function, args, kwargs, run)  # nothing is cut or drawn behind this place
        self.position = position + 1
        if position < self.start:
            result = self._skip(op, args, kwargs)
        else:
            result = self._compute(function, args, kwargs, run)
            if op.written_arguments:
                for path, _ in op.written_arguments:
                    self._tag(tree.get((args, kwargs), path))
            if self.sent_values:
                self._hold(op, args, kwargs, result)
        self._arrive()
        return result

    def counted_call(self, function: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """Run a call with side effects on the stage that owns it; without activations, on the last stage."""
        if not self.is_paused and self._takes_activation(inputs):
            position = self.position
            if position < self.num_operations and self.operations[position].function == "counted_call":
                self.position = position + 1
                if position >= self.start:
                    self._call(function)
                self._arrive()
                return
            if position < self.start or not self.program.is_last:
                raise self._mismatch(
                    f"operation {position} was {self.operations[position].name}, now a value is logged"
                )
        if self.program.is_last or self.is_paused:
            self._call(function)

    def _call(self, function: Callable[..., None]) -> None:
        self.unwatched(function, (), {})

    def _takes_activation(self, objects: Sequence[Any]) -> bool:
        state_ids, run_number = self.state_ids, self.run_number
        for obj in objects:
            if isinstance(obj, Tensor):
                if type(obj) is AbsentTensor or id(obj) in state_ids or getattr(obj, _RUN, -1) == run_number:
                    return True
            elif tree.is_container(obj) and self._takes_activation([child for _, child in tree.children(obj)]):
                return True
        return False

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if kwargs.get("generator") is not None:
            seed_generator(kwargs["generator"], self.draws.seed(self.position))
        was_paused, self.is_paused = self.is_paused, True
        try:
            result = run(*args, **kwargs)
            terms = self._terms(function, args, kwargs) if self.program.is_last else None
        finally:
            self.is_paused = was_paused
        self._tag(result, terms)
        return result

    def _terms(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Number of terms of a known mean loss, kept through scaling by constants."""
        if function in MEAN_LOSSES:
            return num_terms(function, args, kwargs)
        if function in KEEPS_COUNT and args and isinstance(args[0], Tensor) and args[0].dim() == 0:
            if not self._takes_activation(args[1:]):
                return terms_of(args[0])
        return None

    def _tag(self, result: Any, terms: Tensor | None = None) -> None:
        if isinstance(result, Tensor):
            setattr(result, _RUN, self.run_number)
            if terms is not None or hasattr(result, _TERMS):  # the latter: a loss that was written in place
                setattr(result, _TERMS, terms)
        elif tree.is_container(result):
            for _, tensor in tree.tensors(result):
                setattr(tensor, _RUN, self.run_number)

    def _skip(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for path, index in op.written_arguments:  # a tensor of the user's that an earlier stage has written
            tensor = tree.get((args, kwargs), path)
            self._tag(tensor)
            arrived = self.received.get(index)
            if arrived is not None:
                was_paused, self.is_paused = self.is_paused, True
                try:
                    with torch.enable_grad():
                        tensor.copy_(arrived)
                finally:
                    self.is_paused = was_paused
                self.received[index] = tensor
                if index in self.held:
                    self.held[index] = tensor
        if type(op.result) is AbsentTensor and not op.aliases:
            tensor = self.received.get(op.made[()])
            return op.result if tensor is None else tensor

        def leaf(path: tree.LeafPath, obj: Any) -> Any:
            source = op.aliases.get(path)
            if source is not None:
                return tree.get((args, kwargs), source)
            index = op.made.get(path)
            if index is None:
                return obj
            tensor = self.received.get(index)
            return self.trace.values[index].absent if tensor is None else tensor

        return tree.map_leaves(leaf, op.result)

    def _hold(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep the values that cross the stage's end."""
        for path, index in op.made.items():
            if index in self.sent_values:
                self.held[index] = tree.get(result, path)
        for path, index in op.written_arguments:
            if index in self.sent_values:
                self.held[index] = tree.get((args, kwargs), path)
        for path in op.aliases:  # what the trace saw as the same tensor may be a new one here (a cast under autocast)
            for index in op.reads:
                if index in self.held and self.held[index] is tree.get((args, kwargs), op.aliases[path]):
                    self.held[index] = tree.get(result, path)

    def _outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        return self.draws.run(self.position, function, args, kwargs, run)

    def _arrive(self) -> None:
        """Act on having reached a position: key the draws of a layer that begins here, leave at the stage's end."""
        position = self.position
        layer_index = self.program.layer_of_start.get(position)
        if position >= self.start:
            if position >= self.stop and not self.program.is_last:
                raise StageExit
            if layer_index is not None:
                self.key_draws(layer_index)

    def key_draws(self, layer_index: int) -> None:
        if layer_index != self.keyed_layer:  # a module's call begins where the operation before it ended
            self.keyed_layer = layer_index
            seed_torch(layer_seed(self.microbatch_seed, layer_index), self.program.device)

    def _has_other_parameters(self, op: Operation, args: tuple[Any, ...]) -> bool:
        """Tell whether an operation takes another layer's parameters than the recorded one, whose place it has."""
        names = self.trace.state_names
        return any(
            (name := names.get(id(arg))) is not None and name not in op.parameters and name not in op.buffers
            for arg in args
        )

    def _draws_behind(self) -> bool:
        """Tell whether random numbers are drawn from here on; they are keyed by layers of the path that is taken."""
        return any(op.is_random for op in self.operations[self.position :])

    def _mismatch(self, what: str) -> TraceMismatchError:
        index = min(self.position, self.num_operations - 1)
        place = self.operations[index].module_path or "the LightningModule's step"
        error = TraceMismatchError(
            f"The step took another path than when it was traced: {what} (near {place}). A stage cannot be cut out of "
            "a step whose path depends on values or on the step's number; make the path depend on shapes only."
        )
        done = self.operations[self.start : self.position]
        error.can_retry = not any(op.buffers or op.function == "counted_call" for op in done)
        return error


def terms_of(tensor: Any) -> Tensor | None:
    """Give the number of terms that a replayed mean loss was taken over, where it is known."""
    terms = getattr(tensor, _TERMS, None)
    return terms if isinstance(terms, Tensor) else None
