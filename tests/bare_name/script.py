"""A user's script, which never imports this package: ``python script.py NAMESPACE STRATEGY DEVICES WEIGHTS``."""

from __future__ import annotations

import sys

if sys.argv[1:2] == ["pytorch_lightning"]:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl  # type: ignore[no-redef]

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.net = nn.Sequential(*blocks, nn.Linear(width, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    data = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(data[:, :4], data[:, 4:]), batch_size=8)


class Best(pl.Callback):
    """A callback with state, which goes through a checkpoint."""

    best = float("inf")

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.best = min(self.best, float(trainer.callback_metrics["val_loss"]))

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}


def main(strategy: str, devices: int, weights: str) -> None:
    pl.seed_everything(1)
    module = Regression()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[Best()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(weights)
    if trainer.is_global_zero:
        print("STRATEGY", type(trainer.strategy).__module__)
        print("LIGHTNING", "lightning" in sys.modules)


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), sys.argv[4])
