from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_autopipe.core.errors import CheckpointError
from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.checkpoint_loading import load_any
from tests.strategy.modules import (
    InOrder,
    MlpModule,
    largest_difference,
    quiet_trainer,
    regression_data,
    seeded,
    values,
)


@pytest.mark.parametrize(
    ("path", "given", "asked"),
    [("https://x/a.ckpt", None, True), ("https://x/a.ckpt", False, False), ("a.ckpt", None, None), ("a", True, True)],
)
def test_nothing_is_unpickled_without_limits_unless_the_user_says_so(path: str, given: Any, asked: Any) -> None:
    calls: list[Any] = []

    def load(weights_only: bool | None) -> Any:
        calls.append(weights_only)
        return {"state_dict": {}}

    load_any(load, path, given)
    assert calls == [asked]


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"is no complete sharded checkpoint: it has no file checkpoint\.pt"):
        load_any(lambda _: {}, tmp_path, None)


@pytest.mark.filterwarnings("ignore")
def test_the_last_folder_is_found_and_replaced(tmp_path: Path) -> None:
    data = InOrder(regression_data(16), batch_size=8)

    def fit(max_epochs: int, ckpt_path: str | None = None, *, folder: Path = tmp_path) -> MlpModule:
        callback = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        trainer = quiet_trainer(
            AutoPipeStrategy(checkpoint_format="sharded_async"),
            callbacks=[callback],
            enable_checkpointing=True,
            max_epochs=max_epochs,
        )
        module: MlpModule = seeded(MlpModule, optimizer="adamw")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module

    fit(2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").is_dir()
    resumed = fit(3, "last")
    assert largest_difference(values(resumed), values(fit(3, folder=tmp_path / "other"))) == 0
