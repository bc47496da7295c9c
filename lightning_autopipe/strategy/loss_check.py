"""Whether a step's loss may be taken by micro-batch: the weighted mean over parts must be the loss of the whole."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.profiling.unchanged import unchanged
from lightning_autopipe.runtime.pipeline import Pipeline

_log = logging.getLogger(pl.__name__)
_ROUNDING = 1e3  # in units of the dtype's resolution
_MAX_DIFFERENCE = 0.1  # relative: what is above it is another loss, what is below may be a small part of one


def check_loss(
    pipeline: Pipeline, *, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatches: int
) -> None:
    """Compare the loss of a batch with that of its parts, in evaluation mode, and leave all as it was.

    A sum over samples, a root of a mean or a loss that compares samples (contrastive) is another number by parts;
    micro-batches and replicas would train on another loss than one device. Nothing is said where the step draws random
    numbers or does not run in evaluation mode.

    Args:
        pipeline: Of the whole module.
        step_name: The step.
        args: One whole batch and what else the step takes.
        kwargs: Keyword arguments alike.
        num_microbatches: Of the plan.

    Raises:
        CaptureError: the two differ much.
    """
    batch_size = pipeline.splitter.batch_size(step_name, args, kwargs)
    if batch_size < 2:
        return
    num_parts = max(2, min(num_microbatches, batch_size // 2))
    try:
        losses = _losses(pipeline, step_name, args, kwargs, num_parts)
    except Exception as error:
        _log.info("Not checked whether the loss is a mean over samples: %s: %s", type(error).__name__, error)
        return
    if losses is None:
        return
    whole, by_parts, resolution = losses
    difference = abs(whole - by_parts) / max(abs(whole), abs(by_parts), 1e-30)
    if difference <= _ROUNDING * resolution or not math.isfinite(whole):
        return
    told = (
        f"{step_name}'s loss is no mean over samples: {batch_size} of them have the loss {whole:.6g}, and the mean of "
        f"the losses of {num_parts} parts, weighted by samples or known targets, is {by_parts:.6g}. Micro-batches and "
        "replicas take such a mean. "
    )
    if pipeline.loss_over == "batch":
        raise CaptureError(
            f"loss_over='batch': {step_name}'s loss of {batch_size} samples is {whole:.6g}, but {by_parts:.6g} where "
            f"its layers run in {num_parts} parts: some layer mixes the samples of a batch. Set num_microbatches=1; "
            "verify=False turns this check off and trains on the other loss."
        )
    ways_out = (
        'Return {"loss": loss, "loss_weight": n} if it is a mean over n things, divide a sum by the number of samples, '
        "set loss_over='batch' if it compares samples, or num_microbatches=1"
    )
    if not difference <= _MAX_DIFFERENCE:
        raise CaptureError(f"{told}{ways_out}; verify=False turns this check off and trains on the other loss.")
    warnings.warn(f"{told}{ways_out}.", stacklevel=2)


def _losses(
    pipeline: Pipeline, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_parts: int
) -> tuple[float, float, float] | None:
    """Give the loss of the whole, the weighted mean over its parts, and the loss's resolution.

    None where there is no loss or it is another one each time.
    """

    def loss(num_microbatches: int, step: int) -> Tensor | None:
        twin = pipeline.in_process(is_cut=False, num_microbatches=num_microbatches)
        outcome = twin.run(step_name, args, kwargs, training=False, step=step)
        weights = torch.stack(outcome.weights)
        if len(outcome.losses) != len(outcome.weights) or not bool(weights.sum() > 0):
            return None
        kept = weights > 0
        resolutions.append(torch.finfo(outcome.losses[0].dtype).eps)
        return (torch.stack(outcome.losses).double() * weights)[kept].sum() / weights.sum()

    resolutions: list[float] = []
    with unchanged(pipeline.module, ()), pipeline.silent(), torch.no_grad():
        pipeline.module.eval()
        whole, again = loss(1, 0), loss(1, 1)  # draws are keyed by the step
        if whole is None or again is None:
            return None
        if not torch.equal(whole, again):
            _log.info("Not checked whether the loss is a mean over samples: it is another one each time.")
            return None
        by_parts = loss(num_parts, 0)
    return None if by_parts is None else (float(whole), float(by_parts), max(resolutions))
