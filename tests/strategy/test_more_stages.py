"""Three and four stages: frozen stages, callbacks that monitor, checkpoints under other numbers of stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import (
    InOrder,
    LanguageModule,
    MlpModule,
    TiedBlocksModule,
    largest_difference,
    quiet_trainer,
    regression_data,
    seeded,
    token_data,
    values,
)
from tests.strategy.runs import Fit, Report, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

SGD_DATA = partial(InOrder, regression_data(24), batch_size=8)


class ContrastiveModule(MlpModule):
    """Each sample must be most like its own shifted self, among all of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.normalize(x, dim=-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        logits = 5 * h @ h.roll(1, -1).t()
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(h)))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss + 0 * self.head.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        h = self(batch[0])
        self.log("spread", (h - h.mean(0)).norm())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        h = self(batch[0])
        return h @ h.t()


def predicted_likeness(trainer: Any, module: Any) -> Any:
    batches = trainer.predict(module, DataLoader(regression_data(10, seed=2), batch_size=6))
    return [batch.tolist() for batch in batches]


class AdapterModule(LanguageModule):
    """Row 11: low-rank adapters beside frozen weights, with a frozen tied embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)) for _ in self.blocks
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            h = h + block(h) + adapter(h)
        return self.head(h)


FITS = {
    "10 ties": Fit(module_class=TiedBlocksModule, module_options={"optimizer": "adamw"}, data=SGD_DATA),
    "11 adapters": Fit(
        module_class=AdapterModule,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=partial(InOrder, token_data(16), batch_size=8),
        frozen=("embedding", "head", "blocks"),
        trainer_options={"gradient_clip_val": 0.01},
    ),
}


def test_ties_and_adapters() -> None:
    ranks = fit_in_processes(FITS, num_stages=3)
    for name, fit in FITS.items():
        assert_same_result(fit_plain(fit), ranks[name])
    by_stage = [set(rank.gradients[0]) for rank in reversed(ranks["10 ties"])]
    assert by_stage[0] & by_stage[2] == {
        "blocks.1.0.weight",
        "blocks.1.0.bias",
        "blocks.1.1.weight",
        "blocks.1.1.bias",
        "blocks.0.0.bias",
    }
    assert by_stage[0] & by_stage[1] == {"blocks.0.0.weight"}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_loss_over_the_batch(num_stages: int) -> None:
    fit = Fit(
        module_class=ContrastiveModule,
        data=partial(InOrder, regression_data(24), regression_data(12, seed=1), batch_size=8, val_batch_size=6),
        strategy_options={"loss_over": "batch", "num_microbatches": 4, "verify": True},
        after=predicted_likeness,
    )
    plain, ranks = fit_plain(fit), fit_in_processes({"fit": fit}, num_stages=num_stages)["fit"]
    assert_same_result(plain, ranks)
    assert [len(batch) for batch in plain.after] == [6, 4]
    for rank in ranks:
        for batch, expected in zip(rank.after, plain.after, strict=True):
            torch.testing.assert_close(torch.tensor(batch), torch.tensor(expected), rtol=1e-10, atol=1e-10)


class FinetunedModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone = self.blocks


def test_a_backbone_is_unfrozen_by_lightnings_callback() -> None:
    fit = Fit(
        module_class=FinetunedModule,
        data=SGD_DATA,
        callbacks=(partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, verbose=False),),
        trainer_options={"max_epochs": 3},
    )
    plain = fit_plain(fit)
    assert len(plain.gradients[-1]) > len(plain.gradients[0]), "it was unfrozen"
    assert_same_result(plain, fit_in_processes({"fit": fit}, num_stages=2)["fit"])


def test_every_stage_trains() -> None:
    """Row 29."""
    fit = Fit(module_class=MlpModule, data=SGD_DATA)
    plain = fit_plain(fit)
    ranks = fit_in_processes({"fit": fit}, num_stages=4)["fit"]
    assert_same_result(plain, ranks)
    before = seeded(MlpModule)
    for global_rank, rank in enumerate(ranks):
        assert rank.gradients[0], f"rank {global_rank} trains nothing"
        for name in rank.gradients[0]:
            assert not torch.equal(rank.values[name], before.get_parameter(name))


# Callbacks -----------------------------------------------------------------------------------------


class NoisyModule(MlpModule):
    """Its monitored value is best in the second epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        offset = abs(self.current_epoch - 1) * 1.0
        self.log("val_loss", ((self(x) - y) ** 2).mean() + offset)


