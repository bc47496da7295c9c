"""What a trace's folder holds: the recorded steps beside the predicted one, as trace, picture and figures."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.errors import AutoPipeError, ConfigurationError
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.cost import CostModel
from lightning_autopipe.planner.plan_step import plan_step
from lightning_autopipe.visualization import plan_title, save_chrome_trace, save_picture
from lightning_autopipe.visualization.comparison import compare
from lightning_autopipe.visualization.lanes import Ranks

TRACE_NAME, PICTURE_NAME, PLAN_NAME = "trace.json", "timeline.svg", "plan.json"
PREDICTED = "predicted"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Some steps of a fit, measured on all ranks."""

    timelines: Mapping[int, Timeline]
    """By the step's number."""
    ranks: Ranks
    clock_error_s: float
    """By how much events of different ranks may be shifted against each other."""
    clock_drift_s: float
    """By how much the clocks went apart while it was recorded, at most; it has been taken out."""


def check_folder(folder: str | Path) -> None:
    """Makes the folder and writes to it, to see that it can be done.

    Raises:
        ConfigurationError: it cannot.
    """
    probe = Path(folder) / ".autopipe"
    try:
        write_whole(probe, "")
        probe.unlink()
    except (ConfigurationError, OSError) as error:
        raise ConfigurationError(
            f"trace={str(folder)!r} must be a folder that global rank 0 can write to: {error}; set another one, or "
            "leave trace unset"
        ) from error


def write_trace(
    folder: str | Path, recorded: RecordedSteps, plan: PipelinePlan, cluster: ClusterTopology | None
) -> None:
    """Writes all files, each of them whole.

    Raises:
        ConfigurationError: one cannot be written.
    """
    folder = Path(folder)
    predicted = predicted_step(plan, cluster)
    typical = sorted(recorded.timelines, key=lambda number: recorded.timelines[number].step_s)[
        (len(recorded.timelines) - 1) // 2
    ]
    measured = recorded.timelines[typical]
    expected = {} if predicted is None else {PREDICTED: predicted}
    title = plan_title(plan)
    plan.save(folder / PLAN_NAME)
    save_chrome_trace(
        folder / TRACE_NAME,
        {**expected, **{f"step {number}": timeline for number, timeline in recorded.timelines.items()}},
        ranks=recorded.ranks,
        cluster=cluster,
        title=title,
        other={
            "typical_step": typical,
            "ranks": [asdict(row) for row in compare(measured, predicted, ranks=recorded.ranks)],
            "clock_error_s": recorded.clock_error_s,
            "clock_drift_s": recorded.clock_drift_s,
        },
    )
    try:
        save_picture(
            folder / PICTURE_NAME,
            {**expected, f"measured, step {typical}": measured},
            ranks=recorded.ranks,
            title=title,
        )
    except ImportError as error:
        _log.warning("%s is not drawn: %s", folder / PICTURE_NAME, error)


def predicted_step(plan: PipelinePlan, cluster: ClusterTopology | None) -> Timeline | None:
    """The step that a plan predicts; None where its layers were not measured, or nothing prices it."""
    if not CostModel(plan.profile).is_measured:
        return None
    try:
        return simulate(plan_step(plan, cluster=cluster))
    except AutoPipeError as error:
        _log.warning("the step cannot be predicted: %s", error)
        return None


def step_numbers(timelines: Sequence[int]) -> str:
    """Numbers of steps, for people."""
    return f"step {timelines[0]}" if len(timelines) == 1 else f"steps {timelines[0]} to {timelines[-1]}"
