"""The strategy with one stage and several micro-batches, against the plain module under a plain Trainer.

What needs no second process is tested here: it is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_autopipe import BatchError, CheckpointError, ConfigurationError
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.strategy.modules import (
    ClassifierModule,
    InOrder,
    LanguageModule,
    MlpModule,
    class_data,
    largest_difference,
    numbers,
    quiet_trainer,
    regression_data,
    seeded,
    token_data,
    values,
)

# Lightning itself is not free of warnings under the newest torch.
pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-12


def fit(module: pl.LightningModule, data: Any, strategy: Any = "auto", **options: Any) -> pl.Trainer:
    trainer = quiet_trainer(strategy, **options)
    trainer.fit(module, datamodule=data)
    return trainer


def compare(make: Any, data: Any, *, num_microbatches: Any = 4, **options: Any) -> tuple[pl.Trainer, pl.Trainer]:
    """Fits the same module plainly and under the strategy; parameters and metrics must agree."""
    plain, cut = make(), make()
    plain_trainer = fit(plain, data(), **options)
    cut_trainer = fit(cut, data(), AutoPipeStrategy(num_microbatches=num_microbatches), **options)
    assert largest_difference(values(plain), values(cut)) < TOLERANCE
    assert numbers(cut_trainer.callback_metrics) == pytest.approx(numbers(plain_trainer.callback_metrics), rel=1e-9)
    return plain_trainer, cut_trainer


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, "auto"])
def test_result_is_independent_of_the_number_of_microbatches(num_microbatches: Any) -> None:
    compare(
        lambda: seeded(MlpModule),
        lambda: InOrder(regression_data(19), regression_data(5, seed=1), batch_size=8, val_batch_size=3),
        num_microbatches=num_microbatches,
        max_epochs=2,
    )


@pytest.mark.parametrize("num_batches", [4, 5])
def test_accumulation_is_lightnings(num_batches: int) -> None:
    compare(
        lambda: seeded(MlpModule, optimizer="adamw"),
        lambda: InOrder(regression_data(4 * num_batches), batch_size=4),
        accumulate_grad_batches=4,
        max_epochs=2,
    )


def test_scheduled_accumulation() -> None:
    compare(
        lambda: seeded(MlpModule),
        lambda: InOrder(regression_data(16), batch_size=4),
        max_epochs=3,
        callbacks=[GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
    )


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str) -> None:
    compare(
        lambda: seeded(MlpModule),
        lambda: InOrder(regression_data(16), batch_size=8),
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
    )


def test_tokens_that_are_ignored_do_not_count() -> None:
    valid = [1, 7, 3, 0, 5, 0, 2, 4]
    compare(
        lambda: seeded(LanguageModule, optimizer="adamw", lr=0.01),
        lambda: InOrder(token_data(8, valid=valid), token_data(8, valid=valid[::-1]), batch_size=8),
        max_epochs=2,
    )


def test_a_batch_without_any_token_changes_nothing_under_sgd() -> None:
    module = seeded(LanguageModule)
    before = values(module)
    with pytest.warns(UserWarning, match="no weight"):
        fit(module, InOrder(token_data(8, valid=[0] * 8), batch_size=8), AutoPipeStrategy(num_microbatches=4))
    assert largest_difference(before, values(module)) == 0


class WarmUpModule(MlpModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]


class PlateauModule(MlpModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@pytest.mark.parametrize("module_class", [WarmUpModule, PlateauModule])
def test_schedulers(module_class: type[MlpModule]) -> None:
    plain, cut = compare(
        lambda: seeded(module_class),
        lambda: InOrder(regression_data(24), regression_data(5, seed=1), batch_size=4, val_batch_size=3),
        accumulate_grad_batches=2,
        max_epochs=4,
    )
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (plain, cut)]
    assert rates[0] == rates[1]


def test_logs_metrics_and_outputs() -> None:
    modules: list[ClassifierModule] = []

    def make() -> ClassifierModule:
        modules.append(seeded(ClassifierModule))
        return modules[-1]

    compare(make, lambda: InOrder(class_data(19), class_data(10, seed=1), batch_size=8, val_batch_size=4), max_epochs=2)
    plain, cut = modules
    # torchmetrics keeps its sums in float32.
    assert cut.hook_values == pytest.approx(plain.hook_values, rel=1e-5)


def test_logged_by_step(tmp_path: Path) -> None:
    """The values of every step, as a logger sees them."""
    from lightning.pytorch.loggers import CSVLogger

    rows = []
    for name, strategy in (("plain", "auto"), ("cut", AutoPipeStrategy(num_microbatches=3))):
        logger = CSVLogger(tmp_path, name=name)
        data = InOrder(class_data(20), class_data(10, seed=1), batch_size=8, val_batch_size=4)
        fit(seeded(ClassifierModule), data, strategy, logger=logger, log_every_n_steps=1, max_epochs=2)
        text = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        header = text[0].split(",")
        rows.append([dict(zip(header, line.split(","), strict=True)) for line in text[1:]])
    assert len(rows[0]) == len(rows[1])
    for plain, cut in zip(*rows, strict=True):
        assert plain.keys() == cut.keys()
        for key in plain:
            assert cut[key] == plain[key] or float(cut[key]) == pytest.approx(float(plain[key]), rel=1e-9), key


def test_outputs_are_joined() -> None:
    shapes: dict[str, Any] = {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            shapes["train"] = {key: getattr(value, "shape", value) for key, value in outputs.items()}

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            shapes["val"] = outputs["logits"].shape

    data = InOrder(class_data(8), class_data(5), batch_size=8, val_batch_size=5)
    fit(seeded(ClassifierModule), data, AutoPipeStrategy(num_microbatches=3), callbacks=[Keep()])
    assert shapes["train"] == {"loss": (), "logits": (8, 3), "entropy": (), "name": "a name"}
    assert shapes["val"] == (5, 3)


def test_evaluation_and_prediction_return_what_the_plain_trainer_returns() -> None:
    module = seeded(MlpModule)
    data = InOrder(val=regression_data(10), batch_size=4)
    inputs = DataLoader(regression_data(10).tensors[0], batch_size=4)
    results = []
    for strategy in ("auto", AutoPipeStrategy(num_microbatches=2)):
        trainer = quiet_trainer(strategy)
        results.append(
            (
                trainer.predict(module, inputs),
                trainer.test(module, datamodule=data, verbose=False),
                trainer.validate(module, datamodule=data, verbose=False),
            )
        )
    plain, cut = results
    assert [tuple(part.shape) for part in cut[0]] == [(4,), (4,), (2,)]
    assert torch.allclose(torch.cat(cut[0]), torch.cat(plain[0]), rtol=1e-12)
    assert cut[1][0] == pytest.approx(plain[1][0], rel=1e-12)
    assert cut[2][0] == pytest.approx(plain[2][0], rel=1e-12)


@pytest.mark.parametrize("first", ["validate", "test", "predict"])
def test_runs_in_any_order(first: str) -> None:
    module = seeded(MlpModule)
    plain = seeded(MlpModule)
    data = InOrder(regression_data(16), regression_data(5, seed=1), batch_size=8, val_batch_size=3)
    fit(plain, data)
    trainer = quiet_trainer(AutoPipeStrategy(num_microbatches=4), num_sanity_val_steps=2)
    inputs = DataLoader(regression_data(3).tensors[0], batch_size=3)
    if first == "predict":
        trainer.predict(module, inputs)
    else:
        getattr(trainer, first)(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    assert largest_difference(values(plain), values(module)) < TOLERANCE
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, inputs)


def test_bf16_mixed_trains_as_the_plain_trainer_does() -> None:
    plain, cut = seeded(MlpModule).float(), seeded(MlpModule).float()

    def data() -> InOrder:
        x, y = regression_data(16).tensors
        return InOrder(torch.utils.data.TensorDataset(x.float(), y.float()), batch_size=8)

    fit(plain, data(), precision="bf16-mixed")
    fit(cut, data(), AutoPipeStrategy(num_microbatches=1), precision="bf16-mixed")
    assert largest_difference(values(plain), values(cut)) < 1e-6
    halves = seeded(MlpModule).float()
    fit(halves, data(), AutoPipeStrategy(num_microbatches=2), precision="bf16-mixed")
    assert largest_difference(values(plain), values(halves)) < 1e-2


class UnusedModule(MlpModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = nn.Linear(2, 2)


def test_an_unused_parameter_is_not_decayed() -> None:
    compare(
        lambda: seeded(UnusedModule, optimizer="adamw"),
        lambda: InOrder(regression_data(16), batch_size=8),
        max_epochs=2,
    )


class HookModule(MlpModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after transfer")
        return [batch[0] * 2, batch[1]]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(f"before backward {float(loss):.6f}")

    def on_after_backward(self) -> None:
        self.calls.append(f"after backward {float(self.head.weight.grad.sum()):.6f}")


def test_hooks_see_what_they_see_under_a_plain_trainer() -> None:
    modules: list[HookModule] = []

    def make() -> HookModule:
        modules.append(seeded(HookModule))
        return modules[-1]

    compare(make, lambda: InOrder(regression_data(16), batch_size=4), accumulate_grad_batches=2)
    assert modules[0].calls == modules[1].calls


# The sanity check reads the first training batch early ---------------------------------------------


class InPlaceModule(MlpModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].mul_(2)
        return batch


def test_a_hook_that_writes_into_the_batch_writes_once() -> None:
    compare(
        lambda: seeded(InPlaceModule),
        lambda: InOrder(regression_data(16), regression_data(5, seed=1), batch_size=8, val_batch_size=3),
        num_sanity_val_steps=1,
    )


class Stream(IterableDataset[Any]):
    """Gives each sample once, however often it is iterated."""

    def __init__(self, data: Any) -> None:
        self.data = list(data)
        self.num_given = 0

    def __iter__(self) -> Any:
        while self.num_given < len(self.data):
            self.num_given += 1
            yield self.data[self.num_given - 1]


class StreamData(InOrder):
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.train), batch_size=self.batch_size)


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_a_stream_loses_no_sample_to_planning(num_sanity_val_steps: int) -> None:
    compare(
        lambda: seeded(MlpModule),
        lambda: StreamData(regression_data(18), regression_data(5, seed=1), batch_size=8, val_batch_size=3),
        num_sanity_val_steps=num_sanity_val_steps,
    )


class ShuffledData(InOrder):
    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)


def test_planning_does_not_change_the_order_of_shuffled_data() -> None:
    results = []
    for strategy in ("auto", AutoPipeStrategy(num_microbatches=2)):
        module = seeded(MlpModule)
        pl.seed_everything(3)
        data = ShuffledData(regression_data(16), regression_data(5, seed=1), batch_size=4, val_batch_size=3)
        fit(module, data, strategy, num_sanity_val_steps=2, max_epochs=3)
        results.append(values(module))
    assert largest_difference(*results) < TOLERANCE


def test_user_code_can_iterate_the_loaders() -> None:
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(next(iter(trainer.train_dataloader))[0].shape)
            seen.append(len(trainer.train_dataloader))

    fit(seeded(MlpModule), InOrder(regression_data(16), batch_size=4), AutoPipeStrategy(), callbacks=[Look()])
    assert seen == [(4, 8), 4]


# Checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_go_both_ways(tmp_path: Path) -> None:
    data = InOrder(regression_data(16), batch_size=8)
    whole = seeded(MlpModule, optimizer="adamw")
    fit(whole, data, max_epochs=4)
    for first, second in (("auto", "cut"), ("cut", "auto"), ("cut", "cut")):
        path = tmp_path / f"{first}-{second}.ckpt"
        strategies = {"auto": "auto", "cut": AutoPipeStrategy(num_microbatches=2)}
        trainer = fit(seeded(MlpModule, optimizer="adamw"), data, strategies[first], max_epochs=2)
        trainer.save_checkpoint(path)
        resumed = seeded(MlpModule, optimizer="adamw", lr=0.5)
        strategies = {"auto": "auto", "cut": AutoPipeStrategy(num_microbatches=4)}
        trainer = quiet_trainer(strategies[second], max_epochs=4)
        trainer.fit(resumed, datamodule=data, ckpt_path=path)
        assert largest_difference(values(whole), values(resumed)) < TOLERANCE
        assert torch.load(path, weights_only=True)["state_dict"].keys() == whole.state_dict().keys()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half a file"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(content)
    data = InOrder(regression_data(8), batch_size=8)
    with pytest.raises(CheckpointError, match=r"damaged\.ckpt"):
        quiet_trainer(AutoPipeStrategy()).fit(seeded(MlpModule), datamodule=data, ckpt_path=path)


def test_bare_weights_are_no_checkpoint(tmp_path: Path) -> None:
    module = seeded(MlpModule)
    path = tmp_path / "weights.ckpt"
    torch.save(module.state_dict(), path)
    with pytest.raises(CheckpointError, match="state_dict"):
        quiet_trainer(AutoPipeStrategy()).validate(module, datamodule=InOrder(batch_size=1), ckpt_path=str(path))


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fit(seeded(MlpModule), InOrder(regression_data(8), batch_size=8), AutoPipeStrategy())
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    before = path.read_bytes()
    monkeypatch.setattr("torch.save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


# Refused -------------------------------------------------------------------------------------------


class ManualModule(MlpModule):
    automatic_optimization = False


class OwnBackwardModule(MlpModule):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class LbfgsModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class TwoOptimizersModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.head.parameters()), torch.optim.SGD(self.blocks.parameters())]


class ForeignParameterModule(MlpModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([nn.Parameter(torch.zeros(3)), *self.parameters()])


class LoaderIterModule(MlpModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class LazyModule(MlpModule):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (ManualModule, r"ManualModule.automatic_optimization is False"),
        (OwnBackwardModule, r"OwnBackwardModule.backward is overridden"),
        (LbfgsModule, r"LBFGS"),
        (TwoOptimizersModule, r"TwoOptimizersModule.configure_optimizers .*returned several optimizers"),
        (ForeignParameterModule, r"group 0 .* shape \(3,\) that is not registered"),
        (LoaderIterModule, r"LoaderIterModule.training_step takes a dataloader_iter"),
        (LazyModule, r"parameter lazy.weight has no values yet"),
    ],
)
def test_modules_that_are_refused(module_class: type[MlpModule], message: str) -> None:
    torch.manual_seed(7)
    with pytest.raises(ConfigurationError, match=message):
        fit(module_class(), InOrder(regression_data(8), batch_size=8), AutoPipeStrategy())


def test_callbacks_that_are_refused() -> None:
    data = InOrder(regression_data(8), batch_size=8)
    with pytest.raises(ConfigurationError, match="BatchSizeFinder"):
        fit(seeded(MlpModule), data, AutoPipeStrategy(), callbacks=[pl.callbacks.BatchSizeFinder()])


def test_a_wrong_number_of_processes_is_refused_in_the_trainers_own_line() -> None:
    with pytest.raises(ConfigurationError, match="num_stages=3"):
        quiet_trainer(AutoPipeStrategy(num_stages=3), num_processes=2)


class NoLossModule(MlpModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch[0])


def test_a_step_without_a_loss_is_refused() -> None:
    with pytest.raises(BatchError, match="no loss"):
        fit(seeded(NoLossModule), InOrder(regression_data(8), batch_size=8), AutoPipeStrategy())


METRIC_OUTSIDE = torchmetrics.MeanMetric()


class BadLogModule(MlpModule):
    bad: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        arguments = {"value": loss, **self.bad(x)}
        self.log("name", **arguments)
        return loss


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: {"value": {"a": {"b": 1}}},
        lambda x: {"value": "text"},
        lambda x: {"value": x},
        lambda x: {"reduce_fx": sorted},
        lambda x: {"on_step": False, "on_epoch": False},
        lambda x: {"no_such_argument": 1},
        lambda x: {"value": METRIC_OUTSIDE},
    ],
)
def test_log_refuses_what_lightnings_refuses(bad: Any) -> None:
    errors = []
    for strategy in ("auto", AutoPipeStrategy(num_microbatches=2)):
        module = seeded(BadLogModule)
        module.bad = bad
        with pytest.raises(Exception) as caught:  # noqa: PT011
            fit(module, InOrder(regression_data(8), batch_size=8), strategy)
        cause: BaseException = caught.value
        while cause.__cause__ is not None:
            cause = cause.__cause__
        errors.append((type(cause), str(cause)[:40]))
    assert errors[0] == errors[1]


def test_nothing_is_left_behind() -> None:
    module = seeded(ClassifierModule)
    trainer = fit(module, InOrder(class_data(8), class_data(4), batch_size=4), AutoPipeStrategy())
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for obj in (module, trainer._logger_connector, trainer.precision_plugin, *loops):
        changed = {"log", "_on_before_batch_transfer", "epoch_end_reached", "clip_grad_by_norm", "on_advance_end"}
        assert not (changed | {"_should_check_val_fx", "on_batch_end", "on_epoch_end"}) & set(vars(obj))
    assert module.train_accuracy.dist_sync_fn is None
    assert not module.train_accuracy._forward_hooks
    assert trainer._accelerator_connector.use_distributed_sampler
