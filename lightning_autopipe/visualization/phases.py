"""The phases of a step, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopipe.core.schedule import Action, ActionType
from lightning_autopipe.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a step."""

    name: str
    start_s: float
    end_s: float


def step_phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Warm-up, up to the first backward anywhere; steady, up to the end of the last forward; cool-down, up to the end
    of the last backward; then the step's end. Those that take no time are left out; none where nothing goes backward.
    """
    first_backward_s, last_forward_s, last_backward_s = timeline.step_s, 0.0, 0.0
    for event in timeline.events:
        if isinstance(event.action, Action):
            if event.action.type is ActionType.FORWARD:
                last_forward_s = max(last_forward_s, event.end_s)
            elif event.action.type.is_compute:
                first_backward_s = min(first_backward_s, event.start_s)
                last_backward_s = max(last_backward_s, event.end_s)
    if not last_backward_s:
        return ()
    names = ("warm-up", "steady", "cool-down", "step's end")
    edges = (0.0, first_backward_s, max(first_backward_s, last_forward_s), last_backward_s, timeline.step_s)
    phases = (Phase(name=name, start_s=edges[i], end_s=edges[i + 1]) for i, name in enumerate(names))
    return tuple(phase for phase in phases if phase.end_s > phase.start_s)
