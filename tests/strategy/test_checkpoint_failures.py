"""A checkpoint that is not written whole ends all processes with the reason, and leaves the last good one."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_autopipe.checkpoints.files import FirstErrorFile
from lightning_autopipe.checkpoints.shard_reader import ShardFolder
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes_to_end
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded

pytestmark = pytest.mark.filterwarnings("ignore")


class Fails(ModelCheckpoint):
    """From the second checkpoint on one rank cannot write."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if trainer.global_step == 2 and trainer.global_rank == int(os.environ["FAILS_ON"]):
            FirstErrorFile.write = killed if os.environ["HOW"] == "killed" else no_room  # type: ignore[method-assign]
        super()._save_checkpoint(trainer, filepath)


def no_room(file: FirstErrorFile, data: Any) -> int:
    file.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return memoryview(data).nbytes


def killed(file: FirstErrorFile, data: Any) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fit_until_a_save_fails(file_format: str) -> None:
    trainer = quiet_trainer(
        AutoPipeStrategy(num_replicas=1, timeout=60, checkpoint_format=file_format, verify=False, profile="flops"),
        num_processes=2,
        max_epochs=3,
        callbacks=[Fails(os.environ["CHECKPOINTS"], filename="{step}", every_n_train_steps=1)],
        enable_checkpointing=True,
    )
    trainer.fit(seeded(MlpModule, optimizer="adamw"), datamodule=InOrder(regression_data(16), batch_size=8))


@pytest.mark.parametrize(
    ("file_format", "rank", "how"),
    [("consolidated", 0, "full disk"), ("sharded_async", 1, "full disk"), ("sharded", 1, "killed")],
)
def test_the_last_good_one_is_left(file_format: str, rank: int, how: str, tmp_path: Path) -> None:
    outcomes = run_processes_to_end(
        2,
        fit_until_a_save_fails,
        file_format,
        timeout_s=60,
        initialize_process_group=False,
        environment={"CHECKPOINTS": str(tmp_path), "FAILS_ON": str(rank), "HOW": how},
    )
    for outcome in outcomes:
        assert outcome.exit_code not in (0, None), describe(outcomes)
        assert not outcome.killed_by_harness, describe(outcomes)
    shown = (outcomes[0].traceback or "") + outcomes[0].output
    left = {entry.name for entry in tmp_path.iterdir()}
    if how == "killed":
        assert left == {"step=1.ckpt", ".step=2.ckpt.partial"}
    else:
        assert left == {"step=1.ckpt"}
        assert "step=2.ckpt" in shown or "a temporary file" in shown, describe(outcomes)
        assert "No space left on device. Make room" in shown, describe(outcomes)
    path = tmp_path / "step=1.ckpt"
    checkpoint = torch.load(path, weights_only=True) if path.is_file() else ShardFolder(path).checkpoint()
    assert checkpoint["global_step"] == 1
    seeded(MlpModule).load_state_dict(checkpoint["state_dict"])
