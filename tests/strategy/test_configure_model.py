"""Modules built in `configure_model`: their numbers, what each rank holds of them, and their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import run_processes
from tests.strategy.configured_modules import ConfiguredModule, LargeModule
from tests.strategy.modules import (
    InOrder,
    float_data,
    largest_difference,
    numbers,
    quiet_trainer,
    regression_data,
    values,
)
from tests.strategy.modules import seeded as made_by_seed

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE_BYTES = 4 * LargeModule.NUM_LAYERS * LargeModule.LAYER_WIDTH**2


def peak_growth(run: Callable[[], Any]) -> int:
    """By how many bytes this process's memory grew at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def whole(module: Any) -> dict[str, Any]:
    return {} if any(map(is_absent, module.parameters())) else values(module)


class Configured(ConfiguredModule):
    def __init__(self, width_of_user: int = 3) -> None:
        super().__init__(optimizer="adamw")
        self.save_hyperparameters()

    def configure_model(self) -> None:
        assert self.hparams["width_of_user"] == 3
        super().configure_model()


def several_runs(folder: Path, num_stages: int) -> dict[str, Any]:
    """What a user does with such a module, one after the other; what each gave."""
    num_processes = num_stages

    def trainer(**options: Any) -> Any:
        strategy: Any = "auto"
        if num_stages > 1:
            strategy = AutoPipeStrategy(num_stages=num_stages, num_microbatches=4, timeout=30, profile="measured")
        return quiet_trainer(strategy, num_processes=num_processes, **options)

    data = InOrder(regression_data(16), regression_data(8, seed=1), batch_size=8)
    found: dict[str, Any] = {}
    path = folder / f"{num_stages}.ckpt"
    first, module = trainer(), made_by_seed(Configured)
    first.fit(module, datamodule=data)
    found["fit"] = whole(module)
    first.save_checkpoint(path)
    found["test"] = numbers(first.test(module, datamodule=data)[0])
    resumed, module = trainer(max_epochs=2), made_by_seed(Configured)
    resumed.fit(module, datamodule=data, ckpt_path=path)
    found["resumed"] = whole(module)
    loaded = Configured.load_from_checkpoint(path)
    trainer().fit(loaded, datamodule=data)
    found["loaded"] = whole(loaded)
    module = made_by_seed(Configured)
    found["validated"] = numbers(trainer().validate(module, datamodule=data, ckpt_path=path)[0])
    module = made_by_seed(Configured)
    trainer(limit_train_batches=0).fit(module, datamodule=data)
    found["without a batch"] = whole(module)
    return found


def large_run(num_stages: int) -> tuple[int, int]:
    """The peak of one evaluation, and of one planning with measurements, in bytes."""

    def validate(module: Any, **options: Any) -> None:
        strategy = AutoPipeStrategy(num_stages=num_stages, gather_after_fit=False, timeout=60, **options)
        trainer = quiet_trainer(strategy, num_processes=num_stages, precision="32-true")
        trainer.validate(module, datamodule=InOrder(val=float_data(4), batch_size=4), verbose=False)

    validate(ConfiguredModule())  # what is imported on the way counts for nothing
    flops, measured = (partial(validate, LargeModule(), profile=profile) for profile in ("flops", "measured"))
    return peak_growth(flops), peak_growth(measured)


def all_runs(folder: Path, num_stages: int) -> tuple[dict[str, Any], tuple[int, int]]:
    return several_runs(folder, num_stages), large_run(num_stages)


def test_numbers_are_those_of_the_plain_module_and_no_rank_holds_all_of_it(tmp_path: Path) -> None:
    expected = several_runs(tmp_path, 1)
    ranks = run_processes(3, all_runs, tmp_path, 3, initialize_process_group=False, timeout_s=200)
    found, _ = ranks[0]
    for name, value in expected.items():
        if name in ("test", "validated"):
            assert all(rank[name] == pytest.approx(value, rel=1e-10) for rank, _ in ranks), name
        else:
            assert largest_difference(value, found[name]) < 1e-10, name
    for _, peaks in ranks:
        assert peaks[0] < 0.5 * LARGE_BYTES, f"{peaks} of {LARGE_BYTES}"
        assert peaks[1] < 0.75 * LARGE_BYTES, f"{peaks} of {LARGE_BYTES}"  # measuring holds one layer more
