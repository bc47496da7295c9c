"""What a user's own script looks like; run by `test_launch` under Lightning's launcher and under torchrun.

Usage: fit_script.py DEVICES (pipeline | spawn | forkserver | a strategy's name)
    [NUM_NODES [a command to start after the fit]]
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopipe import AutoPipeStrategy


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    pl.seed_everything(1)
    module = Regression()
    strategy: Any = sys.argv[2]
    if strategy in ("pipeline", "spawn", "forkserver"):
        start_method = "auto" if strategy == "pipeline" else strategy
        strategy = AutoPipeStrategy(num_replicas=1, num_microbatches=1, start_method=start_method)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[1]),
        strategy=strategy,
        num_nodes=int(sys.argv[3]) if len(sys.argv) > 3 else 1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    if trainer.is_global_zero:
        total = sum(float(parameter.sum()) for parameter in module.parameters())
        print(f"RESULT {float(trainer.callback_metrics['loss']):.6f} {total:.6f}", flush=True)
        if len(sys.argv) > 4:
            subprocess.run(sys.argv[4:], check=True)


if __name__ == "__main__":
    main()
