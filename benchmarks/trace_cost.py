"""What it costs to watch a fit: steps with trace= and replan= against the same steps without, by turns.

A model of 8 layers as two stages with 8 micro-batches, two processes of this machine over gloo, through the Trainer
with a CSV logger. One of each two steps is watched, so that whatever else runs here disturbs both kinds alike: the
executor tells the recorder of each action, figures are summed and logged every 50 steps, stage times compared with the
plan. Writing the trace, once a fit, is not in it. On a busy machine steps differ by more than watching costs; so what
it runs is also timed by itself.

Run: python benchmarks/trace_cost.py [--check] [--json FILE]   (1 to 2 minutes)

--check fails where watching takes more than 1 % of a step's CPU time, summed over the processes: by itself, or by the
difference of steps side by side where that is certain.
"""

# ruff: noqa: E402
from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import reporting
from lightning_autopipe import AutoPipeStrategy
from lightning_autopipe.core import Action, ParallelLayout, StepEnd
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.figure_log import FigureLog
from lightning_autopipe.strategy.step_watch import StepWatch
from tests.harness import run_processes

MOST = 0.01
NUM_STEPS, NUM_FIRST = 620, 20
"""Steps in all, and those that do not count."""
WIDTH, DEPTH, BATCH_SIZE, NUM_MICROBATCHES = 256, 8, 256, 8


class Perceptron(pl.LightningModule):
    """Layers of some width, all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _is_watched(batch_idx: int) -> bool:
    """One of each pair: the first, the second, the first ..."""
    return batch_idx % 4 in (0, 3)


class ByTurns(pl.Callback):
    """Watches every other step, and notes what each takes."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.cpu_s: dict[bool, list[float]] = {True: [], False: []}
        self._watch: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        self._watch = session.training.watch or self._watch
        if batch_idx >= NUM_FIRST:
            session.training.watch = self._watch if _is_watched(batch_idx) else None
        self._begin = time.perf_counter(), time.process_time()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds, cpu_s = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        if batch_idx >= NUM_FIRST:
            self.seconds[_is_watched(batch_idx)].append(seconds)
            self.cpu_s[_is_watched(batch_idx)].append(cpu_s)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trainer.strategy.session.training.watch = None  # type: ignore[attr-defined]


def fit(folder: str) -> tuple[dict[bool, list[float]], dict[bool, list[float]]]:
    """In each process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    turns = ByTurns()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AutoPipeStrategy(
            num_stages=2, num_microbatches=NUM_MICROBATCHES, trace=folder, profile="measured", timeout=60
        ),
        logger=CSVLogger(folder),
        max_steps=NUM_STEPS,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[turns],
    )
    data = TensorDataset(torch.randn(BATCH_SIZE * NUM_STEPS, WIDTH))
    trainer.fit(Perceptron(), DataLoader(data, batch_size=BATCH_SIZE))
    return turns.seconds, turns.cpu_s


def watch_alone() -> float:
    """CPU seconds a step that watching takes by itself, on one rank: the median of many steps with nothing to run."""
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0)), log_every_n_steps=50, loggers=[]
    )
    communicator = Communicator(layout=ParallelLayout(num_stages=1), global_rank=0, device=torch.device("cpu"))
    watch = StepWatch([FigureLog(trainer, communicator, torch.device("cpu"))])
    actions = [Action.parse(f"0{kind}{index}") for index in range(NUM_MICROBATCHES) for kind in "FB"]
    seconds = []
    for _ in range(5 * NUM_STEPS):
        begin = time.process_time()
        watch.begin_step()
        for action in actions:
            times = [time.perf_counter() for _ in range(3)]
            watch.recorder.ran(action, *times)
        watch.schedule_ended(num_samples=BATCH_SIZE, has_ties=False)
        with watch.recorder.timed(StepEnd.EXCHANGE):
            pass
        watch.recorder.note_rest(StepEnd.OPTIMIZER)
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds)


def difference(on: list[float], off: list[float]) -> tuple[float, float]:
    """Median of on - off over steps side by side, and its standard error, from the spread between quartiles."""
    pairs = [after - before for after, before in zip(on, off, strict=False)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return middle, 1.2533 * (high - low) / 1.349 / math.sqrt(len(pairs))


def main() -> int:
    options = reporting.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_processes(2, fit, folder, initialize_process_group=False, timeout_s=500)
    cpu_s = {
        is_on: [sum(of_step) for of_step in zip(*(rank[1][is_on] for rank in ranks), strict=True)]
        for is_on in (True, False)
    }
    rows: dict[str, Any] = {"environment": reporting.environment()}
    print(f"{len(cpu_s[True])} steps each, {NUM_MICROBATCHES} micro-batches, median [min max]")
    for name, by_turns in (("step", ranks[0][0]), ("CPU time", cpu_s)):
        on, off = by_turns[True], by_turns[False]
        more, error = (value / statistics.median(off) for value in difference(on, off))
        print(f"{name}: off {reporting.spread(off)}, on {reporting.spread(on)}; cost {more:+.2%} ± {error:.2%}")
        rows[name] = {"off_s": statistics.median(off), "on_s": statistics.median(on), "cost": more, "error": error}
    alone = 2 * watch_alone() / rows["CPU time"]["off_s"]
    rows["alone"] = alone
    print(f"what watching runs, by itself: {alone:.2%} of the CPU time of a step")
    surely = rows["CPU time"]["cost"] - 2 * rows["CPU time"]["error"]
    shortfalls = [
        *reporting.at_most("cost of watching by itself", alone, MOST),
        *reporting.at_most("cost in CPU time, less twice its standard error", surely, MOST),
    ]
    return reporting.finish(options, rows, shortfalls)


if __name__ == "__main__":
    sys.exit(main())
