"""Fits in which one process is killed at a known place, and what must be left afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes, run_processes_to_end
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded

PLACES = ("forward", "backward", "all-reduce", "save", "write", "validation")
MAX_SECONDS = 30.0
"""Within which all processes have to end after one was killed."""

_NUM_EPOCHS, _STEPS_PER_EPOCH = 4, 2
_STEP_OF_PLACE = {"save": 6, "write": 6, "validation": 6}
"""At which step of the optimizer; 5, in the middle of the third epoch, at the others."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Which process is killed where."""

    num_stages: int
    num_replicas: int
    place: str
    global_rank: int

    @property
    def layout(self) -> tuple[int, int]:
        """Stages, replicas."""
        return self.num_stages, self.num_replicas

    def __str__(self) -> str:
        layout = f"{self.num_stages}x{self.num_replicas}"
        return f"{layout}: rank {self.global_rank} in {self.place}"


def all_kills(num_stages: int, num_replicas: int) -> list[Kill]:
    """Each rank in turn at each place that it comes to."""
    return [
        Kill(num_stages=num_stages, num_replicas=num_replicas, place=place, global_rank=global_rank)
        for place in PLACES
        for global_rank in range(num_stages * num_replicas)
        if (place != "write" or global_rank == 0) and (place != "all-reduce" or num_replicas > 1)
    ]


class Doomed(pl.Callback):
    """Kills its own process at the place, once the run is in the middle."""

    def __init__(self, kill: Kill | None, folder: Path) -> None:
        self._kill = kill
        self._folder = folder
        self._trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        pl_module.doomed = (self,)  # in a tuple, out of the sight of the module
        if self._kill is None or self._kill.global_rank != trainer.global_rank:
            return
        if self._kill.place == "all-reduce":
            dist.all_reduce = partial(self._dying_all_reduce, dist.all_reduce)
        if self._kill.place == "save":
            trainer.strategy.optimizer_state = partial(self._dying, trainer.strategy.optimizer_state)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._kill is not None and self._kill.place == "write" and trainer.global_step == _STEP_OF_PLACE["write"]:
            checkpoint["what kills while it is written"] = self

    def __reduce__(self) -> Any:
        self.pass_by("write")
        raise AssertionError

    def pass_by(self, place: str) -> None:
        """Dies if this is the place and the time has come."""
        kill, trainer = self._kill, self._trainer
        if kill is None or kill.place != place or kill.global_rank != trainer.global_rank:
            return
        if trainer.global_step == _STEP_OF_PLACE.get(place, 5):
            (self._folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    def _dying(self, function: Any, *args: Any) -> Any:
        self.pass_by("save")
        return function(*args)

    def _dying_all_reduce(self, all_reduce: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            self.pass_by("all-reduce")
        return all_reduce(tensor, *args, **kwargs)


class PassesBy(torch.autograd.Function):
    """Changes nothing; tells where it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        if type(x) is Tensor:  # not while it is traced
            (doomed,) = module.doomed
            doomed.pass_by("forward" if module.training else "validation")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (doomed,) = ctx.module.doomed
        doomed.pass_by("backward")
        return gradient, None


class MortalModule(MlpModule):
    """Draws in every block, and has an optimizer with a state."""

    def __init__(self) -> None:
        super().__init__(depth=6, optimizer="adamw")
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = PassesBy.apply(self.dropout(block(x)), self)
        return self.head(x).squeeze(-1)


def fit(folder: Path, num_stages: int, num_replicas: int, kill: Kill | None = None) -> dict[str, Tensor]:
    """One rank's fit, from the last checkpoint if there is one; the parameters that rank 0 ends with."""
    folder.mkdir(exist_ok=True)
    checkpoint = ModelCheckpoint(dirpath=folder, save_last=True)
    strategy = AutoPipeStrategy(
        num_stages=num_stages, num_replicas=num_replicas, num_microbatches=2, profile="flops", timeout=60
    )
    trainer = quiet_trainer(
        strategy,
        num_processes=num_stages * num_replicas,
        callbacks=[checkpoint, Doomed(kill, folder)],
        enable_checkpointing=True,
        max_epochs=_NUM_EPOCHS,
    )
    batch_size = 8
    data = InOrder(
        regression_data(batch_size * _STEPS_PER_EPOCH),
        regression_data(batch_size, seed=1),
        batch_size=batch_size,
        num_replicas=num_replicas,
    )
    module = seeded(MortalModule)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    assert trainer.global_step == _NUM_EPOCHS * _STEPS_PER_EPOCH
    return {name: p.detach().clone() for name, p in module.named_parameters()} if trainer.is_global_zero else {}


def fit_all(folders: Sequence[Path], num_stages: int, num_replicas: int) -> list[dict[str, Tensor]]:
    """One after the other."""
    return [fit(folder, num_stages, num_replicas) for folder in folders]


def kill_one(kill: Kill, folder: Path) -> tuple[float, list[str]]:
    """Runs into a kill: how long the others then took to end, in seconds, and what is wrong."""
    outcomes = run_processes_to_end(
        kill.num_stages * kill.num_replicas,
        fit,
        folder,
        *kill.layout,
        kill,
        initialize_process_group=False,
        timeout_s=200,
    )
    if not (folder / "killed").exists():
        return 0.0, [f"{kill}: nobody was killed {describe(outcomes)}"]
    ended = [outcome.ended_after_s for outcome in outcomes]
    seconds = max(ended) - ended[kill.global_rank]
    wrong = []
    if seconds > MAX_SECONDS or any(outcome.killed_by_harness for outcome in outcomes):
        wrong.append(f"{kill}: the others took {seconds:.1f} s to end {describe(outcomes)}")
    if not all(outcome.exit_code for outcome in outcomes):
        wrong.append(f"{kill}: exit codes {[outcome.exit_code for outcome in outcomes]} {describe(outcomes)}")
    return seconds, [*wrong, *_damaged(kill, folder)]


def _damaged(kill: Kill, folder: Path) -> Iterator[str]:
    paths = list(folder.glob("*.ckpt"))
    if not paths:
        yield f"{kill}: no checkpoint is left"
    for path in paths:
        try:
            seeded(MortalModule).load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        except Exception as error:
            yield f"{kill}: {path.name} is damaged: {type(error).__name__}: {error}"


def resume_all(kills: Sequence[Kill], folders: Sequence[Path], uninterrupted: Path) -> list[str]:
    """Goes on after kills under one layout; what differs from the run that nothing has interrupted."""
    num_stages, num_replicas = kills[0].layout
    expected, *resumed = run_processes(
        num_stages * num_replicas,
        fit_all,
        [uninterrupted, *folders],
        num_stages,
        num_replicas,
        initialize_process_group=False,
        timeout_s=60 + 20 * len(kills),
    )[0]
    return [
        f"{kill}: {name} differs by {float((values[name] - expected[name]).abs().max())}"
        for kill, values in zip(kills, resumed, strict=True)
        for name in expected
        if not torch.equal(values[name], expected[name])
    ]
