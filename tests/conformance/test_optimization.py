"""How parameters are moved."""

from __future__ import annotations

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
VALIDATED = partial(InOrder, regression_data(8), regression_data(4, seed=1), batch_size=4)
TOKENS = partial(InOrder, token_data(16), batch_size=8)
# As dealt to two replicas: 1, 7, 3, 0 and 5, 0, 2, 4 labels that count; once more in another order.
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


def optimized(optimizer: str, **options: Any) -> Item:
    return item(optimizer=optimizer, **options)


LATER = ("blocks.1", "blocks.2", "blocks.3", "head")
CHECKPOINT = Path(tempfile.gettempdir()) / "lightning-autopipe-conformance-lora.ckpt"

ITEMS = {
    "optimizer: SGD, momentum": optimized("sgd"),
    "optimizer: AdamW, foreach, amsgrad": optimized("foreach amsgrad"),
    "optimizer: AdamW, fused": optimized("fused"),
    "optimizer: Adagrad": optimized("adagrad"),
    "optimizer: RMSprop": optimized("rmsprop"),
    "optimizer: Adafactor": optimized("adafactor"),
    "optimizer: NAdam": optimized("nadam"),
    "optimizer: groups by name": optimized("by name"),
    "optimizer: groups by module": optimized("by module"),
    "optimizer: groups by lists": optimized("by lists"),
    "optimizer: LBFGS": Item(fit=Fit(module_class=LbfgsModule, data=DATA), refused="LBFGS, whose step needs"),
    "optimizer: several": Item(
        fit=Fit(module_class=TwoOptimizersModule, data=DATA), refused=r"test_optimization.py:\d+.*several optimizers"
    ),
    "optimizer: manual optimization": Item(
        fit=Fit(module_class=ManualModule, data=DATA), refused="automatic_optimization is False"
    ),
    "schedule: chained, a warm-up first": item(scheduler="chained", trainer={"accumulate_grad_batches": 2}),
    "schedule: OneCycleLR, momentum": item(scheduler="one cycle"),
    "schedule: by epoch, frequency": item(scheduler="by epoch", data=VALIDATED, trainer={"max_epochs": 4}),
    "schedule: by step, frequency": item(scheduler="by step"),
    "schedule: ReduceLROnPlateau": item(
        scheduler="plateau", data=VALIDATED, trainer={"max_epochs": 3, "accumulate_grad_batches": 2}
    ),
    "schedule: ReduceLROnPlateau by step": item(scheduler="plateau by step"),
    "schedule: lr_scheduler_step": item(m.OwnSchedulingModule, scheduler="by step"),
    "clipping: by norm, ties once": item(
        LanguageModule, lr=1.0, data=TOKENS, after=None, trainer={"gradient_clip_val": 0.05}
    ),
    "clipping: by value": item(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clipping: configure_gradient_clipping": item(m.OwnClippingModule),
    "accumulation: with a short last window": item(
        data=partial(InOrder, regression_data(20), batch_size=4), trainer={"accumulate_grad_batches": 4}
    ),
    "accumulation: GradientAccumulationScheduler": item(
        trainer={"max_epochs": 2}, callbacks=(partial(GradientAccumulationScheduler, {0: 1, 1: 3}),)
    ),
    "accumulation: tokens that are ignored": item(
        LanguageModule, optimizer="adamw", lr=0.01, data=IGNORED, after=None, trainer={"accumulate_grad_batches": 2}
    ),
    "accumulation: as one micro-batch": item(
        trainer={"accumulate_grad_batches": 3}, strategy_options={"num_microbatches": 1}
    ),
    "hooks: optimizer_step and optimizer_zero_grad": item(m.OwnStepModule),
    "hooks: optimizer_step with the closure by hand": item(m.ClosureByHandModule),
    "hooks: gradients changed in hooks": item(m.ChangingHooksModule),
    "hooks: grad_norm": item(m.NormsModule, after=m.norms, tolerance=1e-6),
    "frozen: only the first stage trains": item(frozen=LATER, trainer={"gradient_clip_val": 0.01}),
    "frozen: only the last stage trains": item(
        frozen=("blocks",), trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "frozen: only the middle trains": item(
        optimizer="foreach amsgrad", frozen=("blocks.0", "blocks.3", "head"), trainer={"gradient_clip_val": 0.01}
    ),
    "frozen: adapters of peft on GPT-2": item(
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
