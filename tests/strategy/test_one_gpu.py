"""Several processes on one GPU, over gloo; most of it on a CPU that stands in for the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import device_parser
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.runtime import p2p_transport
from lightning_autopipe.runtime.wire import HostWire
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes, run_processes_to_end
from tests.strategy.modules import InOrder, LanguageModule, quiet_trainer, token_data
from tests.strategy.runs import Fit, Report, assert_same_result, fit_here, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

GPU = torch.device("cuda", 0)
FIT = Fit(
    module_class=LanguageModule,
    module_options={"optimizer": "adamw", "lr": 0.01},
    data=partial(InOrder, token_data(8), token_data(8, seed=1), batch_size=4),
    trainer_options={"max_epochs": 2, "gradient_clip_val": 0.5},
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def fit_through_host_memory(fit: Fit) -> tuple[Report, int]:
    """With copies of all messages, as for a GPU."""
    num_messages = 0

    class CountingWire(HostWire):
        def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal num_messages
            num_messages += 1
            return super().outgoing(tensor)

    p2p_transport.wire_for = lambda device, group: CountingWire(device)
    return fit_here(fit, num_stages=2, num_replicas=1), num_messages


def test_messages_through_host_memory_change_no_number() -> None:
    by_rank = run_processes(2, fit_through_host_memory, FIT, initialize_process_group=False)
    assert_same_result(fit_plain(FIT), [report for report, _ in by_rank])
    assert all(num_messages >= 4 * 4 for _, num_messages in by_rank), "four steps of four micro-batches each"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning believes in a GPU."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(CUDAAccelerator, "auto_device_count", staticmethod(lambda: 1))
    monkeypatch.setattr(device_parser, "_get_all_available_gpus", lambda **_: [0])


def trainer_on(strategy: AutoPipeStrategy) -> Any:
    return quiet_trainer(strategy, accelerator="gpu", devices="auto")


def test_a_gpu_named_twice_is_for_two_processes_over_gloo(one_gpu: None) -> None:
    trainer = trainer_on(AutoPipeStrategy(num_replicas=1, parallel_devices=[GPU, GPU], process_group_backend="gloo"))
    assert trainer.world_size == 2
    assert trainer.strategy.root_device == GPU


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_nccl_on_a_gpu_named_twice_is_refused_by_the_trainer(backend: str | None, one_gpu: None) -> None:
    with pytest.raises(ConfigurationError, match=r"\['cuda:0', 'cuda:0'\] are one GPU.*process_group_backend='gloo'"):
        trainer_on(AutoPipeStrategy(parallel_devices=[GPU, GPU], process_group_backend=backend))


def test_nccl_without_gpus_is_refused_by_the_trainer() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'nccl' connects GPUs, but the devices are of type cpu: leave it unset"
    ):
        quiet_trainer(AutoPipeStrategy(process_group_backend="nccl"), accelerator="cpu", devices=2)


@pytest.mark.parametrize("devices", [[GPU], [GPU, GPU]], ids=["one for all", "one each"])
def test_the_device_of_a_process_goes_by_its_local_rank(
    devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert AutoPipeStrategy(parallel_devices=devices, cluster_environment=LightningEnvironment()).root_device == GPU
    others = [torch.device("cuda", index) for index in (2, 3)]
    strategy = AutoPipeStrategy(parallel_devices=others, cluster_environment=LightningEnvironment())
    assert strategy.root_device == torch.device("cuda", 3)


def fit_on_one_gpu(backend: str | None) -> Report:
    options = {"process_group_backend": backend, "timeout": 60}
    trainer_options = {**FIT.trainer_options, "accelerator": "gpu", "devices": 1}
    fit = replace(FIT, strategy_options=options, trainer_options=trainer_options)
    return on_cpu(fit_here(fit, num_stages=2, num_replicas=1))


def on_cpu(report: Report) -> Report:
    """CUDA memory would not outlive its process."""
    values = {name: value.cpu() for name, value in report.values.items()}
    gradients = [{name: gradient.cpu() for name, gradient in step.items()} for step in report.gradients]
    return replace(report, values=values, gradients=gradients)


@needs_gpu
def test_two_processes_on_one_gpu_train_as_one() -> None:
    reports = run_processes(2, fit_on_one_gpu, "gloo", initialize_process_group=False, timeout_s=120)
    assert_same_result(fit_plain(FIT), reports, tolerance=1e-8)


@needs_gpu
def test_nccl_on_one_gpu_is_refused_on_every_rank() -> None:
    outcomes = run_processes_to_end(2, fit_on_one_gpu, None, initialize_process_group=False, timeout_s=120)
    for outcome in outcomes:
        assert "which NCCL refuses: set process_group_backend='gloo'" in (outcome.traceback or ""), describe(outcomes)
