"""Watches the steps of a fit: what each rank does in them, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_autopipe.core.timeline import StepEnd
from lightning_autopipe.runtime.timeline_recorder import RankStep, TimelineRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedStep:
    """One training step (a batch, with the optimizer's step where it ends with one) on this rank."""

    number: int
    """From 1, within the fit."""
    step: RankStep
    num_samples: int
    """Of this replica's batch."""
    sent_bytes: tuple[int, int] = (0, 0)
    """To the next rank of the pipeline, and to the previous one."""


class StepReader(Protocol):
    """Wants to know of steps. All ranks have the same readers and call them at the same places."""

    def before_step(self, number: int) -> None:
        """A step begins; may be collective over all ranks."""
        ...

    def after_step(self, watched: WatchedStep) -> None:
        """A step has ended on this rank; exchanges nothing."""
        ...

    def note(self) -> Any:
        """What all ranks are to know, or None: it travels with the report that the running step ends with anyway."""
        ...

    def take(self, notes: list[Any]) -> None:
        """What the ranks noted, in no particular order; exchanges nothing."""
        ...

    def end(self) -> None:
        """The fit has ended on all ranks; may be collective over all ranks."""
        ...


class StepWatch:
    """Goes along with a fit, from its first step to its end.

    A step ends when the next one begins, or the fit: nobody else has to say so.

    Args:
        readers: Whoever wants to know.
        sent_bytes: Tells what this rank has sent so far, to the next rank of its pipeline and to the previous one.
    """

    def __init__(
        self, readers: Sequence[StepReader], *, sent_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ) -> None:
        self.recorder = TimelineRecorder()
        """To be told what this rank does."""
        self.notes: list[Any] = []
        """What is to travel with the running step's report: one from each reader, or nothing at all."""
        self._readers = tuple(readers)
        self._number = 0
        self._num_samples = 0
        self._count_sent = sent_bytes
        self._sent_bytes = 0, 0

    def begin_step(self) -> None:
        """A training step begins.

        One that ran nothing (it only kept its batch for a later one) was none, and this one takes its place.
        """
        if not self._end_step() and self._number:
            self.recorder.begin_step()
            return
        self._number += 1
        for reader in self._readers:
            reader.before_step(self._number)
        notes = [reader.note() for reader in self._readers]
        self.notes = notes if any(note is not None for note in notes) else []
        self._sent_bytes = self._count_sent()
        self.recorder.begin_step()

    def schedule_ended(self, *, num_samples: int, has_ties: bool) -> None:
        """Forwards and backwards of the running step are over, and gradients of shared parameters summed."""
        self._num_samples = num_samples
        (forward, backward), (forward_before, backward_before) = self._count_sent(), self._sent_bytes
        self._sent_bytes = forward - forward_before, backward - backward_before
        if has_ties:
            self.recorder.note_rest(StepEnd.TIED_GRADIENTS)

    def take(self, notes: list[Any]) -> None:
        """The notes of each rank."""
        told = [of_rank for of_rank in notes if of_rank]
        for reader, of_reader in zip(self._readers, zip(*told, strict=True), strict=False):
            reader.take([note for note in of_reader if note is not None])

    def end(self) -> None:
        """The fit has ended. Collective over all ranks."""
        self._end_step()
        for reader in self._readers:
            reader.end()

    def _end_step(self) -> bool:
        """Whether there was one."""
        step = self.recorder.end_step()
        if step is None or not step.ran:
            return False
        watched = WatchedStep(
            number=self._number, step=step, num_samples=self._num_samples, sent_bytes=self._sent_bytes
        )
        for reader in self._readers:
            reader.after_step(watched)
        return True
