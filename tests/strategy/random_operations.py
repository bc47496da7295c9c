"""Random runs one after the other in the same processes: as one process has them, and nothing left behind."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import InOrder, MlpModule, numbers, quiet_trainer, regression_data, seeded

_SCHEDULES = ("1f1b", "gpipe", "sliced_1f1b", "zero_bubble", "interleaved_1f1b")
_BATCH_SIZES = (4, 8, 12, 24)
_NUM_SAMPLES = 24
_TOLERANCE = 1e-7
"""Runs go on from each other, and AdamW divides by gradients that may be small."""
_LEARNING_RATE = 0.01
"""So small that runs which go on from each other do not make roundings larger, as a rate that overshoots does."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made with; numbers must not depend on any of it but the batch size."""

    num_stages: int
    num_replicas: int
    schedule: str = "1f1b"
    num_microbatches: int = 2
    batch_size: int = 8
    checkpoint_format: str = "consolidated"
    shard_optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process holds of the machine."""

    open_files: int
    threads: int
    children: int
    memory_bytes: int

    @classmethod
    def now(cls) -> Usage:
        """Of this process."""
        gc.collect()
        tasks = list(Path("/proc/self/task").iterdir())
        return cls(
            open_files=len(os.listdir("/proc/self/fd")),
            threads=len(tasks),
            children=sum(len((task / "children").read_text().split()) for task in tasks),
            memory_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        )


@dataclass(kw_only=True)
class Found:
    """What one rank found."""

    operations: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: Usage
    after: Usage


class Side:
    """A module and its runs, under one strategy."""

    def __init__(self, folder: Path, make_trainer: Callable[[Setting, int], pl.Trainer]) -> None:
        self._path = folder / "saved.ckpt"
        self._make_trainer = make_trainer
        self.start()

    def start(self) -> None:
        """Begins with a new module."""
        self.module = _new_module()
        self._num_epochs = 0
        self._setting = Setting(num_stages=1, num_replicas=1)

    def fit(self, setting: Setting) -> Any:
        """Trains for one more epoch: a new module from the last checkpoint, or the first one on."""
        trainer = self._make_trainer(setting, self._num_epochs + 1)
        path = None
        if self._num_epochs:
            self.module, path = _new_module(), self._path
        trainer.fit(self.module, datamodule=_data(setting, trainer), ckpt_path=path)
        self._num_epochs += 1
        trainer.save_checkpoint(self._path)
        self.module.gradients.clear()
        parameters = [p.detach().clone() for p in self.module.parameters()] if trainer.is_global_zero else []
        return numbers(trainer.callback_metrics), parameters

    def fit_and_test(self, setting: Setting) -> Any:
        """Trains the module at hand without its optimizer's state, and tests it under the same Trainer."""
        trainer = self._make_trainer(setting, 1)
        data = _data(setting, trainer)
        trainer.fit(self.module, datamodule=data)
        trainer.test(self.module, datamodule=data, verbose=False)
        self._num_epochs = 1
        trainer.save_checkpoint(self._path)
        self.module.gradients.clear()
        return numbers(trainer.callback_metrics)

    def validate(self, setting: Setting) -> Any:
        """The figures of a validation."""
        trainer = self._make_trainer(setting, 1)
        return trainer.validate(self.module, datamodule=_data(setting, trainer), verbose=False)

    def predict(self, setting: Setting) -> Any:
        """Predictions for all samples; with several replicas those of the first one."""
        trainer = self._make_trainer(setting, 1)
        samples: Any = regression_data(8, seed=2).tensors[0]
        found = trainer.predict(self.module, DataLoader(samples, batch_size=4))
        return found if setting.num_replicas == 1 else None


def _new_module() -> MlpModule:
    module: MlpModule = seeded(MlpModule, depth=8, optimizer="adamw", lr=_LEARNING_RATE)
    return module


def _data(setting: Setting, trainer: pl.Trainer) -> InOrder:
    num_replicas = setting.num_replicas if isinstance(trainer.strategy, AutoPipeStrategy) else 1
    train, val = regression_data(_NUM_SAMPLES), regression_data(8, seed=1)
    return InOrder(train, val, batch_size=setting.batch_size, val_batch_size=8, num_replicas=num_replicas)


