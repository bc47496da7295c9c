"""Notes what one rank does, and when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_autopipe.core.schedule import Action
from lightning_autopipe.core.timeline import StepEnd

Ran = tuple[Action | StepEnd, float, float, float]
"""What was done; when the rank turned to it, when its input was there, when it had ended, as `time.perf_counter`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank, in seconds of its own clock (`time.perf_counter`)."""

    begin_s: float
    ran: tuple[Ran, ...]
    """In the order in which it ended."""

    @property
    def end_s(self) -> float:
        """When the last thing had ended."""
        return max((ended_s for _, _, _, ended_s in self.ran), default=self.begin_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank computed or summed gradients; an exchange is waiting, as in `Timeline`."""
        return sum(ended - started for what, _, started, ended in self.ran if what is not StepEnd.EXCHANGE)


class TimelineRecorder:
    """An observer of the executor: it keeps what it is told, and thinks about it when the step is over.

    Times are the host's; nothing here waits for a device. On CUDA the host launches what an action computes, and ends
    an action that sends something over gloo when the device has computed it: forwards and backwards together then take
    as long as on the device, though part of one may be counted as the next one's. With NCCL the host waits for nothing,
    and times are those of launches only.
    """

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._ran: list[Ran] = []
        self._keep = self._ran.append

    def begin_step(self) -> RankStep | None:
        """Begin a step; give the one before it, with all that came up to now; None where it is the first one."""
        before = self.end_step()
        self._begin_s = time.perf_counter()
        return before

    def end_step(self) -> RankStep | None:
        """End a step and give it; None where none had begun."""
        if self._begin_s is None:
            return None
        step = RankStep(begin_s=self._begin_s, ran=tuple(self._ran))
        self._begin_s, self._ran = None, []
        self._keep = self._ran.append
        return step

    def ran(self, action: Action, waited_from_s: float, started_s: float, ended_s: float) -> None:
        """Note one action."""
        self._keep((action, waited_from_s, started_s, ended_s))

    @contextlib.contextmanager
    def timed(self, what: StepEnd) -> Iterator[None]:
        """A context that is noted as part of the step's end."""
        started_s = time.perf_counter()
        yield
        self._keep((what, started_s, started_s, time.perf_counter()))

    def note_rest(self, what: StepEnd) -> None:
        """Note what came since the last thing that was noted, as part of the step's end."""
        started_s = self._ran[-1][-1] if self._ran else time.perf_counter()
        self._keep((what, started_s, started_s, time.perf_counter()))
