"""Modules built in `configure_model`: their numbers, what each rank holds of them, and their checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_autopipe.capture.absent import is_absent
from lightning_autopipe.runtime.mapped_files import in_mapped_files
from lightning_autopipe.runtime.recorded_calls import SMALL
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import run_processes
from tests.strategy.configured_modules import ConfiguredCausalModule, ConfiguredModule, LargeModule, MediumModule
from tests.strategy.modules import (
    InOrder,
    float_data,
    largest_difference,
    numbers,
    quiet_trainer,
    regression_data,
    token_data,
    values,
)
from tests.strategy.modules import seeded as made_by_seed
from tests.strategy.runs import Fit, assert_same_result, fit_in_processes, fit_plain

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


class FromFile(Callback):
    """Notes what share of a checkpoint's mapped file has been read: before the first batch, and at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shares: list[float] = []
        self.is_left = False
        self.checkpoint: Any = None

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.checkpoint = checkpoint  # so that it stays mapped

    def on_fit_start(self, *_: Any) -> None:
        for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
            if str(self.path) in mapping:
                size, read = (int(re.findall(rf"^{key}: +(\d+) kB", mapping, re.M)[0]) for key in ("Size", "Rss"))
                self.shares.append(read / size)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.on_fit_start()
        states = trainer.optimizers[0].state.values()
        self.is_left = not in_mapped_files([value for state in states for value in state.values()])


def resumed_run(folder: Path, num_stages: int) -> tuple[list[float], bool]:
    """What `FromFile` finds in a run that resumes from a plain file with the state of an optimizer."""
    path = folder / "large.ckpt"

    def fit(max_epochs: int, **options: Any) -> Any:
        trainer = quiet_trainer(
            AutoPipeStrategy(num_stages=num_stages, gather_after_fit=False, timeout=60, profile="flops"),
            num_processes=num_stages,
            precision="32-true",
            max_epochs=max_epochs,
            callbacks=[FromFile(path)],
        )
        trainer.fit(MediumModule(optimizer="adamw"), datamodule=InOrder(float_data(4), batch_size=4), **options)
        return trainer

    fit(1).save_checkpoint(path)
    (found,) = fit(2, ckpt_path=path).callbacks[:1]
    return found.shares, found.is_left


def all_runs(folder: Path, num_stages: int) -> tuple[dict[str, Any], tuple[int, int], tuple[list[float], bool]]:
    return several_runs(folder, num_stages), large_run(num_stages), resumed_run(folder, num_stages)


def test_numbers_are_those_of_the_plain_module_and_no_rank_holds_all_of_it(tmp_path: Path) -> None:
    expected = several_runs(tmp_path, 1)
    ranks = run_processes(3, all_runs, tmp_path, 3, initialize_process_group=False, timeout_s=200)
    found, _, _ = ranks[0]
    for name, value in expected.items():
        if name in ("test", "validated"):
            assert all(rank[name] == pytest.approx(value, rel=1e-10) for rank, _, _ in ranks), name
        else:
            assert largest_difference(value, found[name]) < 1e-10, name
    for _, peaks, (shares, is_left) in ranks:
        assert peaks[0] < 0.5 * LARGE_BYTES, f"{peaks} of {LARGE_BYTES}"
        assert peaks[1] < 0.75 * LARGE_BYTES, f"{peaks} of {LARGE_BYTES}"  # measuring holds one layer more
        assert len(shares) == 2, "the checkpoint was not mapped"
        assert shares[0] < 0.01, shares
        assert 0.25 < shares[1] < 0.42, shares  # 7 to 9 of 24 layers, with parameters and optimizer state
        assert is_left


def pretrained(folder: Path) -> None:
    """A small GPT-2 with values that no seed of the fit gives."""
    module = ConfiguredCausalModule()
    module.configure_model()
    assert module.net is not None
    module.net.double().save_pretrained(folder)


class NotesAbsent(Callback):
    """How many of the large parameters are not here, before the first batch and at the end."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.found.append(sum(is_absent(p) for p in module.parameters() if p.numel() >= SMALL))

    on_train_end = on_fit_start


def absences(trainer: Any, module: Any) -> list[int]:
    return next(callback.found for callback in trainer.callbacks if isinstance(callback, NotesAbsent))


def test_a_pretrained_model_is_read_by_the_ranks_that_own_it(tmp_path: Path) -> None:
    pretrained(tmp_path)
    fit = Fit(
        module_class=ConfiguredCausalModule,
        module_options={"folder": tmp_path},
        data=partial(InOrder, token_data(16), batch_size=8),
        callbacks=(NotesAbsent,),
        after=absences,
    )
    plain, ranks = fit_plain(fit), fit_in_processes({"fit": fit}, num_stages=2)["fit"]
    assert_same_result(plain, ranks)
    assert [rank.after for rank in ranks] == [[8, 4]] * 2
