"""Proof on the user's own module: one micro-batch uncut and through all stages must give the same numbers."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from torch import Tensor

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.capture.records import StepTrace
from lightning_autopipe.core.errors import CaptureError
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.profiling import on_device
from lightning_autopipe.profiling.unchanged import unchanged
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.loss_check import check_loss

_log = logging.getLogger(pl.__name__)  # shown by default, as Lightning's own notes are
_COPIES_NEEDED = 4  # of the parameters: two sets of gradients, activations of one micro-batch
_ROUNDING = 1e3  # in units of the dtype's resolution: sums in another order differ by a few of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the proof has shown: bit for bit, or but for the order of sums (`largest_difference`, relative)."""

    seconds: float
    largest_difference: float

    def __str__(self) -> str:
        equal = (
            "bit for bit"
            if self.largest_difference == 0.0
            else f"but for the order of sums (relative difference {self.largest_difference:.1e})"
        )
        return f"Verified in {self.seconds:.1f} s: loss and gradients through the stages equal the uncut step {equal}."


def verify_pipeline(
    pipeline: Pipeline, plan: PipelinePlan, *, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Verdict:
    """Run the first micro-batch of a batch uncut and through the plan's stages, all in this process, and compare.

    The module is whole and is left as it was. Both runs make the same keyed random draws.

    Raises:
        CaptureError: the numbers differ by more than rounding; names the first value that does.
    """
    begin = time.perf_counter()
    capture = pipeline.planned_step.capture_microbatch(step_name, args, kwargs, plan.num_microbatches)
    uncut, through_stages = (
        _run(pipeline.in_process(is_cut=is_cut), capture.trace, step_name, capture.args, capture.kwargs)
        for is_cut in (False, True)
    )
    differences = [_difference(name, reference, through_stages[name], plan) for name, reference in uncut.items()]
    return Verdict(seconds=time.perf_counter() - begin, largest_difference=max(differences))


def verify_on_one_rank(
    pipeline: Pipeline,
    plan: PipelinePlan,
    communicator: Communicator,
    *,
    step_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    in_any_case: bool,
) -> None:
    """Verify on global rank 0 and tell the result; the other ranks wait. Collective over all ranks.

    Args:
        pipeline: Of the whole module, cut by the plan.
        plan: The plan.
        communicator: This rank's groups.
        step_name: The step.
        args: One whole batch and what else the step takes.
        kwargs: Keyword arguments alike.
        in_any_case: Whether to try it although memory may not suffice.

    Raises:
        CaptureError: the numbers differ; on every rank.
    """
    problem: str | None = None
    if any(map(is_absent, pipeline.module.parameters())):
        if communicator.global_rank == 0:
            _log.info("Not verified: parameters are made stage by stage, and no process has all of them.")
    elif communicator.global_rank == 0:
        needed_bytes = _COPIES_NEEDED * sum(p.numel() * p.element_size() for p in pipeline.module.parameters())
        free_bytes = _free_bytes(pipeline.device)
        if needed_bytes > free_bytes and not in_any_case:
            _log.info(
                "Not verified: about %.1f GB are needed beside the module, %.1f GB are free (verify=True tries it).",
                needed_bytes / 1e9,
                free_bytes / 1e9,
            )
        else:
            try:
                with on_device(pipeline.module, pipeline.device):
                    if plan.num_stages > 1:
                        verdict = verify_pipeline(pipeline, plan, step_name=step_name, args=args, kwargs=kwargs)
                        _log.info("%s", verdict)
                    if plan.num_microbatches * plan.layout.num_replicas > 1:
                        check_loss(
                            pipeline,
                            step_name=step_name,
                            args=args,
                            kwargs=kwargs,
                            num_microbatches=plan.num_microbatches,
                        )
            except MemoryError as error:
                if in_any_case:
                    raise
                _log.info("Not verified: %s.", error)
            except CaptureError as error:
                problem = str(error)
    problem = communicator.broadcast_in_world(problem)
    if problem is not None:
        raise CaptureError(problem)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _run(
    pipeline: Pipeline, trace: StepTrace, step_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Give the loss (under the name '') and every parameter's gradient of one run in this process."""
    module = pipeline.module
    with unchanged(module, trace.written_parameters), pipeline.silent():
        outcome = pipeline.run(step_name, args, kwargs, training=True, step=0)
        found: dict[str, Tensor | None] = {"": outcome.losses[0]}
        found.update((name, parameter.grad) for name, parameter in module.named_parameters())
    return found


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _difference(name: str, reference: Tensor | None, value: Tensor | None, plan: PipelinePlan) -> float:
    what = f"the gradient of {name}" if name else "the loss"
    if reference is None and value is None:
        return 0.0
    if reference is not None and value is not None:
        reference, value = _dense(reference), _dense(value)
        differs = (reference != value) & ~(reference.isnan() & value.isnan())  # a batch may have NaN, a step overflow
        if not differs.any():
            return 0.0
        scale = float(reference.nan_to_num(0.0, 0.0, 0.0).abs().max())
        reference, value = reference[differs], value[differs]
        relative = float((reference - value).abs().max()) / scale if scale > 0 else float("inf")
        if relative <= _ROUNDING * torch.finfo(reference.dtype).eps:
            return relative
        wrong = (reference - value).abs().argmax()
        told = f"{float(value[wrong]):.9g} through the stages, {float(reference[wrong]):.9g} uncut"
    else:
        told = "it is missing " + ("uncut" if reference is None else "through the stages")
    owner = next((layer.name for layer in plan.layers if name in layer.parameters), "the end of the step")
    raise CaptureError(
        f"The step cannot be run as {plan.num_stages} stages: {what} differs from the uncut step ({told}; layer "
        f"{owner}). A step whose Python keeps state between modules in a way that tracing does not see does that. Set "
        "num_stages=1 or partition= to other cuts; verify=False turns this proof off and trains with the differing "
        "numbers."
    )
