"""`loss_over="batch"`: layers run by micro-batch, the rest of the step once, on what all of them gave.

A contrastive loss compares each sample with all others of the batch; the mean of such losses over micro-batches is
another number. So the last stage leaves each micro-batch's step where only the loss is left, joins the values that are
alive there, and runs the end of the step on the whole batch. Its gradients go back into the micro-batches' graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_autopipe.capture.cuts import is_same_path
from lightning_autopipe.capture.records import StepTrace, Value
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.step_capture import StepCapture

_WAY_OUT = "Set num_microbatches=1 (and loss_over='microbatch') to run whole batches."


class Joint(NamedTuple):
    """How a value's parts are joined: along which dimension (None: it has no samples), with how many rows a sample."""

    dim: int | None
    num_views: int


def find_rest(step_name: str, whole: StepCapture, part: StepCapture, sizes: tuple[int, int]) -> int:
    """Find where the rest of a step begins, which runs once on the whole batch.

    That is right behind the last layer: the last operation that takes a parameter of more than one element (a single
    one scales similarities). Each value that is alive there must have one entry a sample, or depend on parameters
    alone; where one has not (a similarity of all with all), the rest begins earlier.

    Args:
        step_name: Named in errors.
        whole: The step on a whole batch.
        part: The step on one of its micro-batches.
        sizes: Samples of the batch, and of the micro-batch.

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
    positions: list[int] = [*range(last + 1, len(trace.operations) + 1), *range(last, 0, -1)]
    for position in positions:
        if whole.table.keeps_meaning(position) and part.table.keeps_meaning(position):
            joints = find_joints(whole, part, position, sizes)
            if any(joint.dim is not None for joint in joints):
                return position
    raise CaptureError(
        f"loss_over='batch': {step_name} has no place behind its layers where every value has one entry a sample, so "
        f"that micro-batches could be joined there. {_WAY_OUT}"
    )


def find_joints(whole: StepCapture, part: StepCapture, position: int, sizes: tuple[int, int]) -> tuple[Joint, ...]:
    """Give, for each value that crosses `position`, how the micro-batches' parts of it are joined.

    Nothing at all where a value depends on the batch and has not exactly one dimension that counts samples.

    Args:
        whole: The step on a whole batch.
        part: The step on one of its micro-batches.
        position: In both traces.
        sizes: Samples of the batch, and of the micro-batch.
    """
    values = [whole.trace.values[v] for v in whole.table.crossing[position]]
    parts = [part.trace.values[v] for v in part.table.crossing[position]]
    joints: list[Joint] = []
    for value, of_part in zip(values, parts, strict=True):
        shapes = list(zip(value.absent.shape, of_part.absent.shape, strict=True))
        differing = [dim for dim, (size, part_size) in enumerate(shapes) if size != part_size]
        if not differing:
            if _depends_on_data(whole.trace, value):
                return ()
            joints.append(Joint(None, 1))
            continue
        size, part_size = shapes[differing[0]]
        num_views = size // sizes[0]
        if len(differing) > 1 or (size, part_size) != (num_views * sizes[0], num_views * sizes[1]):
            return ()
        joints.append(Joint(differing[0], num_views))
    return tuple(joints)


class JoinedValues:
    """The values of all micro-batches at the place where the rest of the step begins.

    Args:
        joints: How each value is joined.
        are_views_apart: Whether rows of several views of the samples are in the order of the views (as `torch.cat`
            puts them), not in that of the samples.
    """

    def __init__(self, joints: Sequence[Joint], *, are_views_apart: bool) -> None:
        self._joints = joints
        self._are_views_apart = are_views_apart
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
        for slot, joint in enumerate(self._joints):
            parts = self._of_slot(slot)
            with torch.no_grad():
                leaf = parts[-1].detach().clone() if joint.dim is None else self._joined(parts, joint)
            joined.append(leaf.requires_grad_(any(part.requires_grad for part in parts)))
        self._leaves = tuple(joined)
        return self._leaves

    def roots(self, microbatch_index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Give a micro-batch's values to back-propagate from, and their gradients.

        What parameters alone decide on is computed for each micro-batch, but was used once: its gradient goes to one.
        """
        place = sorted(self._parts).index(microbatch_index)
        tensors, gradients = [], []
        for slot, (leaf, joint) in enumerate(zip(self._leaves, self._joints, strict=True)):
            tensor = self._parts[microbatch_index][slot]
            if leaf.grad is None or not tensor.requires_grad:
                continue
            if joint.dim is not None:
                gradient = self._split(leaf.grad, self._of_slot(slot), joint)[place]
            elif place == len(self._parts) - 1:
                gradient = leaf.grad
            else:
                continue
            tensors.append(tensor)
            gradients.append(gradient)
        return tensors, gradients

    def _of_slot(self, slot: int) -> list[Tensor]:
        return [self._parts[index][slot] for index in sorted(self._parts)]

    def _joined(self, parts: Sequence[Tensor], joint: Joint) -> Tensor:
        assert joint.dim is not None
        if joint.num_views == 1 or not self._are_views_apart:
            return torch.cat(list(parts), joint.dim)
        return join_views(parts, joint.dim, joint.num_views)

    def _split(self, gradient: Tensor, parts: Sequence[Tensor], joint: Joint) -> list[Tensor]:
        assert joint.dim is not None
        dim, num_views = joint.dim, joint.num_views
        sizes = [part.shape[dim] for part in parts]
        if num_views == 1 or not self._are_views_apart:
            return list(torch.split(gradient, sizes, dim))
        by_view = _by_view(gradient, dim, num_views)
        return [p.flatten(dim, dim + 1) for p in torch.split(by_view, [size // num_views for size in sizes], dim + 1)]


def join_views(parts: Sequence[Tensor], dim: int, num_views: int) -> Tensor:
    """Join micro-batches of several views: all samples of the first view come first."""
    return torch.cat([_by_view(part, dim, num_views) for part in parts], dim + 1).flatten(dim, dim + 1)


def _by_view(tensor: Tensor, dim: int, num_views: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], num_views, -1, *tensor.shape[dim + 1 :])


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