def _pipeline_trainer(setting: Setting, max_epochs: int) -> pl.Trainer:
    strategy = AutoPipeStrategy(
        num_stages=setting.num_stages,
        num_replicas=setting.num_replicas,
        num_microbatches=setting.num_microbatches,
        schedule=setting.schedule,
        checkpoint_format=setting.checkpoint_format,
        shard_optimizer=setting.shard_optimizer,
        profile="flops",
        verify=False,
        timeout=60,
    )
    return quiet_trainer(
        strategy, num_processes=setting.num_stages * setting.num_replicas, max_epochs=max_epochs, log_every_n_steps=1
    )


def _plain_trainer(setting: Setting, max_epochs: int) -> pl.Trainer:
    return quiet_trainer(max_epochs=max_epochs, log_every_n_steps=1)


def _layouts(world_size: int) -> list[tuple[int, int]]:
    return [(stages, world_size // stages) for stages in range(1, world_size + 1) if world_size % stages == 0]


def _random_settings(seed: int, world_size: int) -> Iterator[tuple[str, Setting]]:
    draws = random.Random(seed)
    while True:
        num_stages, num_replicas = draws.choice(_layouts(world_size))
        schedules = _SCHEDULES if num_stages > 1 else ("1f1b", "gpipe")
        yield (
            draws.choice(["start", "fit", "fit", "fit", "fit_and_test", "validate", "predict"]),
            Setting(
                num_stages=num_stages,
                num_replicas=num_replicas,
                schedule=draws.choice(schedules),
                num_microbatches=draws.randint(1, 4),
                batch_size=draws.choice(_BATCH_SIZES),
                checkpoint_format=draws.choice(["consolidated", "sharded", "sharded_async"]),
                shard_optimizer=draws.choice([False, True]),
            ),
        )


def operate(seed: int, seconds: float, folder: Path) -> Found:
    """One rank's part of random operations; rank 0 compares them with its own plain runs."""
    global_rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pipeline = Side(folder, _pipeline_trainer)
    (folder / "plain").mkdir(exist_ok=True)
    plain = Side(folder / "plain", _plain_trainer)
    before = _usage_after_all_layouts(folder, world_size)
    found = Found(before=before, after=before)
    ends_at_s = time.monotonic() + seconds
    for operation, setting in _random_settings(seed, world_size):
        result = getattr(pipeline, operation)(*[] if operation == "start" else [setting])
        if global_rank == 0:
            expected = getattr(plain, operation)(*[] if operation == "start" else [setting])
            difference = 0.0 if result is None else _largest_difference(result, expected)
            if not difference <= _TOLERANCE:
                found.wrong.append(
                    f"operation {sum(found.operations.values())}, {operation} {setting}: numbers differ by {difference}"
                )
        found.operations[operation] += 1
        if not _goes_on(time.monotonic() < ends_at_s):
            break
    found.after = _usage_after_all_layouts(folder, world_size)
    return found


def _usage_after_all_layouts(folder: Path, world_size: int) -> Usage:
    """What is held after the same runs, whatever was before."""
    for _ in range(2):
        for num_stages, num_replicas in _layouts(world_size):
            setting = Setting(num_stages=num_stages, num_replicas=num_replicas, checkpoint_format="sharded_async")
            Side(folder, _pipeline_trainer).fit(setting)
    return Usage.now()


def _goes_on(decision: bool) -> bool:
    decided = [decision]
    dist.broadcast_object_list(decided, src=0)
    return decided[0]


def _largest_difference(value: Any, expected: Any) -> float:
    """Of any two numbers in the same places, absolute where they are below 1, else relative; infinite for others."""
    if isinstance(expected, dict):
        if value.keys() != expected.keys():
            return math.inf
        value, expected = list(value.values()), [expected[key] for key in value]
    if isinstance(expected, (list, tuple)):
        if len(value) != len(expected):
            return math.inf
        return max(map(_largest_difference, value, expected), default=0.0)
    value, expected = torch.as_tensor(value), torch.as_tensor(expected)
    difference = (value - expected).abs() / expected.abs().clamp(min=1.0)
    return float(difference.nan_to_num(nan=math.inf).max())


def left_behind(found: list[Found], *, most_memory_bytes: int) -> list[str]:
    """What ranks hold more of after their operations than before."""
    return [
        f"rank {global_rank}: {rank.before} grew to {rank.after}"
        for global_rank, rank in enumerate(found)
        if rank.after.open_files > rank.before.open_files
        or rank.after.threads > rank.before.threads
        or rank.after.children > rank.before.children
        or rank.after.memory_bytes > rank.before.memory_bytes + most_memory_bytes
    ]
