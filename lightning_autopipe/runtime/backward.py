"""The backward of one unit on one stage, whole or in two parts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from lightning_autopipe.runtime.split_backward import DeferredBackward, backward_of_leaves
from lightning_autopipe.runtime.stage import StageOutput

_run_engine = Variable._execution_engine.run_backward
_AS_IT_IS: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def run_backward(received: Sequence[Tensor], output: StageOutput, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Back-propagate a unit; give the gradients of the received leaves that require one.

    Args:
        received: What the previous stage sent.
        output: What the stage made of it.
        gradients: Of the values sent on that require one.
    """
    roots, root_gradients = _roots(output, gradients)
    if roots:
        run = _run_without_autocast if torch._C._is_any_autocast_enabled() else _run_engine
        # What `torch.autograd.backward` does but its checks of shapes, a third of a small backward: gradients were
        # received in the shapes of their roots.
        run(tuple(roots), tuple(root_gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)
    found = []
    for leaf in received:
        if leaf.requires_grad:
            gradient = leaf.grad
            leaf.grad = None
            found.append(_in_layout_of(leaf, gradient))
    return tuple(found)


def _run_without_autocast(*args: Any, **kwargs: Any) -> None:
    with without_autocast():
        _run_engine(*args, **kwargs)


def run_input_backward(
    received: Sequence[Tensor], output: StageOutput, gradients: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], DeferredBackward]:
    """Like `run_backward`, but leave the gradients of the parameters to the second part, as far as they can wait."""
    roots, root_gradients = _roots(output, gradients)
    leaves = [leaf for leaf in received if leaf.requires_grad]
    with without_autocast():
        found, rest = backward_of_leaves(roots, root_gradients, leaves)
    return tuple(map(_in_layout_of, leaves, found)), rest


def run_weight_backward(rest: DeferredBackward) -> None:
    """Run the second part."""
    with without_autocast():
        rest.run()


def _roots(output: StageOutput, gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    roots = [tensor for tensor in output.sent if tensor.requires_grad]
    assert len(roots) == len(gradients), (len(roots), len(gradients))
    loss, more = output.loss, output.roots
    if loss is None and more is None:
        return roots, gradients
    root_gradients = list(gradients)
    if loss is not None and loss.requires_grad:
        roots.append(loss)
        root_gradients.append(torch.ones_like(loss))
    if more is not None:
        more_roots, more_gradients = more()
        roots.extend(more_roots)
        root_gradients.extend(more_gradients)
    return roots, root_gradients


def _in_layout_of(leaf: Tensor, gradient: Tensor | None) -> Tensor:
    """The gradient in the memory order of its leaf, in which the other end expects it; zeros where there is none."""
    if gradient is None:
        return torch.zeros_like(leaf, requires_grad=False)
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.stride() != leaf.stride():
        gradient = torch.empty_like(leaf, requires_grad=False).copy_(gradient)
    return gradient


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Backward in the dtypes that forward chose; nested, so that the outer cache of cast weights stays."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    return _disabled([device_type for device_type in ("cpu", "cuda") if torch.is_autocast_enabled(device_type)])


@contextlib.contextmanager
def _disabled(device_types: Sequence[str]):  # type: ignore[no-untyped-def]
    with contextlib.ExitStack() as contexts:
        for device_type in device_types:
            contexts.enter_context(torch.autocast(device_type, enabled=False))
        yield
