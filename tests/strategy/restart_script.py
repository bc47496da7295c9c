"""A user's script that goes on by itself when torchrun starts it again; run by `test_restarts`.

Usage: restart_script.py FOLDER (stays | fails): the latter is killed in step 4 of 8, and with its agent in step 6
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopipe import AutoPipeStrategy


class DropoutRegression(pl.LightningModule):
    """Draws in every step, and has an optimizer with a state."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        self.net = nn.Sequential(*blocks, nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Killed(pl.Callback):
    """Its process ends without a word, once by itself, and once with the agent that would start it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        mark = self.folder / f"killed in {trainer.global_step}"
        if trainer.global_step not in (3, 5) or mark.exists():
            return
        mark.touch()
        if trainer.global_step == 5:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def fit(strategy: Any, folder: Path, callbacks: list[pl.Callback], **trainer_options: Any) -> pl.Trainer:
    pl.seed_everything(1)
    module = DropoutRegression().double()
    data = TensorDataset(torch.randn(16, 4).double(), torch.randn(16, 1).double())
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True), *callbacks],
        **trainer_options,
    )
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save({**module.state_dict(), "steps": trainer.global_step}, folder / "trained")
    return trainer


def main() -> None:
    folder, what_happens = Path(sys.argv[1]), sys.argv[2]
    trainer = fit(
        AutoPipeStrategy(num_replicas=1, num_microbatches=2, profile="flops", timeout=60),
        folder,
        [] if what_happens == "stays" else [Killed(folder)],
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    if trainer.is_global_zero:
        print(f"RESULT {trainer.world_size} processes", flush=True)


if __name__ == "__main__":
    main()
