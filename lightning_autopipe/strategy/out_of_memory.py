"""What an error for lack of memory says: which stage, what was planned for it, what it took, and what to change."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.quantities import memory_text
from lightning_autopipe.runtime.errors import OutOfMemoryError, StageError

_ADVICE = (
    "To need less: more num_stages (now {num_stages}); more num_microbatches (now {num_microbatches}), each of which "
    "is smaller then; {schedule}precision='bf16-mixed' or 'bf16-true'; activation checkpointing in the module "
    "(torch.utils.checkpoint); a smaller batch"
)


@contextlib.contextmanager
def explained(
    plan: Callable[[], PipelinePlan | None], global_rank: int, stage_index: int, device: torch.device
) -> Iterator[None]:
    """A context in which lack of memory is raised with what the user can do about it.

    Args:
        plan: Gives what is run, if that is known already.
        global_rank: This process's.
        stage_index: The (first) stage that it runs.
        device: Where it computes.

    Raises:
        OutOfMemoryError: memory was asked for in vain.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StageError) else error
        if cause is None or not (isinstance(cause, (torch.OutOfMemoryError, MemoryError)) or is_oom_error(cause)):
            raise
        where = str(error) if isinstance(error, StageError) else f"stage {stage_index}: {type(cause).__name__}: {cause}"
        known = plan()
        planned = "" if known is None else f" {_planned(known, stage_index)}"
        raise OutOfMemoryError(
            f"global rank {global_rank} is out of memory: {where.rstrip('.')}.{planned} At its fullest this process "
            f"had {_peak_text(device)}. {_advice(known)}",
            stage_index=stage_index,
            microbatch_index=getattr(error, "microbatch_index", None),
            slice_index=getattr(error, "slice_index", None),
            direction=getattr(error, "direction", None),
        ) from cause


def _planned(plan: PipelinePlan, stage_index: int) -> str:
    if not plan.stage_predictions:
        return "The plan does not say how much the stage needs (profile='measured' predicts it)."
    stage = plan.stage_predictions[stage_index]
    parts = {
        "parameters": stage.parameter_bytes,
        "gradients": stage.gradient_bytes,
        "optimizer": stage.optimizer_bytes,
        f"{stage.stash_size:g} micro-batches": stage.activation_bytes + stage.working_bytes,
        "messages": stage.buffer_bytes,
    }
    listed = ", ".join(f"{name} {memory_text(num_bytes)}" for name, num_bytes in parts.items())
    return f"Planned were {memory_text(stage.peak_bytes)} for the stage ({listed})."


def _peak_text(device: torch.device) -> str:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{memory_text(torch.cuda.max_memory_allocated(device))} of {memory_text(total)} on {device}"
    return f"{memory_text(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)} in all"


def _advice(plan: PipelinePlan | None) -> str:
    if plan is None:
        return _ADVICE.format(num_stages="one for each process", num_microbatches="not chosen yet", schedule="")
    is_plain = plan.schedule.name == "1f1b" and not plan.schedule.depths
    return _ADVICE.format(
        num_stages=plan.num_stages,
        num_microbatches=plan.num_microbatches,
        schedule="" if is_plain else f"schedule='1f1b', which keeps few alive (now {plan.schedule.name!r}); ",
    )