def best_and_stop(trainer: Any, module: Any) -> Any:
    checkpoint = trainer.checkpoint_callback
    return checkpoint.best_model_path, float(checkpoint.best_model_score), trainer.current_epoch


def test_callbacks_decide_alike_on_all_ranks(tmp_path: Path) -> None:
    """Row 31."""
    fit = Fit(
        module_class=NoisyModule,
        data=partial(InOrder, regression_data(16), regression_data(6, seed=1), batch_size=8, val_batch_size=4),
        callbacks=(
            partial(ModelCheckpoint, dirpath=tmp_path, monitor="val_loss", filename="{epoch}-{val_loss:.3f}"),
            partial(EarlyStopping, monitor="val_loss", patience=1),
        ),
        logger=partial(CSVLogger, tmp_path / "logs", name="run", version=0),
        trainer_options={"max_epochs": 8, "enable_checkpointing": True, "log_every_n_steps": 1},
        after=best_and_stop,
    )
    ranks = fit_in_processes({"fit": fit}, num_stages=2, num_replicas=2)["fit"]
    answers = [rank.after for rank in ranks]
    assert all(answer == answers[0] for answer in answers)
    path, score, last_epoch = answers[0]
    assert "epoch=1" in path
    assert last_epoch == 3  # best in epoch 1, patience 1
    assert Path(path).exists()
    assert [entry.name for entry in tmp_path.glob("*.ckpt")] == [Path(path).name]
    assert all(rank.metrics == ranks[0].metrics for rank in ranks)
    table = (tmp_path / "logs" / "run" / "version_0" / "metrics.csv").read_text()
    assert "val_loss" in table
    assert f"{score:.6f}"[:6] in table


# Checkpoints ---------------------------------------------------------------------------------------


def save(path: Path, trainer: Any, module: Any) -> None:
    trainer.save_checkpoint(path)


