"""In which order the rows of several views of each sample reach a model: by views, or by samples.

A contrastive step joins two views of its batch (`torch.cat([a, b])`, or stacked and flattened) and passes the model
once. What its layers give for micro-batches must then be joined in the order of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopipe.capture import tree
from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.interception import OperationMode
from lightning_autopipe.capture.preserve import preserved_state
from lightning_autopipe.capture.replay import StageExit
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.runtime.batch_loss import join_views


def are_views_apart(
    module: nn.Module, step_name: str, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int], num_views: int
) -> bool:
    """Tell whether all samples of the first view come first, by what the model is first given.

    Args:
        module: Whose step it is; nothing changes.
        step_name: The method.
        batch: Arguments and keyword arguments of the whole batch's step.
        microbatches: Those of the micro-batches.
        sizes: Samples of the micro-batches.
        num_views: Rows of each sample.

    Raises:
        CaptureError: it is neither order.
    """
    step = getattr(module, step_name)
    whole = _first_rows(module, step, batch, sum(sizes) * num_views)
    parts = [
        _first_rows(module, step, microbatch, size * num_views)
        for microbatch, size in zip(microbatches, sizes, strict=True)
    ]
    rows = [part for part in parts if part is not None]
    if whole is not None and len(rows) == len(parts):
        if torch.equal(join_views(rows, 0, num_views), whole):
            return True
        if torch.equal(torch.cat(rows), whole):
            return False
    raise CaptureError(
        f"loss_over='batch': {step_name} gives its model {num_views} rows for each sample, in an order that is neither "
        "by views (torch.cat([a, b])) nor by samples (torch.stack([a, b], 1).flatten(0, 1)). Use one of them, or set "
        "num_microbatches=1."
    )


def _first_rows(module: nn.Module, step: Callable[..., Any], batch: Any, num_rows: int) -> Tensor | None:
    """Run a step up to its first operation on a parameter; give the tensor with so many rows that it takes."""
    args, kwargs = tree.map_tensors(Tensor.clone, batch)
    mode = _UpToTheModel(module, num_rows)
    with preserved_state(module):
        try:
            with mode:
                step(*args, **kwargs)
        except StageExit:
            pass
    return mode.rows


class _UpToTheModel(OperationMode):
    def __init__(self, module: nn.Module, num_rows: int) -> None:
        super().__init__()
        self.rows: Tensor | None = None
        self._num_rows = num_rows
        self._parameters = {id(parameter) for parameter in module.parameters()}

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
        found = [tensor for _, tensor in tree.tensors((args, kwargs))]
        if not any(id(tensor) in self._parameters for tensor in found):
            return run(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            for tensor in found:
                is_data = id(tensor) not in self._parameters and not is_absent(tensor)
                if is_data and tensor.dim() > 0 and tensor.shape[0] == self._num_rows:
                    self.rows = tensor.detach().clone()
                    raise StageExit
        raise StageExit

    def counted_call(self, function: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        pass  # nothing is logged
