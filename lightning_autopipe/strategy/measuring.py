"""Measured times in the place of counted operations, before a plan is made."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from lightning_autopipe.core.profile import ModelProfile
from lightning_autopipe.profiling import ProfilingError, align_layers, measure_layers, on_device
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.strategy.communicator import Communicator


def measured_profile(
    pipeline: Pipeline,
    profile: ModelProfile,
    communicator: Communicator,
    *,
    step_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatches: int,
    may_fail: bool,
) -> ModelProfile:
    """The profile with seconds and bytes of each layer, for one micro-batch. Collective over all ranks.

    The ranks share the layers between them, and measure at the same time, as they will train (docs/decisions/0009).

    Args:
        pipeline: Of the whole module, which has profiled the step.
        profile: What it gave.
        communicator: This rank's groups.
        step_name: The step.
        args: One whole batch and what else the step takes.
        kwargs: Keyword arguments alike.
        num_microbatches: Into which the batch is split.
        may_fail: Whether to warn and give the profile as it is where the layers cannot be measured.

    Raises:
        ProfilingError: they cannot, and that is not allowed; on every rank alike.
    """
    has_exchanged = False

    def exchange(findings: Any) -> Sequence[Any]:
        nonlocal has_exchanged
        has_exchanged = True
        by_replica = communicator.gather_over_replicas(communicator.gather_in_pipeline(findings))
        return [of_rank for pipeline_findings in by_replica for of_rank in pipeline_findings]

    try:
        try:
            with pipeline.silent(), on_device(pipeline.module, pipeline.device):
                capture = pipeline.capture_microbatch(step_name, args, kwargs, num_microbatches)
                capture.trace.layers = align_layers(capture.trace, capture.table, capture.layer_keys)
                return profile.with_measurements(
                    measure_layers(
                        capture.trace,
                        capture.table,
                        pipeline.module,
                        getattr(pipeline.module, step_name),
                        capture.args,
                        capture.kwargs,
                        device=pipeline.device,
                        member_index=communicator.global_rank,
                        num_members=communicator.layout.world_size,
                        exchange=exchange,
                    )
                )
        except Exception as error:
            if has_exchanged:
                raise
            exchange(f"{type(error).__name__}: {error}")  # the others wait there
            raise ProfilingError(f"the layers of the step cannot be measured one by one: {error}") from error
    except ProfilingError as error:
        if not may_fail:
            raise
        if communicator.global_rank == 0:
            warnings.warn(
                f"{str(error).rstrip('.')}. Stages are balanced by counted floating-point operations instead; set "
                "profile='flops' to do so without trying",
                stacklevel=2,
            )
        return profile
