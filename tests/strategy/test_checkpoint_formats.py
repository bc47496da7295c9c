"""Row 34: what any layout, schedule and format has saved is resumed by any other; AdamW, in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_autopipe.checkpoints.consolidation import consolidate
from tests.harness import run_processes
from tests.strategy.modules import InOrder, MlpModule, regression_data
from tests.strategy.runs import Fit, Report, fit_here, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

MICROBATCHES = 4
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
FORMATS = ("consolidated", "sharded", "sharded_async")


class GroupsModule(MlpModule):
    """Two groups, the later layers in the first one, and a schedule by step."""

    def __init__(self) -> None:
        super().__init__(depth=7, lr=0.01)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.03}, {"params": self.blocks.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ResumableLoader:
    """Goes on where it was, in the middle of an epoch; Lightning asks it to."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_read = self.num_to_skip = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_to_skip = self.num_to_skip, 0
        for num_read, batch in enumerate(self.loader, start=1):
            self.num_read = num_read
            if num_read > skipped:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_to_skip = state["num_read"]


class ResumableData(InOrder):
    def train_dataloader(self) -> Any:
        return ResumableLoader(super().train_dataloader())


BASE = Fit(
    module_class=GroupsModule,
    data=partial(ResumableData, regression_data(48), batch_size=8),
    trainer_options={"max_steps": 4, "max_epochs": None},
)


def saving_at_two(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)


class Job:
    """A fit on a layout: uninterrupted and saving in its middle, or resumed."""

    def __init__(
        self, num_stages: int, num_replicas: int, schedule: str, file_format: str, shard: bool = False
    ) -> None:
        self.num_stages, self.num_replicas = num_stages, num_replicas
        self.schedule, self.file_format, self.shard = schedule, file_format, shard

    @property
    def name(self) -> str:
        shard = "-shared" if self.shard else ""
        return f"{self.num_stages}x{self.num_replicas}-{self.schedule}-{self.file_format}{shard}"

    def fit(self, **changes: Any) -> Fit:
        options = {
            "schedule": self.schedule,
            "num_microbatches": MICROBATCHES,
            "checkpoint_format": self.file_format,
            "shard_optimizer": self.shard,
        }
        return replace(BASE, strategy_options=options, **changes)

    def saving(self, root: Path) -> Fit:
        options = {**BASE.trainer_options, "enable_checkpointing": True}
        return self.fit(trainer_options=options, callbacks=[partial(saving_at_two, root / self.name)])

    def saved(self, root: Path) -> Path:
        return root / self.name / "step=2.ckpt"


def run_jobs(root: Path, writers: list[Job], resumed: list[tuple[Job, Path]]) -> dict[str, Report]:
    """In each of the processes."""
    reports = {job.name: fit_here(job.saving(root), job.num_stages, job.num_replicas) for job in writers}
    for job, path in resumed:
        fit = job.fit(ckpt_path=str(path))
        reports[f"{job.name} from {path.parent.name}"] = fit_here(fit, job.num_stages, job.num_replicas)
    return reports


def in_processes(root: Path, writers: list[Job], sources: list[Path]) -> list[dict[str, Report]]:
    """Runs the writers, and from each source and each own checkpoint one of them after the other."""
    own = [(job, job.saved(root)) for job in writers]
    others = [(writers[index % len(writers)], path) for index, path in enumerate(sources)]
    num_processes = writers[0].num_stages * writers[0].num_replicas
    return run_processes(
        num_processes, run_jobs, root, writers, own + others, initialize_process_group=False, timeout_s=200
    )


def test_any_checkpoint_is_resumed_by_any_layout(tmp_path: Path) -> None:
    plain = fit_plain(replace(BASE, callbacks=[partial(saving_at_two, tmp_path / "plain")], **saves()))
    files = [tmp_path / "plain" / "step=2.ckpt"]
    for writers in (
        [Job(2, 2, "1f1b", "sharded"), Job(2, 2, "zero_bubble", "consolidated", shard=True)],
        [Job(2, 1, "interleaved_1f1b", "sharded_async"), Job(1, 2, "1f1b", "sharded", shard=True)],
        [Job(3, 1, "zero_bubble", "sharded"), Job(3, 1, "1f1b", "consolidated")],
    ):
        ranks = in_processes(tmp_path, writers, files[-2:])
        for index, rank in enumerate(ranks):
            for name, report in rank.items():
                assert_same(report, plain, f"{name} on rank {index}")
                writer, _, source = name.partition(" from ")
                if source == writer:
                    assert_same(report, rank[writer], f"{name} on rank {index}", exact=True)
        files += [job.saved(tmp_path) for job in writers]
    one = run_jobs(tmp_path, [], [(Job(1, 1, "1f1b", "sharded"), path) for path in files])
    for name, report in one.items():
        assert_same(report, plain, name)
    by_plain = torch.load(files[0], weights_only=True)
    for path in files[1:]:
        file = path
        if path.is_dir():
            file = path.with_suffix(".file")
            consolidate(path, file)
        checkpoint = torch.load(file, weights_only=True)
        assert list(checkpoint["state_dict"]) == list(plain.values)
        assert checkpoint["loops"] == by_plain["loops"]
        assert checkpoint["lr_schedulers"] == by_plain["lr_schedulers"]
        assert checkpoint["callbacks"].keys() == by_plain["callbacks"].keys()
        assert_same(fit_plain(replace(BASE, ckpt_path=str(file))), plain, str(path))
        loaded = GroupsModule.load_from_checkpoint(file, weights_only=True).state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in checkpoint["state_dict"].items())
    leftovers = [path.name for path in tmp_path.rglob("*") if path.name.startswith(".") and path.name != ".metadata"]
    assert leftovers == []


def saves() -> dict[str, Any]:
    return {"trainer_options": {**BASE.trainer_options, "enable_checkpointing": True}}


def assert_same(report: Report, expected: Report, name: str, *, exact: bool = False) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-10, "atol": 1e-12}
    for parameter, value in report.values.items():
        torch.testing.assert_close(value, expected.values[parameter], **tolerance, msg=f"{name}: {parameter}")
    assert len(report.gradients) in (2, 4)
