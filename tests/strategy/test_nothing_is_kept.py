"""After a run nothing in this process holds its module, its Trainer or its strategy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import run_processes
from tests.strategy.modules import (
    ClassifierModule,
    InOrder,
    MlpModule,
    class_data,
    quiet_trainer,
    regression_data,
    seeded,
)

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = {MlpModule: regression_data(8), ClassifierModule: class_data(8)}


class Unlucky(MlpModule):
    """Fails after its first step."""

    def on_train_batch_end(self, *args: Any) -> None:
        raise ArithmeticError("in a hook")


def what_is_kept(num_stages: int) -> list[str]:
    """What still is there of three fits and a validation, the last fit failing."""
    kept: dict[str, weakref.ref[Any]] = {}
    for module_class in (MlpModule, ClassifierModule, Unlucky):
        strategy = AutoPipeStrategy(num_stages=num_stages, num_microbatches=2, profile="flops")
        trainer = quiet_trainer(strategy, num_processes=num_stages, gradient_clip_val=0.1)
        module = seeded(module_class)
        data = DATA.get(module_class, regression_data(8))
        try:
            trainer.fit(module, datamodule=InOrder(data, data, batch_size=4))
            trainer.validate(module, datamodule=InOrder(data, data, batch_size=4), verbose=False)
        except ArithmeticError:
            assert module_class is Unlucky
        for value in (strategy, trainer, module):
            kept[f"{type(value).__name__} of {module_class.__name__}"] = weakref.ref(value)
    del strategy, trainer, module, value
    gc.collect()
    return [name for name, reference in kept.items() if reference() is not None]


def test_in_one_process() -> None:
    assert what_is_kept(1) == []


def test_in_a_process_of_several() -> None:
    assert run_processes(2, what_is_kept, 2, initialize_process_group=False) == [[], []]
