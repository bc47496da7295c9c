"""Numbers in other formats.

Below float64 sums over micro-batches round otherwise than one sum over the batch does; the tolerances say by how much.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.conformance.items import Item, make_test
from tests.strategy.modules import FloatModule, InOrder, MlpModule, float_data, regression_data
from tests.strategy.runs import Fit, Report, fit_here, fit_in_processes, fit_plain

HALF_TOLERANCE = 0.02
BFLOAT_TOLERANCE = 0.1
FLOATS = partial(InOrder, float_data(24), batch_size=8)


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


class OverflowingModule(FloatModule):
    """Overflows in two of its batches: in the gradients of the first layer only, which one stage has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before = nn.Linear(8, 8)
        self.seen: list[Any] = []
        self.index = 0
        self.is_overflown = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.index in (1, 2):
            x = Overflow.apply(x)
        return super().forward(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.index = batch_idx
        self.is_overflown = self.is_overflown or batch_idx in (1, 2)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.optimizer_name == "fused")
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.is_overflown:  # infinite ones cannot be compared
            super().on_before_optimizer_step(optimizer)
        self.is_overflown = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        scale = self.trainer.precision_plugin.scaler.get_scale()  # type: ignore[union-attr]
        self.seen.append((scale, rate, self.trainer.global_step))


def float16() -> MixedPrecision:
    """What `precision="16-mixed"` is on a GPU; on the CPU the Trainer makes bfloat16 of the name."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2))


def scales(trainer: Any, module: OverflowingModule) -> Any:
    return module.seen, trainer.precision_plugin.scaler.state_dict()


def expect_two_skips(plain: Report, ranks: list[Report]) -> None:
    trajectory = [scale for scale, *_ in plain.after[0]]
    assert sum(later < earlier for earlier, later in itertools.pairwise(trajectory)) == 2


def float16_item(optimizer: str, options: dict[str, Any], **strategy_options: Any) -> Item:
    return Item(
        fit=Fit(
            module_class=OverflowingModule,
            module_options={"optimizer": optimizer, "lr": 0.01},
            data=partial(InOrder, float_data(48), batch_size=8),
            trainer_options={"precision": None, **options},
            strategy_options=strategy_options,
            plugins=(float16,),
            after=scales,
        ),
        tolerance=HALF_TOLERANCE,
        check=expect_two_skips,
    )


ITEMS = {
    "precision: 64-true": Item(
        fit=Fit(
            module_class=MlpModule,
            module_options={"optimizer": "adamw"},
            data=partial(InOrder, regression_data(32), regression_data(8, seed=1), batch_size=8),
        ),
    ),
    "precision: 32-true": Item(
        fit=Fit(
            module_class=FloatModule,
            module_options={"optimizer": "adamw"},
            data=FLOATS,
            trainer_options={"precision": "32-true"},
        ),
        tolerance=1e-4,
    ),
    "precision: bf16-mixed": Item(
        fit=Fit(module_class=FloatModule, data=FLOATS, trainer_options={"precision": "bf16-mixed"}),
        tolerance=BFLOAT_TOLERANCE,
    ),
    "precision: bf16-true": Item(
        fit=Fit(module_class=FloatModule, data=FLOATS, trainer_options={"precision": "bf16-true"}),
        tolerance=BFLOAT_TOLERANCE,
    ),
    "precision: 16-true": Item(
        fit=Fit(module_class=FloatModule, data=FLOATS, trainer_options={"precision": "16-true"}),
        tolerance=HALF_TOLERANCE,
    ),
    "precision: 16-mixed, accumulation, clipping by norm": float16_item(
        "adamw", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ),
    "precision: 16-mixed, merged accumulation, shard_optimizer": float16_item(
        "adamw", {"accumulate_grad_batches": 2}, merge_accumulation=True, shard_optimizer=True
    ),
    "precision: 16-mixed, fused optimizer": float16_item("fused", {}),
}

test_item = make_test(ITEMS)


def save(path: Path, trainer: Any, module: Any) -> Any:
    trainer.save_checkpoint(path)
    return "_unscale_grads_" in vars(trainer.precision_plugin.scaler)


@pytest.mark.filterwarnings("ignore")
def test_a_scale_is_resumed_on_another_number_of_stages(tmp_path: Path) -> None:
    fit = ITEMS["precision: 16-mixed, fused optimizer"].fit
    saving = replace(fit, after=partial(save, tmp_path / "two-stages.ckpt"))
    ranks = fit_in_processes({"fit": saving}, num_stages=2)["fit"]
    assert not any(rank.after for rank in ranks), "the user's scaler is as it was"
    twice = {**fit.trainer_options, "max_epochs": 2}
    resumed = replace(fit, trainer_options=twice, ckpt_path=str(tmp_path / "two-stages.ckpt"))
    whole = fit_plain(replace(fit, trainer_options=twice))
    for report in (fit_plain(resumed), fit_here(resumed, 1, 1)):
        seen, state = report.after
        assert seen == whole.after[0][-len(seen) :]
        assert state == whole.after[1]
