"""Small LightningModules, their data, and runs of them, for the tests of the strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WIDTH = 8


class MlpModule(pl.LightningModule):
    """Four blocks and a regression loss, logged in every step."""

    def __init__(self, *, depth: int = 4, optimizer: str = "sgd", lr: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.optimizer_name = optimizer
        self.lr = lr
        self.gradients: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", F.mse_loss(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr)
        return torch.optim.AdamW(parameters, lr=self.lr)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        own = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.gradients.append({name: g.to_dense() if g.is_sparse else g.clone() for name, g in own.items()})


class ClippingModule(MlpModule):
    """Clips by its own call of torch, all parameters and then those of a part."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.log("norm", norm)
        self.log("head_norm", torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.01, norm_type=float("inf")))
        super().on_before_optimizer_step(optimizer)


class TogglingModule(MlpModule):
    """Freezes a block in every other step, embeds by a sparse table, and validates without a parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(batch_idx % 2 == 0)
        x, y = batch
        return super().training_step((x + self.table((x[:, 0] > 0).long()), y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", batch[1].mean())


class LanguageModule(MlpModule):
    """Tied embedding and head, tokens of which some are ignored by the loss."""

    VOCABULARY = 11

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = nn.Embedding(self.VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)

    def _loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        logits = self(tokens)
        counts = labels != -100
        # No known mean, and NaN where nothing counts: goes by the weight of the loss.
        self.log("accuracy", ((logits.argmax(-1) == labels) & counts).sum() / counts.sum(), on_epoch=True)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


class ClassifierModule(MlpModule):
    """Logs everything that can be logged, and returns a mapping."""

    NUM_CLASSES = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = nn.Linear(WIDTH, self.NUM_CLASSES)
        task: dict[str, Any] = {"task": "multiclass", "num_classes": self.NUM_CLASSES}
        self.train_accuracy = torchmetrics.Accuracy(**task)
        self.val_metrics = torchmetrics.MetricCollection(
            {"f1": torchmetrics.F1Score(average="macro", **task), "accuracy": torchmetrics.Accuracy(**task)}
        )
        self.unlogged = torchmetrics.MeanMetric()
        self.hook_values: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("early", x.mean(), on_step=True)
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("constant", 0.1)
        self.log_dict({"num_right": (logits.argmax(-1) == y).sum().double()}, on_epoch=True, reduce_fx="sum")
        self.log("largest", logits.detach().max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", logits.detach().min(), on_step=True, on_epoch=True, reduce_fx=torch.min)
        return {"loss": loss, "logits": logits.detach(), "entropy": logits.detach().mean(), "name": "a name"}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if dataloader_idx == 0:
            self.val_metrics(logits, y)
            self.log_dict(self.val_metrics)
            self.unlogged.update(logits)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(x))
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hook_values["loss"] = float(outputs["loss"])
        self.hook_values["entropy"] = float(outputs["entropy"])
        assert outputs["name"] == "a name"

    def on_validation_epoch_end(self) -> None:
        self.hook_values["unlogged"] = float(self.unlogged.compute())
        self.unlogged.reset()
        self.log("from_hook", self.current_epoch + 0.5)


class Gpt2Module(MlpModule):
    """A language model of transformers, as it is."""

    def __init__(self, *, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options, depth=0)
        from transformers import GPT2Config, GPT2LMHeadModel

        del self.head
        self.net = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=LanguageModule.VOCABULARY,
                n_positions=8,
                n_embd=8,
                n_layer=3,
                n_head=2,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch[0], labels=batch[0], use_cache=False).loss)


class GatheringModule(MlpModule):
    """Talks to other processes in the middle of its step, as data-parallel modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.trainer.strategy.barrier()
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        assert self.all_gather(loss.detach()).numel() == share["num_replicas"]
        self.log("train_loss", loss, sync_dist=True)
        return loss


class MixedModule(MlpModule):
    """Takes a mapping of two loaders' batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), (other_x, other_y) = batch["a"], batch["b"]
        prediction, other = self(torch.cat([x, other_x])).split([len(x), len(other_x)])
        loss = F.mse_loss(prediction, y) + F.mse_loss(other, other_y)
        self.log("train_loss", loss)
        return loss


class TiedBlocksModule(MlpModule):
    """Row 10: a Linear and LayerNorm block used at layers 1 and 4, and two more ties."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, depth=6)
        self.blocks[1] = self.blocks[4] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.blocks[5][0].bias = self.blocks[0][0].bias
        self.blocks[3][0].weight = self.blocks[0][0].weight


class FloatModule(MlpModule):
    """Stays in float32, which is what autocast casts."""

    def double(self) -> FloatModule:
        return self


def float_data(num_samples: int) -> TensorDataset:
    x, y = regression_data(num_samples).tensors
    return TensorDataset(x.float(), y.float())


def regression_data(num_samples: int = 16, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(1)))


def class_data(num_samples: int = 16, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def token_data(num_samples: int = 16, length: int = 7, seed: int = 0, valid: list[int] | None = None) -> TensorDataset:
    """Tokens and labels; sample i has valid[i] labels that are not ignored (all of them by default)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, LanguageModule.VOCABULARY, (num_samples, length), generator=generator)
    labels = tokens.roll(-1, 1)
    for sample_index, num_valid in enumerate(valid or []):
        labels[sample_index, num_valid:] = -100
    return TensorDataset(tokens, labels)


def in_order(module: pl.LightningModule, data: Dataset[Any], batch_size: int, **options: Any) -> DataLoader[Any]:
    """A loader that gives replica r of R samples r, r + R, ...: one global batch is R * batch_size samples in a row."""
    share = module.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    sampler = DistributedSampler(data, shuffle=False, **share)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, **options)


class InOrder(pl.LightningDataModule):
    """Loaders in a known order; `batch_size` is the global one, `num_replicas` shares it."""

    def __init__(
        self,
        train: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        *,
        batch_size: int,
        val_batch_size: int | None = None,
        num_replicas: int = 1,
    ) -> None:
        super().__init__()
        self.train, self.val = train, val
        self.batch_size = batch_size // num_replicas
        self.val_batch_size = (val_batch_size or batch_size) // num_replicas

    def train_dataloader(self) -> Any:
        return in_order(self.trainer.lightning_module, self.train, self.batch_size)

    def val_dataloader(self) -> Any:
        return [] if self.val is None else in_order(self.trainer.lightning_module, self.val, self.val_batch_size)

    test_dataloader = val_dataloader


class CombinedData(InOrder):
    def train_dataloader(self) -> Any:
        module = self.trainer.lightning_module
        loaders = {
            "a": in_order(module, self.train, self.batch_size),
            "b": in_order(module, regression_data(8, seed=5), self.batch_size),
        }
        return CombinedLoader(loaders, "max_size_cycle")


def quiet_trainer(strategy: Any = "auto", *, num_processes: int = 1, **options: Any) -> pl.Trainer:
    """A Trainer on the CPU in float64 that writes nothing of its own accord."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": num_processes,
        "strategy": strategy,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
        "precision": "64-true",
    }
    return pl.Trainer(**{**defaults, **options})


def seeded(module_class: Any, **options: Any) -> Any:
    """A module whose initial values are the same in every process."""
    torch.manual_seed(7)
    return module_class(**options).double()


def numbers(metrics: Any) -> dict[str, float]:
    """Metrics as plain numbers."""
    return {name: float(value) for name, value in metrics.items()}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Over all entries; the same keys are a must."""
    assert one.keys() == other.keys()
    return max((float((one[name] - other[name]).abs().max()) for name in one), default=0.0)
