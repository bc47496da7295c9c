"""How parameters are moved."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from tests.conformance import optimized_modules as m
from tests.conformance.items import Item, make_test
from tests.strategy.modules import InOrder, LanguageModule, MlpModule, regression_data, token_data
from tests.strategy.runs import Fit

DATA = partial(InOrder, regression_data(16), batch_size=4)
VALIDATED = partial(InOrder, regression_data(12), regression_data(4, seed=1), batch_size=4)
TOKENS = partial(InOrder, token_data(16), batch_size=8)
# Labels that count, of each sample.
IGNORED = partial(InOrder, token_data(16, valid=[1, 5, 7, 0, 3, 2, 0, 4, 0, 4, 2, 0, 6, 3, 1, 7]), batch_size=8)


class ManualModule(MlpModule):
    automatic_optimization = False


class TwoOptimizersModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters()), torch.optim.SGD(self.blocks.parameters())]


class LbfgsModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def item(module_class: Any = m.OptimizedModule, *, data: Any = DATA, after: Any = m.rates, **options: Any) -> Item:
    trainer_options = options.pop("trainer", {})
    tolerance = options.pop("tolerance", 1e-10)
    fields = {name: options.pop(name) for name in ("callbacks", "frozen", "strategy_options") if name in options}
    fit = Fit(
        module_class=module_class,
        module_options=options,
        data=data,
        trainer_options=trainer_options,
        after=after,
        **{"strategy_options": {"num_microbatches": 2}, **fields},
    )
    return Item(fit=fit, tolerance=tolerance)


LATER = ("blocks.1", "blocks.2", "head")
CHECKPOINT = Path(tempfile.gettempdir()) / f"lightning-autopipe-{os.getpid()}-lora.ckpt"

ITEMS = {
    "SGD with momentum, OneCycleLR": item(optimizer="sgd", scheduler="one cycle"),
    "AdamW foreach amsgrad, SequentialLR with a warm-up by step, accumulation": item(
        optimizer="foreach amsgrad", scheduler="chained", trainer={"accumulate_grad_batches": 2}
    ),
    "AdamW fused, ReduceLROnPlateau by epoch, a short last window": item(
        optimizer="fused",
        scheduler="plateau",
        data=VALIDATED,
        trainer={"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "Adagrad, clipping by value": item(
        optimizer="adagrad", trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "RMSprop, StepLR every third step": item(optimizer="rmsprop", scheduler="by step"),
    "Adafactor, StepLR every second epoch": item(
        optimizer="adafactor", scheduler="by epoch", data=VALIDATED, trainer={"max_epochs": 4}
    ),
    "NAdam, ReduceLROnPlateau by step": item(optimizer="nadam", scheduler="plateau by step"),
    "groups by name, GradientAccumulationScheduler": item(
        optimizer="by name",
        trainer={"max_epochs": 2},
        callbacks=(partial(GradientAccumulationScheduler, {0: 1, 1: 3}),),
    ),
    "groups by module, lr_scheduler_step": item(m.OwnSchedulingModule, optimizer="by module", scheduler="by step"),
    "groups by lists, configure_gradient_clipping": item(m.OwnClippingModule, optimizer="by lists"),
    "LBFGS": Item(fit=Fit(module_class=LbfgsModule, data=DATA), refused="LBFGS, whose step needs"),
    "several optimizers": Item(
        fit=Fit(module_class=TwoOptimizersModule, data=DATA), refused=r"test_optimization.py:\d+.*several optimizers"
    ),
    "manual optimization": Item(
        fit=Fit(module_class=ManualModule, data=DATA), refused="automatic_optimization is False"
    ),
    "clipping by norm with tied weights, ignored tokens, accumulation": item(
        LanguageModule,
        lr=1.0,
        data=IGNORED,
        after=None,
        trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    ),
    "accumulation of batches of one micro-batch": item(
        data=DATA, trainer={"accumulate_grad_batches": 3}, strategy_options={"num_microbatches": 1}
    ),
    "optimizer_step and optimizer_zero_grad": item(m.OwnStepModule),
    "optimizer_step with the closure called by hand": item(m.ClosureByHandModule),
    "gradients changed in hooks, grad_norm": item(m.NormsModule, after=m.norms, tolerance=1e-6),
    "only the first stage trains, clipping by norm": item(frozen=LATER, trainer={"gradient_clip_val": 0.01}),
    "only the last stage trains, clipping by value": item(
        frozen=("blocks",), trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "only the middle trains, clipping by norm": item(
        optimizer="foreach amsgrad", frozen=("blocks.0", "blocks.2", "head"), trainer={"gradient_clip_val": 0.01}
    ),
    "adapters of peft on the recipes' GPT-2": item(
        m.LowRankModule,
        optimizer="adamw",
        lr=0.05,
        data=TOKENS,
        after=partial(m.reloaded, CHECKPOINT),
        trainer={"gradient_clip_val": 0.1},
        tolerance=1e-6,
    ),
}

test_item = make_test(ITEMS)
