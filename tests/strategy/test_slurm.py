"""Processes that SLURM starts: their places, the store's address, and what its signals do."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes, run_processes_to_end
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded, values
from tests.strategy.runs import Fit, assert_same_result, fit_plain
from tests.strategy.test_nodes import place, report_of

pytestmark = pytest.mark.filterwarnings("ignore")

FIT = Fit(module_class=MlpModule, data=partial(InOrder, regression_data(16), batch_size=8), after=place)
OTHERS_TELL = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)


@pytest.fixture
def job_id() -> str:
    """Of which Lightning makes a free port: 15000 and the last four digits."""
    for port in range(16_000, 25_000):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return f"7{port - 15_000:04d}"
    raise AssertionError("no free port")


def tell_task(num_nodes: int, variables: dict[str, str]) -> None:
    """Say to this process what srun would."""
    task = int(os.environ["RANK"])
    num_tasks = int(os.environ["WORLD_SIZE"])
    for name in OTHERS_TELL:
        os.environ.pop(name, None)
    tasks_per_node = num_tasks // num_nodes
    os.environ.update(
        SLURM_NTASKS=str(num_tasks),
        SLURM_NTASKS_PER_NODE=str(tasks_per_node),
        SLURM_NNODES=str(num_nodes),
        SLURM_PROCID=str(task),
        SLURM_LOCALID=str(task % tasks_per_node),
        SLURM_NODEID=str(task // tasks_per_node),
        SLURM_JOB_NAME="train",
    )
    os.environ.update(variables)


def fit_as_task(num_nodes: int, variables: dict[str, str], devices: int, told_nodes: int) -> Any:
    tell_task(num_nodes, variables)
    report = report_of(FIT, num_stages=2, devices=devices, num_nodes=told_nodes)
    return report, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def on_tasks(run: Any, *args: Any) -> Any:
    return run(2, fit_as_task, *args, initialize_process_group=False, timeout_s=60)


@pytest.mark.parametrize(
    ("num_nodes", "node_list"),
    [(1, "localhost"), (2, "127.0.0.[1-2]"), (2, "localhost,other")],
)
def test_trains_as_one_process(num_nodes: int, node_list: str, job_id: str) -> None:
    variables = {"SLURM_NODELIST": node_list, "SLURM_JOB_ID": job_id}
    by_rank = on_tasks(run_processes, num_nodes, variables, 2 // num_nodes, num_nodes)
    reports = [report for report, _, _ in by_rank]
    assert_same_result(fit_plain(FIT), reports)
    assert [tuple(report.after.values()) for report in reports] == [
        # global rank, node, local rank, world size, stage
        (0, 0, 0, 2, 1),
        (1, num_nodes - 1, 2 - num_nodes, 2, 0),
    ]
    assert {(address, port) for _, address, port in by_rank} == {
        ("localhost" if "local" in node_list else "127.0.0.1", 15_000 + int(job_id[-4:]))
    }


@pytest.mark.parametrize(
    ("num_nodes", "devices", "told_nodes", "message"),
    [
        (1, 4, 1, "the launcher started 2 processes, but the Trainer has 4 devices there: set devices=2"),
        (2, 1, 1, "the processes run on 2 nodes, but the Trainer's num_nodes is 1 on"),
    ],
)
def test_other_devices_or_nodes_end_all_tasks(
    num_nodes: int, devices: int, told_nodes: int, message: str, job_id: str
) -> None:
    variables = {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": job_id}
    outcomes = on_tasks(run_processes_to_end, num_nodes, variables, devices, told_nodes)
    told = f"Error: {'on node 0 ' if devices == 4 else ''}{message}"
    assert all(told in (outcome.traceback or "") for outcome in outcomes), describe(outcomes)
    # Whoever sees it first tells the others, which may end before they see it themselves.
    assert any(f"Configuration{told}" in (outcome.traceback or "") for outcome in outcomes), describe(outcomes)


@pytest.fixture
def one_task(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a script that sbatch or salloc started, without srun."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name in OTHERS_TELL:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NTASKS": "1", "NNODES": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return monkeypatch


@pytest.mark.parametrize("job_name", ["bash", "interactive"])
def test_lightning_starts_the_processes_of_an_interactive_job(job_name: str, one_task: pytest.MonkeyPatch) -> None:
    one_task.setenv("SLURM_JOB_NAME", job_name)
    trainer = quiet_trainer("autopipe_h", num_processes=2)
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, LightningEnvironment)
    assert not environment.creates_processes_externally
    assert trainer.world_size == 2


def test_more_devices_than_tasks_are_told(one_task: pytest.MonkeyPatch) -> None:
    one_task.setenv("SLURM_JOB_NAME", "train")
    trainer = quiet_trainer("autopipe_h", num_processes=2)
    with pytest.raises(ConfigurationError, match=r"started 1 processes, .* 2 devices there: .* srun --ntasks-per-node"):
        trainer.fit(seeded(MlpModule), datamodule=FIT.data(num_replicas=1))


class Signals(pl.Callback):
    """SLURM's signals, which reach the tasks at different times."""

    def __init__(self, requeue_signal: signal.Signals) -> None:
        self.requeue_signal = requeue_signal

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == (4 if trainer.global_rank == 1 else 6):
            os.kill(os.getpid(), self.requeue_signal)
        if trainer.global_step == 7 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_job(job_id: str, folder: str, requeue_signal: signal.Signals, is_signalled: bool) -> Any:
    tell_task(1, {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": job_id, "PATH": f"{folder}:{os.environ['PATH']}"})
    trainer = quiet_trainer(
        AutoPipeStrategy(timeout=30, profile="flops", verify=False),
        num_processes=2,
        max_epochs=3,
        callbacks=[Signals(requeue_signal)] if is_signalled else [],
        plugins=[SLURMEnvironment(requeue_signal=requeue_signal)],
        default_root_dir=folder,
    )
    module = seeded(MlpModule)
    try:
        trainer.fit(module, datamodule=InOrder(regression_data(16), batch_size=4))
    except SIGTERMException:
        return trainer.global_step
    return trainer.global_step, values(module) if trainer.is_global_zero else {}


def test_a_requeued_job_goes_on_where_it_was(job_id: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    arguments = (job_id, str(tmp_path), signal.SIGUSR2)
    asked = run_processes(2, fit_job, *arguments, True, initialize_process_group=False)
    assert asked == [7, 7], "all tasks end after the same batch"
    assert (tmp_path / "calls").read_text() == f"requeue {job_id}\n", "once, by one task"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"] == 4
    (steps, resumed), _ = run_processes(2, fit_job, *arguments, False, initialize_process_group=False)
    plain = seeded(MlpModule)
    quiet_trainer(max_epochs=3).fit(plain, datamodule=InOrder(regression_data(16), batch_size=4))
    assert steps == 12
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(resumed[name], expected, rtol=1e-10, atol=1e-12)
