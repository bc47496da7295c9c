"""Running a step once on shapes, and recording what it does."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import (
    AbsentValueError,
    computing_shapes,
    is_absent,
)
from lightning_autopipe.capture.call_log import CallLog
from lightning_autopipe.capture.draws import DrawKey, PlacedDraws, kept_generators, seed_torch
from lightning_autopipe.capture.interception import RECOMPUTATION, SETS_FLAG, OperationMode, value_arguments
from lightning_autopipe.capture.losses import MEAN_LOSSES, ignores_targets
from lightning_autopipe.capture.opaque import ReadsValuesError, opaque_paths, shapes_of_result
from lightning_autopipe.capture.preserve import DispatchObserver, preserved_state
from lightning_autopipe.capture.records import (
    OPAQUE_CALL,
    STEP,
    ModuleCall,
    Operation,
    StepTrace,
    function_name,
)
from lightning_autopipe.capture.refusals import RefusedStepError, refuse_generate, refuse_parameter_assignment
from lightning_autopipe.capture.regions import Regions
from lightning_autopipe.capture.source_lines import line_of_error, line_of_function
from lightning_autopipe.capture.values import ValueTable
from lightning_autopipe.core.errors import BatchError, CaptureError

# Functions that give no tensor and write none, and still must run on one stage only.
_SIDE_EFFECTS = frozenset({Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook})
_METADATA = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.__len__,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.stride,
        Tensor.is_contiguous,
    }
    | {getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim", "is_cuda", "requires_grad")}
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ANY_KEY = DrawKey(seed=0, step=0, replica_index=0, microbatch_index=0)


def trace_step(
    module: nn.Module,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    step_name: str,
    state_buffers: frozenset[str] = frozenset(),
    device: torch.device | None = None,
    key: DrawKey = _ANY_KEY,
    draw_functions: frozenset[Any] = frozenset(),
    is_cut: bool = False,
) -> StepTrace:
    """Record one run of `step(*args, **kwargs)` in which every activation is absent.

    The batch in `args` and `kwargs` is real; parameters, and all that is computed from them, have shapes only. The
    module, its buffers and all random state are left as they were. Runs under the caller's grad mode. `state_buffers`
    are buffers that another step writes: their values are on one stage only. Parameters are taken to be on `device`,
    where they are not yet; the batch and the buffers have to be there. Random draws that decide on the path are those
    of the micro-batch with this `key`, where `draw_functions` tells what draws. `is_cut` tells that there are several
    stages.

    Raises:
        BatchError: a training step returns nothing.
        CaptureError: the step reads the value of an activation before the last use of a trainable parameter, or does
            something else that shapes alone do not decide; names the module path and the source line.
    """
    begin = time.perf_counter()
    written_buffers = state_buffers
    opaque: frozenset[str] = frozenset()
    while True:  # what the step writes, and which calls read values, is seen in the middle; begin again with it known
        draws = PlacedDraws(key, device or torch.device("cpu"), draw_functions)
        tracer = _Tracer(module, written_buffers, opaque, step_name, device, draws, is_cut=is_cut)
        try:
            trace = tracer.run(step, args, kwargs)
        except ReadsValuesError as found:
            opaque |= found.paths
            continue
        if tracer.table.written_buffers <= written_buffers:
            trace.seconds = time.perf_counter() - begin
            return trace
        written_buffers |= tracer.table.written_buffers


class _Tracer(OperationMode):
    def __init__(
        self,
        module: nn.Module,
        written_buffers: frozenset[str],
        opaque: frozenset[str],
        step_name: str,
        device: torch.device | None,
        draws: PlacedDraws,
        *,
        is_cut: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self.opaque = opaque
        self.step_name = step_name
        self.draws = draws
        self.is_cut = is_cut
        self.trainable = {name for name, p in module.named_parameters() if p.requires_grad}
        self.table = ValueTable(module, written_buffers, device)
        self.operations: list[Operation] = []
        self.log = CallLog(lambda: len(self.operations), self.table.index_of)
        self.metadata_functions: set[Any] = set()
        self.draw_functions: set[Any] = set()
        self._regions = Regions()
        self._failure: tuple[Exception, str] | None = None  # and the path of the innermost module that it left
        self._inputs_read: dict[int, Tensor] = {}
        self._observer = DispatchObserver()

    # ----- the run

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepTrace:
        end_reason = None
        result = None
        used_at_end: set[int] = set()
        loss_index = None
        with preserved_state(self.module) as state, computing_shapes():
            self._observer = state.observer
            self._wrap_modules()
            seed_torch(0, self.draws.device)  # alike on every rank, as far as it is not known yet what draws
            self.draws.begin(kept_generators(self.module))
            root = self.log.enter(STEP)
            try:
                with self:
                    result = step(*args, **kwargs)
                used_at_end = self.table.indices_in(result)
                loss = result.get("loss") if isinstance(result, Mapping) and "loss_weight" not in result else result
                loss_index = self.table.index_of(loss) if isinstance(loss, Tensor) else None
            except RefusedStepError:
                raise
            except Exception as error:
                end_reason = self._explain_end(error)
                used_at_end = self._held_by_step(error)
            self.log.leave(root)
            changed = state.modules_changed()
            reassigned = self._note_reassigned_buffers()
        if end_reason is None and result is None and self.step_name == "training_step":
            raise _no_loss(step)
        for index in used_at_end:
            self.table.values[index].reads.append(len(self.operations))
        return StepTrace(
            operations=self.operations,
            values=self.table.values,
            calls=self.log.calls,
            metadata_functions=frozenset(self.metadata_functions),
            draw_functions=frozenset(self.draw_functions),
            used_at_end=frozenset(used_at_end),
            loss_index=loss_index,
            end_reason=end_reason,
            modules_changed=changed,
            parameter_elements={name: p.numel() for name, p in self.module.named_parameters()},
            state_names=self.table.state_names,
            inputs_read=frozenset(self._inputs_read),
            reassigned_buffers=reassigned,
            written_parameters=frozenset(self.table.written_parameters),
        )

    def _note_reassigned_buffers(self) -> tuple[str, ...]:
        """Buffers in whose place the step put an activation belong to the stage that makes it, as written ones do."""
        reassigned = self.table.reassigned(dict(self.module.named_buffers()))
        for name, value in reassigned.items():
            maker = self.operations[value.maker]
            maker.buffers = tuple(dict.fromkeys((*maker.buffers, name)))
        return tuple(reassigned)

    def _explain_end(self, error: Exception) -> str:
        """Decide whether the step may end here; if parameters are still to come, it is an error."""
        seen = {name for op in self.operations for name in op.parameters}
        unseen = sorted(self.trainable - seen)
        path = self._failure[1] if self._failure is not None and self._failure[0] is error else ""
        place = f"in {path or 'the LightningModule'}, at {line_of_error(error)}"
        if unseen and isinstance(error, AbsentValueError):
            more = opaque_paths(self.module, path) - self.opaque
            if more:
                raise ReadsValuesError(more)
            raise CaptureError(
                f"{self.step_name} reads the value of an activation {place}: {error} A pipeline stage cannot know it "
                f"before the stages behind it have run. {len(unseen)} trainable parameters come after this place "
                f"(first: {unseen[0]}). Decide on batch data instead, move the read behind the model, or freeze "
                "parameters that the step does not use (requires_grad=False)."
            ) from error
        if unseen:
            raise CaptureError(
                f"{self.step_name} raised {type(error).__name__} while it was traced on shapes, {place}: {error}"
            ) from error
        return f"{type(error).__name__} {place}"

    def _held_by_step(self, error: Exception) -> set[int]:
        """Values that the step's own frame still holds: it may use any of them after the trace has ended."""
        held: set[int] = set()
        frame_number = 0
        trace = error.__traceback__
        while trace is not None and frame_number < 2:  # frame 0 is ours, frame 1 the user's step
            if frame_number == 1:
                for value in trace.tb_frame.f_locals.values():
                    held |= self.table.indices_in(value)
            trace = trace.tb_next
            frame_number += 1
        return held

    # ----- module calls

    def _wrap_modules(self) -> None:
        for path, sub in self.module.named_modules():
            if not isinstance(sub, torch.jit.ScriptModule):
                sub.__dict__["forward"] = self._wrapped_forward(path, sub.forward)
        if self.is_cut:
            for attributes, generate in refuse_generate(self.module, self.step_name):
                attributes["generate"] = generate

    def _wrapped_forward(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_paused:
                return original(*args, **kwargs)
            call = self.log.enter(path)
            try:
                if path in self.opaque:
                    result = self._opaque_call(call, original, args, kwargs)
                else:
                    result = original(*args, **kwargs)
                call.result = self.log.as_recorded(result)
                return result
            except Exception as error:
                if (self._failure is None or self._failure[0] is not error) and not call.is_opaque:
                    self._failure = error, path
                raise
            finally:
                self.log.leave(call)

        return forward

    def _opaque_call(
        self, call: ModuleCall, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call that reads values of activations as one operation."""
        call.is_opaque = True
        sub = self.module.get_submodule(call.module_path)
        result = self.unwatched(
            shapes_of_result,
            (sub, original, args, kwargs),
            {"absent_form": self.table.absent_form_of_activation, "before_run": self._observer.begin},
        )
        written = self.table.written_storages(self._observer.written)
        names = {name for name, _ in self.module.named_buffers()} & self.table.written_buffers
        return self._record(
            OPAQUE_CALL,
            args,
            kwargs,
            list(tree.tensors((args, kwargs))),
            result,
            written,
            parameters=[self.table.parameter_names[id(p)] for p in sub.parameters()],
            buffers=[name for name in sorted(names) if name.startswith(f"{call.module_path}.")],
        )

    # ----- operations

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        if function in SETS_FLAG and self.table.is_parameter(args[0]):
            return self.table.set_flag(args[0], lambda: run(*args, **kwargs))
        if function == _SET_DATA and id(args[0]) in self.table.parameter_names:
            name = self.table.parameter_names[id(args[0])]
            raise refuse_parameter_assignment(name, self.step_name, self.log.module_path)
        found = list(tree.tensors((args, kwargs)))
        values = tree.tensors(value_arguments(function, args, kwargs))
        if function is not RECOMPUTATION and not any(self.table.is_activation(t) for _, t in values):
            return self._outside(function, args, kwargs, run)
        for path, tensor in found:
            if self.table.is_of_unknown_origin(tensor):
                raise CaptureError(
                    f"{function_name(function)} in {self.log.module_path or self.step_name} takes a tensor of shape "
                    f"{tuple(tensor.shape)} whose origin the trace did not see (argument {path}): it was made inside "
                    "TorchScript, vmap or a compiled function, or kept from an earlier step."
                )
        is_custom = isinstance(function, type)  # its code may use tensors that it is not given
        run_args, run_kwargs = tree.map_tensors(self.table.absent_form, (args, kwargs))
        self._observer.begin(note_inputs=is_custom)
        try:
            was_paused, self.is_paused = self.is_paused, True
            try:
                shapes = [tensor.shape for _, tensor in found]
                result = run(*run_args, **run_kwargs)
                keeps_shapes = all(t.shape == shape for (_, t), shape in zip(found, shapes, strict=True))
            finally:
                self.is_paused = was_paused
        except AbsentValueError:
            if all(self.table.is_buffer(t) for _, t in found if self.table.is_activation(t)):
                return run(*args, **kwargs)  # the value of a buffer that the step writes, a counter say
            raise
        if not keeps_shapes:
            raise CaptureError(
                f"{function_name(function)} in {self.log.module_path or self.step_name} changes the shape of a tensor "
                "in place; use the form that gives a new tensor (for example squeeze instead of squeeze_)."
            )
        written = self.table.written_storages(self._observer.written)
        has_tensors = any(True for _ in tree.tensors(result))
        if not has_tensors and not written and function not in _SIDE_EFFECTS:
            self.metadata_functions.add(function)
            return result
        if kwargs.get("generator") is not None:
            self.log.note_placed_draw()
        return self._record(function, args, kwargs, found, result, written)

    def counted_call(self, function: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """Record a call with side effects (a logged value) as an operation that belongs to one stage."""
        found: list[tuple[tree.LeafPath, Tensor]] = [
            ((0, index), tensor) for index, tensor in enumerate(inputs) if self.table.is_activation(tensor)
        ]
        if found:
            self._observer.begin()
            self._record("counted_call", inputs, {}, found, None, set())

    def _record(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: list[tuple[tree.LeafPath, Tensor]],
        result: Any,
        written: set[int],
        *,
        parameters: Sequence[str] = (),
        buffers: Sequence[str] = (),
    ) -> Any:
        position = len(self.operations)
        reads: list[int] = []
        parameters, buffers = list(parameters), list(buffers)
        for _, tensor in found:
            name = self.table.state_names.get(id(tensor))
            if name is not None:
                (parameters if id(tensor) in self.table.parameter_names else buffers).append(name)
            elif self.table.is_activation(tensor):
                reads.append(self.table.value(tensor).index)
        hidden_reads: list[int] = []
        for tensor in self._observer.inputs.values():
            original = self.table.original(tensor)
            name = self.table.state_names.get(id(original))
            if name is not None:
                (parameters if id(original) in self.table.parameter_names else buffers).append(name)
            elif (hidden := self.table.find(original)) is not None:
                hidden_reads.append(hidden.index)
        written_arguments = self.table.note_writes(position, found, written)
        sized_by_data = (
            self._observer.sized_by_data
            or any(self.table.values[v].sized_by_data for v in reads)
            or any(self._observer.is_sized_by_data(tensor) for _, tensor in found)
        )
        made: dict[tree.LeafPath, int] = {}
        aliases: dict[tree.LeafPath, tree.LeafPath] = {}

        def keep(path: tree.LeafPath, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            original = self.table.original(leaf)
            for argument_path, tensor in found:
                if tensor is original:
                    aliases[path] = argument_path
                    return original
            value = self.table.find(original)
            if value is None:
                value = self.table.new_value(original, position, path, in_arguments=False)
                value.sized_by_data = sized_by_data
            made[path] = value.index
            return original

        visible = tree.map_leaves(keep, result)
        self._note_inputs(found)
        self.operations.append(
            Operation(
                index=position,
                function=function,
                reads=tuple(dict.fromkeys(reads)),
                parameters=tuple(dict.fromkeys(parameters)),
                buffers=tuple(dict.fromkeys(buffers)),
                result=visible,
                made=made,
                aliases=aliases,
                written_arguments=written_arguments,
                written_storages=tuple(written),
                constants=_constants(args, kwargs),
                is_random=self._observer.is_random,
                flops=self._observer.flops,
                module_path=self.log.module_path,
                region=self._regions.current(),
                takes_data=any(not self.table.is_activation(tensor) for _, tensor in found),
                is_mean_loss=callable(function) and function in MEAN_LOSSES,
                ignores_targets=callable(function) and ignores_targets(function, args, kwargs),
            )
        )
        for index in dict.fromkeys((*reads, *hidden_reads)):
            self.table.values[index].reads.append(position)
        return visible

    def _outside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        """An operation on batch data alone: every stage computes it again."""
        self._observer.begin()
        result = self.draws.run(len(self.operations), function, args, kwargs, run)
        self.table.written_storages(self._observer.written)
        if function not in _METADATA:
            self._note_inputs(list(tree.tensors((args, kwargs))))
        if self._observer.is_random:
            self.draw_functions.add(function)
            self.log.note_placed_draw()
        return result

    def _note_inputs(self, found: list[tuple[tree.LeafPath, Tensor]]) -> None:
        for _, tensor in found:
            if not is_absent(tensor) and id(tensor) not in self.table.state_names:
                self._inputs_read[id(tensor)] = tensor


def _constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(leaf for _, leaf in tree.walk((args, kwargs)) if not isinstance(leaf, Tensor))


def _no_loss(step: Callable[..., Any]) -> BatchError:
    return BatchError(
        f"training_step ({line_of_function(step)}) returned no loss (None). Under Lightning that skips a batch; a "
        "pipeline's stages have begun with it by then. Return the loss of every batch: 0.0 * loss for one that should "
        "not count, or leave it out of the data."
    )
