"""Steps of the recipes as two stages through the Trainer, with the plan that the strategy made for them."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_autopipe import AutoPipeStrategy
from lightning_autopipe.planner.plan_step import plan_step
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.profiling.cache import CACHE_VARIABLE
from recipes.bert import BertModule
from recipes.gpt2 import GPT2Module
from recipes.images import DigitsDataModule
from recipes.resnet import ResNetModule
from recipes.text import MaskedTextDataModule, TextDataModule
from tests.harness import run_processes

NUM_STAGES = 2
NUM_MICROBATCHES = 4
NUM_STEPS = 24
NUM_WARM_UP = 6
LIMIT_S = 200.0

_TRANSFORMER = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 1024, "block_size": 64}
_TEXT = {"vocab_size": 1024, "block_size": 64, "batch_size": 32}


def _gpt2(folder: str) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    return GPT2Module(**_TRANSFORMER), TextDataModule(**_TEXT, cache_dir=folder)


def _bert(folder: str) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    return BertModule(**_TRANSFORMER), MaskedTextDataModule(**_TEXT, cache_dir=folder)


def _resnet(folder: str) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    module = ResNetModule(
        num_classes=10, num_channels=1, embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2]
    )
    return module, DigitsDataModule(image_size=48, batch_size=64)


RECIPES: dict[str, Callable[[str], tuple[pl.LightningModule, pl.LightningDataModule]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "resnet": _resnet,
}


@dataclass
class _Watch(Callback):
    """Times from the start of a batch to its optimizer step, and from the end of one batch to the end of the next."""

    schedule_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    _began: float = 0.0
    _ended: float = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.schedule_s.append(time.perf_counter() - self._began)

    def on_train_batch_end(self, *args: Any) -> None:
        now = time.perf_counter()
        if self._ended:
            self.step_s.append(now - self._ended)
        self._ended = now


def recipe_row(name: str) -> dict[str, Any]:
    """One recipe's figures; the simulation knows what the profile of the layers tells, and nothing of the Trainer."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="autopipe-recipes-") as folder:
        plan, schedule_s, step_s = run_processes(
            NUM_STAGES,
            _fit,
            name,
            folder,
            timeout_s=LIMIT_S,
            initialize_process_group=False,
            environment={CACHE_VARIABLE: "off"},  # the profile is to be as old as the steps
        )[0]
    simulated_s = simulate(plan_step(plan)).step_s
    measured_s = statistics.median(step_s[NUM_WARM_UP:])
    return {
        "case": f"{name}, M={plan.num_microbatches}",
        "measured_s": measured_s,
        "fastest_s": min(step_s[NUM_WARM_UP:]),
        "schedule_s": statistics.median(schedule_s[NUM_WARM_UP:]),
        "simulated_s": simulated_s,
        "error": simulated_s / measured_s - 1,
        "load": (before, os.getloadavg()[0]),
    }


def _fit(name: str, folder: str) -> tuple[Any, list[float], list[float]]:
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    pl.seed_everything(1, verbose=False)
    module, data = RECIPES[name](folder)
    strategy = AutoPipeStrategy(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES, timeout=60)
    watch = _Watch()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=NUM_STAGES,
        max_steps=NUM_STEPS,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(module, datamodule=data)
    return strategy.plan, watch.schedule_s, watch.step_s
