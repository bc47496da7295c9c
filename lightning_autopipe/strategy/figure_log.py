"""Logs how well a pipeline runs: bubble, step time, samples per second, memory, bytes between stages."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.step_watch import WatchedStep

PREFIX = "autopipe/"


@dataclass(slots=True, kw_only=True)
class RankFigures:
    """What one rank tells of the steps since it was last asked."""

    global_rank: int
    num_steps: int = 0
    num_samples: int = 0
    """Of its replica."""
    step_s: float = 0.0
    """Of all steps, from begin to end."""
    busy_s: float = 0.0
    peak_memory_bytes: int = 0
    sent_forward_bytes: int = 0
    """To the next rank of the pipeline."""
    sent_backward_bytes: int = 0
    """To the previous one."""


class FigureLog:
    """Logs to the trainer's loggers, on global rank 0, whenever the trainer logs metrics of steps.

    Figures are means over the steps since the last time: of each step from the begin of ``training_step`` to the end of
    the optimizer's step, so without the time that loading data takes in between. A rank that waits for others in a sum
    of gradients counts as busy, which a trace tells apart.

    Args:
        trainer: Whose loggers and interval.
        communicator: Who this rank is.
        device: Whose memory counts.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._trainer = trainer
        self._communicator = communicator
        self._device = device
        self._figures = RankFigures(global_rank=communicator.global_rank)
        self._logged_at = self._optimizer_steps

    @property
    def _optimizer_steps(self) -> int:
        return self._trainer.fit_loop.epoch_loop._batches_that_stepped

    def before_step(self, number: int) -> None:
        """Nothing to do."""

    def after_step(self, watched: WatchedStep) -> None:
        figures = self._figures
        figures.num_steps += 1
        figures.num_samples += watched.num_samples
        figures.step_s += watched.step.end_s - watched.step.begin_s
        figures.busy_s += watched.step.busy_s
        figures.sent_forward_bytes += watched.sent_bytes[0]
        figures.sent_backward_bytes += watched.sent_bytes[1]

    def note(self) -> RankFigures | None:
        interval, now = self._trainer.log_every_n_steps, self._optimizer_steps  # type: ignore[attr-defined]
        if not interval or now % interval or now == self._logged_at or not self._figures.num_steps:
            return None
        self._logged_at = now
        figures, self._figures = self._figures, RankFigures(global_rank=self._communicator.global_rank)
        figures.peak_memory_bytes = peak_memory_bytes(self._device)
        return figures

    def take(self, notes: list[RankFigures]) -> None:
        if not notes or self._communicator.global_rank != 0:
            return
        metrics = summary(notes, self._communicator)
        for logger in self._trainer.loggers:
            # Lightning counts from 0 what has been logged of a step.
            logger.log_metrics(metrics, step=self._logged_at - 1)

    def end(self) -> None:
        """Nothing to do."""


def summary(figures: list[RankFigures], communicator: Communicator) -> dict[str, float]:
    """The metrics that all ranks' figures give.

    Memory is the largest of a stage's replicas; bytes are those of one step, all replicas together.
    """
    layout = communicator.layout
    num_steps = figures[0].num_steps
    step_s = sum(one.step_s for one in figures) / len(figures)
    busy_s = sum(one.busy_s for one in figures) / len(figures)
    num_samples = sum(one.num_samples for one in figures if layout.stage_index(one.global_rank) == 0)
    metrics: dict[str, Any] = {
        "bubble_fraction": max(0.0, 1 - busy_s / step_s) if step_s else 0.0,
        "step_s": step_s / num_steps,
        "samples_per_s": num_samples / step_s if step_s else 0.0,
    }
    for stage_index in range(layout.num_stages):
        own = [one for one in figures if layout.stage_index(one.global_rank) == stage_index]
        metrics[f"peak_memory_bytes/stage_{stage_index}"] = max(one.peak_memory_bytes for one in own)
        for other, total in (
            (stage_index + 1, sum(one.sent_forward_bytes for one in own)),
            (stage_index - 1, sum(one.sent_backward_bytes for one in own)),
        ):
            if total:
                # Of two ranks with several stages each, one sends both kinds to the other.
                name = f"sent_bytes/stage_{stage_index}_to_{other % layout.num_stages}"
                metrics[name] = metrics.get(name, 0.0) + total / num_steps
    return {PREFIX + name: float(value) for name, value in metrics.items()}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: on CUDA what tensors take on the device, else what the whole process has taken."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
