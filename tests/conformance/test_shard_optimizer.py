"""Optimizer state shared by the replicas of a stage."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.conformance.items import Item, make_test
from tests.strategy.modules import (
    ClippingModule,
    FloatModule,
    InOrder,
    LanguageModule,
    MlpModule,
    float_data,
    regression_data,
    token_data,
)
from tests.strategy.runs import Fit


class GroupsModule(MlpModule):
    """Two groups, one of them in no order of the stages, and schedulers of both."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.03}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.03, 0.02], total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ForeachModule(MlpModule):
    """Momentum, all parameters of a rank at once."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, foreach=True)


NUMBERS = partial(InOrder, regression_data(32), batch_size=8)


def item(module_class: Any, data: Any = NUMBERS, tolerance: float = 1e-10, **trainer_options: Any) -> Item:
    fit = Fit(
        module_class=module_class,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=data,
        strategy_options={"shard_optimizer": True},
        trainer_options=trainer_options,
    )
    return Item(fit=fit, tolerance=tolerance)


ITEMS = {
    "shard_optimizer: AdamW": item(MlpModule),
    "shard_optimizer: groups and a schedule by step": item(GroupsModule),
    "shard_optimizer: foreach": item(ForeachModule),
    "shard_optimizer: clipping by norm, accumulation": item(
        MlpModule, gradient_clip_val=0.05, accumulate_grad_batches=2
    ),
    "shard_optimizer: clipping by value": item(MlpModule, gradient_clip_val=0.001, gradient_clip_algorithm="value"),
    "shard_optimizer: clipping by the user's hook": item(ClippingModule),
    "shard_optimizer: tied parameters": item(LanguageModule, partial(InOrder, token_data(32), batch_size=8)),
    "shard_optimizer: bf16-mixed": item(
        FloatModule, partial(InOrder, float_data(32), batch_size=8), tolerance=0.1, precision="bf16-mixed"
    ),
}

test_item = make_test(ITEMS)
