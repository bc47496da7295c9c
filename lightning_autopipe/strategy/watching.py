"""Which steps of a fit are watched, and for what."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.strategy.figure_log import FigureLog
from lightning_autopipe.strategy.options import StrategyOptions
from lightning_autopipe.strategy.replanning import ReplanningWatch
from lightning_autopipe.strategy.session import PipelineSession
from lightning_autopipe.strategy.step_watch import StepReader, StepWatch
from lightning_autopipe.strategy.trace_recording import TraceRecording


def make_watch(
    trainer: pl.Trainer, session: PipelineSession, options: StrategyOptions, cluster: ClusterTopology | None
) -> StepWatch | None:
    """What the options ask for; None for nothing. All ranks get the same.

    Args:
        trainer: Whose fit begins.
        session: Ready for its first step.
        options: The strategy's.
        cluster: What the plan was made for, where that is known.
    """
    communicator, device = session.communicator, session.device
    readers: list[StepReader] = []
    if options.trace_folder is not None:
        readers.append(TraceRecording(options.trace_folder, communicator, device, lambda: _plan(session), cluster))
        readers.append(FigureLog(trainer, communicator, device))
    # With NCCL the host's times are those of launches, which say little of what the device takes.
    has_times = device.type == "cpu" or options.process_group_backend == "gloo"
    if options.replan and has_times and CostModel(_plan(session).profile).is_measured:
        readers.append(ReplanningWatch(communicator, lambda: _plan(session), cluster))
    return StepWatch(readers, sent_bytes=lambda: session.pipeline.sent_bytes) if readers else None


def _plan(session: PipelineSession) -> PipelinePlan:
    assert session.current_plan is not None, "a step comes after its plan"
    return session.current_plan