class GroupsModule(MlpModule):
    """Two groups, the later layers in the first one, and a schedule."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.03}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("module_class", [GroupsModule, LanguageModule])
def test_checkpoints_resume_under_other_numbers_of_stages(tmp_path: Path, module_class: Any) -> None:
    """Row 34."""
    data = SGD_DATA if module_class is GroupsModule else partial(InOrder, token_data(24), batch_size=8)
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01}
    path = tmp_path / "two-stages.ckpt"
    base = {"module_class": module_class, "module_options": options, "data": data}
    ranks = fit_in_processes(
        {"fit": Fit(**base, trainer_options={"max_epochs": 2}, after=partial(save, path))}, num_stages=2
    )["fit"]
    whole = fit_plain(Fit(**base, trainer_options={"max_epochs": 3}))

    # Without this package: the plain module's keys, shapes and values.
    checkpoint = torch.load(path, weights_only=True)
    module = seeded(module_class, **options)
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    module.load_state_dict(checkpoint["state_dict"])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, ranks[0].values[name])
    optimizer = module.configure_optimizers()
    optimizer = optimizer[0][0] if isinstance(optimizer, tuple) else optimizer
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert len(optimizer.state) == len(list(module.parameters()))

    resumed = Fit(**base, trainer_options={"max_epochs": 3}, ckpt_path=str(path))
    assert_same_values(whole, [fit_plain(resumed)])
    assert_same_values(whole, fit_in_processes({"fit": resumed}, num_stages=3)["fit"])
    assert_same_values(whole, fit_in_processes({"fit": resumed}, num_stages=1)["fit"])
    assert_same_values(whole, fit_in_processes({"fit": resumed}, num_stages=2, num_replicas=2)["fit"])

    # And from a plain Trainer.
    plain = tmp_path / "plain.ckpt"
    fit_plain(Fit(**base, trainer_options={"max_epochs": 2}, after=partial(save, plain)))
    from_plain = Fit(**base, trainer_options={"max_epochs": 3}, ckpt_path=str(plain))
    assert_same_values(whole, fit_in_processes({"fit": from_plain}, num_stages=2)["fit"])


def assert_same_values(expected: Report, ranks: list[Report]) -> None:
    for rank in ranks:
        for name, value in rank.values.items():
            assert torch.allclose(value, expected.values[name], rtol=1e-10, atol=1e-12), name


def fit_twice_and_evaluate(trainer: Any, module: Any) -> Any:
    """A second fit goes on from the first; evaluation from a checkpoint loads it on every stage."""
    data = InOrder(regression_data(24), regression_data(6, seed=1), batch_size=8, val_batch_size=3)
    path = f"{trainer.default_root_dir}/first.ckpt"
    trainer.save_checkpoint(path)
    first = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=data)
    again = trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    return first, again, trainer.global_step


def test_a_second_fit_and_evaluation_of_a_checkpoint(tmp_path: Path) -> None:
    fit = Fit(
        module_class=MlpModule,
        module_options={"optimizer": "adamw"},
        data=SGD_DATA,
        trainer_options={"max_epochs": 2, "default_root_dir": str(tmp_path)},
        after=fit_twice_and_evaluate,
    )
    ranks = fit_in_processes({"fit": fit}, num_stages=2)["fit"]
    plain = fit_plain(fit)
    for rank in ranks:
        first, again, steps = rank.after
        assert first[0] == pytest.approx(plain.after[0][0], rel=1e-9)
        assert again[0] == pytest.approx(first[0], rel=1e-12)
        assert steps == plain.after[2]


def with_another_trainer(trainer: Any, module: Any) -> Any:
    data = InOrder(regression_data(24), regression_data(6, seed=1), batch_size=8, val_batch_size=3)
    path = Path(trainer.default_root_dir) / "plan.json"
    strategy: Any = "auto"
    if isinstance(trainer.strategy, AutoPipeStrategy):
        assert trainer.strategy.plan is not None
        if trainer.is_global_zero:
            trainer.strategy.plan.save(path)
        trainer.strategy.barrier()
        strategy = AutoPipeStrategy(plan=path)
    other = quiet_trainer(strategy, num_processes=trainer.num_devices)
    other.fit(module, datamodule=data)
    results = other.validate(module, datamodule=data, verbose=False)
    return results, values(module) if other.is_global_zero else None


def test_another_trainer_goes_on_with_the_module_and_the_plan(tmp_path: Path) -> None:
    fit = Fit(
        module_class=MlpModule,
        data=SGD_DATA,
        trainer_options={"default_root_dir": str(tmp_path)},
        after=with_another_trainer,
    )
    ranks = fit_in_processes({"fit": fit}, num_stages=2)["fit"]
    expected_results, expected_values = fit_plain(fit).after
    for rank in ranks:
        assert rank.after[0][0] == pytest.approx(expected_results[0], rel=1e-9)
    assert largest_difference(ranks[0].after[1], expected_values) < 1e-12


def test_gather_after_fit_can_be_left_out() -> None:
    fit = Fit(module_class=MlpModule, data=SGD_DATA, strategy_options={"gather_after_fit": False})
    ranks = fit_in_processes({"fit": fit}, num_stages=2)["fit"]
    names = [set(rank.values) for rank in ranks]
    assert all(names)
    assert not names[0] & names[1]
    assert names[0] | names[1] == {name for name, _ in seeded(MlpModule).named_parameters()}
