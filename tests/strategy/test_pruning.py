"""`ModelPruning` where optimizer states are shared, weights tied and checkpoints sharded."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging

from lightning_autopipe import AutoPipeStrategy
from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.strategy.parameter_shares import even_shares
from tests.strategy.modules import (
    InOrder,
    LanguageModule,
    MlpModule,
    quiet_trainer,
    regression_data,
    seeded,
    token_data,
)
from tests.strategy.runs import Fit, assert_same_result, fit_in_processes, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = partial(InOrder, token_data(32), token_data(8, seed=1), batch_size=8, val_batch_size=8)


class NotingPruning(ModelPruning):
    """Asks the module for more than its state."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["noted"] = pl_module.current_epoch


class Saving(pl.Callback):
    """Saves in the middle and at the end of each epoch, and looks at what there is of the masked weights."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.held: list[dict[str, bool]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        self._save(trainer)
        self.held.append(
            {
                name: is_absent(getattr(module.get_submodule(path), attribute)) >= is_absent(parameter)
                for name, parameter in module.named_parameters()
                if (path := name.rpartition(".")[0]) and name.endswith("_orig")
                for attribute in [name.rpartition(".")[2].removesuffix("_orig")]
            }
        )

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._save(trainer)

    def _save(self, trainer: Any) -> None:
        folder = trainer.strategy.broadcast(tempfile.mkdtemp())
        trainer.save_checkpoint(Path(folder) / "saved.ckpt")
        trainer.strategy.barrier()
        checkpoint = trainer.strategy.load_checkpoint(Path(folder) / "saved.ckpt")
        tensors = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
        (optimizer,) = checkpoint["optimizer_states"]
        moments = {position: state["exp_avg"].clone() for position, state in optimizer["state"].items()}
        assert checkpoint["noted"] == trainer.current_epoch
        self.states.append((tensors, moments))
        trainer.strategy.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def saved(trainer: Any, module: Any) -> Any:
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, Saving))
    return callback.states, callback.held


def masks(trainer: Any, module: Any) -> Any:
    if trainer.is_global_zero:
        layers = [layer for layer in module.modules() if hasattr(layer, "weight_mask")]
        assert all(float(layer.weight.detach().abs().sum()) > 0 for layer in layers)
    return {name: buffer.clone() for name, buffer in module.named_buffers() if name.endswith("_mask")}


def validated(trainer: Any, module: Any) -> Any:
    """Prunes once more, in an evaluation without a fit."""
    trainer.validate(module, datamodule=trainer.datamodule, verbose=False)
    return {name: int((mask == 0).sum()) for name, mask in masks(trainer, module).items()}, saved(trainer, module)[0]


def assert_same_states(states: Any, expected: Any) -> None:
    assert len(states) == len(expected) == 6
    for state, of_plain in zip(states, expected, strict=True):
        for tensors, plain_tensors in zip(state, of_plain, strict=True):
            assert tensors.keys() == plain_tensors.keys()
            for name, value in plain_tensors.items():
                torch.testing.assert_close(tensors[name], value, rtol=1e-10, atol=1e-12)


def pruned_fit(*, after: Any, strategy_options: dict[str, Any] | None = None, **options: Any) -> Fit:
    return Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.01},
        data=DATA,
        strategy_options=strategy_options or {},
        callbacks=(partial(NotingPruning, amount=0.2, **options), Saving),
        trainer_options={"max_epochs": 3},
        after=after,
    )


SHARED = pruned_fit(
    after=saved,
    strategy_options={"shard_optimizer": True, "checkpoint_format": "sharded"},
    pruning_fn="l1_unstructured",
)
RANDOM = pruned_fit(
    after=masks, pruning_fn="random_unstructured", make_pruning_permanent=False, resample_parameters=True
)
IN_VALIDATION = pruned_fit(
    after=validated,
    pruning_fn="l1_unstructured",
    use_global_unstructured=False,
    use_lottery_ticket_hypothesis=False,
    make_pruning_permanent=False,
    prune_on_train_epoch_end=False,
)


class UnusedModule(LanguageModule):
    """Has a layer that no step runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = torch.nn.Linear(3, 3)


TWICE = replace(
    SHARED,
    module_class=UnusedModule,
    callbacks=(
        partial(NotingPruning, "l1_unstructured", amount=0.1),
        partial(ModelPruning, "l1_unstructured", amount=0.2, parameter_names=["weight"]),
        Saving,
    ),
    strategy_options={},
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return fit_in_processes(
        {"shared": SHARED, "random": RANDOM, "validation": IN_VALIDATION, "twice": TWICE}, num_stages=2, num_replicas=2
    )


def test_shares_of_optimizer_states_and_sharded_checkpoints_outlive_other_names(found: dict[str, Any]) -> None:
    plain = fit_plain(SHARED)
    assert_same_result(plain, found["shared"])
    for rank in found["shared"]:
        states, held = rank.after
        assert_same_states(states, plain.after[0])
        # Masked weights of other stages take no memory once a batch has run.
        assert [len(of_epoch) for of_epoch in held] == [0, len(held[1]), len(held[1])]
        assert held[1]
        assert all(all(of_epoch.values()) for of_epoch in held)


def test_what_no_forward_has_run_since_is_pruned_as_it_was_left(found: dict[str, Any]) -> None:
    """Lottery tickets give other values in between."""
    plain = fit_plain(TWICE)
    assert_same_result(plain, found["twice"])
    for rank in found["twice"]:
        assert_same_states(rank.after[0], plain.after[0])


def test_random_masks_and_new_values_are_rank_zeros(found: dict[str, Any]) -> None:
    reports = found["random"]
    for rank in reports[1:]:
        assert all(torch.equal(value, reports[0].values[name]) for name, value in rank.values.items())
        assert rank.after.keys() == reports[0].after.keys()
        assert all(torch.equal(mask, reports[0].after[name]) for name, mask in rank.after.items())
    assert any(0 < int(mask.sum()) < mask.numel() for mask in reports[0].after.values())


def test_an_evaluation_without_a_fit_prunes_too(found: dict[str, Any]) -> None:
    plain = fit_plain(IN_VALIDATION)
    assert_same_result(plain, found["validation"])
    for rank in found["validation"]:
        zeros, states = rank.after
        assert zeros == plain.after[0]
        assert_same_states(states, plain.after[1])


def test_who_keeps_the_state_of_a_parameter_does_not_change_when_it_is_pruned() -> None:
    """`"_"` sorts behind `"2"`."""
    before = even_shares({"weight": 4, "weight2": 4}, 2)
    after = even_shares({"weight_orig": 4, "weight2": 4}, 2)
    assert {name.removesuffix("_orig"): share for name, share in after.items()} == before


@pytest.mark.parametrize("averaging", [EMAWeightAveraging, partial(StochasticWeightAveraging, swa_lrs=0.1)])
def test_pruning_beside_an_average_of_weights_is_refused(averaging: Any) -> None:
    callbacks = [averaging(), ModelPruning("l1_unstructured", amount=0.5)]
    trainer = quiet_trainer(AutoPipeStrategy(), callbacks=callbacks)
    data = InOrder(regression_data(8), batch_size=8)
    with pytest.raises(ConfigurationError, match=r"WeightAveraging and ModelPruning do not go together"):
        trainer.fit(seeded(MlpModule), datamodule=data)
