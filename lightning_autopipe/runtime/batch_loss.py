"""`loss_over="batch"`: layers run by micro-batch, the rest of the step once, on what all of them gave.

A contrastive loss compares each sample with all others of the batch; the mean of such losses over micro-batches is
another number. So the last stage leaves each micro-batch's step where only the loss is left, joins the values that are
alive there, and runs the end of the step on the whole batch. Its gradients go back into the micro-batches' graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_autopipe.capture.cuts import is_same_path
from lightning_autopipe.capture.records import StepTrace, Value
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.step_capture import StepCapture

_WAY_OUT = "Set num_microbatches=1 (and loss_over='microbatch') to run whole batches."


def find_rest(step_name: str, whole: StepCapture, part: StepCapture) -> int:
    """Find where the rest of a step begins, which runs once on the whole batch.

    That is right behind the last layer: the last operation that takes a parameter of more than one element (a single
    one scales similarities). Each value that is alive there must have one entry a sample, or depend on parameters
    alone; where one has not (a similarity of all with all), the rest begins earlier.

    Args:
        step_name: Named in errors.
        whole: The step on a whole batch.
        part: The step on one of its micro-batches.

    Raises:
        CaptureError: there is no such place.
    """
    trace = whole.trace
    if not is_same_path(trace, part.trace):
        raise CaptureError(
            f"loss_over='batch': {step_name} takes another path for a micro-batch than for the whole batch. {_WAY_OUT}"
        )
    if part.trace.draw_functions or any(call.draws_python for call in part.trace.calls):
        raise CaptureError(
            f"loss_over='batch': {step_name} draws random numbers that depend on no activation (a mask of the batch, "
            "say); the end of the step would draw others than its layers did. Draw them in the data set or in "
            f"on_after_batch_transfer. {_WAY_OUT}"
        )
    elements = trace.parameter_elements
    last = max((op.index for op in trace.operations if any(elements[n] > 1 for n in op.parameters)), default=0)
    end = len(trace.operations) + (trace.end_reason is not None)  # what is behind an early end runs on the last stage
    positions: list[int] = [*range(last + 1, end), *range(last, 0, -1)]
    for position in positions:
        if whole.table.keeps_meaning(position) and part.table.keeps_meaning(position):
            dims = join_dims(whole, part, position)
            if dims and any(dim is not None for dim in dims):
                return position
    raise CaptureError(
        f"loss_over='batch': {step_name} has no place behind its layers where every value has one entry a sample, so "
        f"that micro-batches could be joined there. {_WAY_OUT}"
    )


def join_dims(whole: StepCapture, part: StepCapture, position: int) -> tuple[int | None, ...]:
    """Give, for each value that crosses `position`, the dimension that counts samples; None: it has no samples.

    Nothing at all where a value depends on the batch and has not exactly one such dimension.
    """
    values = [whole.trace.values[v] for v in whole.table.crossing[position]]
    parts = [part.trace.values[v] for v in part.table.crossing[position]]
    dims: list[int | None] = []
    for value, of_part in zip(values, parts, strict=True):
        sizes = zip(value.absent.shape, of_part.absent.shape, strict=True)
        differing = [dim for dim, (size, part_size) in enumerate(sizes) if size != part_size]
        if len(differing) > 1 or (not differing and _depends_on_data(whole.trace, value)):
            return ()
        dims.append(differing[0] if differing else None)
    return tuple(dims)


class JoinedValues:
    """The values of all micro-batches at the place where the rest of the step begins."""

    def __init__(self, dims: Sequence[int | None]) -> None:
        self._dims = dims
        self._parts: dict[int, tuple[Tensor, ...]] = {}
        self._leaves: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, microbatch_index: int, values: tuple[Tensor, ...]) -> None:
        """Take what one micro-batch's layers gave."""
        self._parts[microbatch_index] = values

    def join(self) -> tuple[Tensor, ...]:
        """Give each value of the whole batch, as a leaf that requires a gradient where one of its parts does."""
        joined = []
        for slot, dim in enumerate(self._dims):
            parts = [self._parts[index][slot] for index in sorted(self._parts)]
            with torch.no_grad():
                leaf = parts[-1].detach().clone() if dim is None else torch.cat(parts, dim)
            joined.append(leaf.requires_grad_(any(part.requires_grad for part in parts)))
        self._leaves = tuple(joined)
        return self._leaves

    def roots(self, microbatch_index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Give a micro-batch's values to back-propagate from, and their gradients.

        What parameters alone decide on is computed for each micro-batch, but was used once: its gradient goes to one.
        """
        order = sorted(self._parts)
        tensors, gradients = [], []
        for slot, (leaf, dim) in enumerate(zip(self._leaves, self._dims, strict=True)):
            tensor = self._parts[microbatch_index][slot]
            if leaf.grad is None or not tensor.requires_grad:
                continue
            if dim is None:
                if microbatch_index != order[-1]:
                    continue
                gradient = leaf.grad
            else:
                sizes = [self._parts[index][slot].shape[dim] for index in order]
                gradient = torch.split(leaf.grad, sizes, dim)[order.index(microbatch_index)]
            tensors.append(tensor)
            gradients.append(gradient)
        return tensors, gradients


def _depends_on_data(trace: StepTrace, value: Value) -> bool:
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        writers = (op for op in trace.operations[current.maker :] if current.storage in op.written_storages)
        for op in (trace.operations[current.maker], *writers):
            if op.takes_data or current.in_arguments:
                return True
            waiting.extend(_new_values(trace, op.reads, seen))
    return False


def _new_values(trace: StepTrace, indices: Iterable[int], seen: set[int]) -> list[Value]:
    new = [index for index in indices if index not in seen]
    seen.update(new)
    return [trace.values[index] for index in new]
