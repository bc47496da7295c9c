"""Modules of the optimization items: one for each way in which users say how parameters are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim import lr_scheduler as schedulers

from tests.strategy.modules import MlpModule

LR = 0.05


def by_name(module: nn.Module) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]


def by_module(module: MlpModule) -> list[dict[str, Any]]:
    """The last layers first, as rates by layer are written; each stage owns nothing of some groups."""
    parts = [module.head, *reversed(module.blocks)]
    return [{"params": part.parameters(), "lr": LR * 0.8**index} for index, part in enumerate(parts)]


def by_lists(module: MlpModule) -> list[dict[str, Any]]:
    """Of some parameters only: nothing moves the others."""
    return [
        {"params": [module.blocks[0][0].weight, module.head.bias], "lr": LR},
        {"params": [module.blocks[2][0].weight], "momentum": 0.5},
    ]


def chained(optimizer: Any) -> schedulers.LRScheduler:
    warm_up = schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return schedulers.SequentialLR(optimizer, [warm_up, schedulers.ExponentialLR(optimizer, 0.9)], milestones=[3])


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=LR, momentum=0.9, nesterov=True),
    "foreach amsgrad": lambda m: AdamW(m.parameters(), lr=LR, amsgrad=True, foreach=True),
    "fused": lambda m: AdamW(m.parameters(), lr=LR, fused=True),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=LR),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=LR, momentum=0.5, centered=True),
    "adafactor": lambda m: Adafactor(m.parameters(), lr=LR),
    "nadam": lambda m: NAdam(m.parameters(), lr=LR),
    "by name": lambda m: AdamW(by_name(m), lr=LR),
    "by module": lambda m: Adam(by_module(m), lr=LR),
    "by lists": lambda m: SGD(by_lists(m), lr=LR),
}

SCHEDULERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "chained": lambda o: {"scheduler": chained(o), "interval": "step"},
    "one cycle": lambda o: {"scheduler": schedulers.OneCycleLR(o, LR, total_steps=8), "interval": "step"},
    "by epoch": lambda o: {"scheduler": schedulers.StepLR(o, 1, 0.5), "interval": "epoch", "frequency": 2},
    "by step": lambda o: {"scheduler": schedulers.StepLR(o, 1, 0.5), "interval": "step", "frequency": 3},
    "plateau": lambda o: {
        "scheduler": schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
        "monitor": "val_loss",
    },
    "plateau by step": lambda o: {
        "scheduler": schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
        "monitor": "train_loss_step",
        "interval": "step",
    },
}


class OptimizedModule(MlpModule):
    """Optimizer and schedule by name; notes rates and momenta after each batch."""

    def __init__(self, *, optimizer: str = "sgd", scheduler: str | None = None, **options: Any) -> None:
        super().__init__(**{"depth": 3, **options})
        self.optimizer_name, self.scheduler_name = optimizer, scheduler
        self.rates: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer_name](self)
        if self.scheduler_name is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[self.scheduler_name](optimizer)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        self.rates.append([(group["lr"], group.get("momentum"), group.get("betas")) for group in groups])


def rates(trainer: Any, module: OptimizedModule) -> Any:
    return module.rates, trainer.global_step


class OwnSchedulingModule(OptimizedModule):
    """Steps its scheduler itself, every other time."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


class OwnClippingModule(OptimizedModule):
    """Clips one part by norm and the other by value, then all by Lightning's method."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        nn.utils.clip_grad_norm_(self.blocks.parameters(), 0.05)
        nn.utils.clip_grad_value_(self.head.parameters(), 0.02)
        self.clip_gradients(optimizer, gradient_clip_val=0.04, gradient_clip_algorithm="norm")
        super().on_before_optimizer_step(optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class OwnStepModule(OptimizedModule):
    """A warm-up in ``optimizer_step``, as Lightning's manual shows it, and its own way of zeroing."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClosureByHandModule(OptimizedModule):
    """Calls the closure itself, and steps by every second of them."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx % 2:
            optimizer.step()


class ChangingHooksModule(OptimizedModule):
    """Changes gradients where Lightning lets it."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("loss_before_backward", loss)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("rate_before_zero_grad", optimizer.param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        for parameter in self.head.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


class NormsModule(ChangingHooksModule):
    """Logs Lightning's norms of the whole module, and notes those of a part."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log_dict(grad_norm(self, norm_type=2))
        self.norms.append({name: float(norm) for name, norm in grad_norm(self.blocks, "inf", ".").items()})


def norms(trainer: Any, module: NormsModule) -> Any:
    return [list(of_step.items()) for of_step in module.norms]


class LowRankModule(MlpModule):
    """The recipes' GPT-2 with peft's adapters, as their users write it."""

    def __init__(self, **options: Any) -> None:
        from peft import LoraConfig, get_peft_model

        from recipes.gpt2.module import GPT2Module

        super().__init__(**options, depth=0)
        del self.head
        recipe = GPT2Module(num_layers=3, hidden_size=8, num_heads=2, vocab_size=11, block_size=8, dropout=0.0)
        config = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, lora_dropout=0.0)
        self.recipe = recipe
        self.recipe.model = get_peft_model(recipe.model, config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.recipe.loss({"input_ids": batch[0], "labels": batch[1]})
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def reloaded(path: Any, trainer: Any, module: LowRankModule) -> Any:
    """The checkpoint in a new plain module of peft."""
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    other = LowRankModule().double()
    other.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    with torch.no_grad():
        tokens = torch.arange(7)[None]
        return float(other.recipe.loss({"input_ids": tokens, "labels": tokens.roll(-1, 1)}))
