"""Several nodes, of unlike numbers of processes too, whoever started them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.strategy import AutoPipeStrategy
from tests.harness import describe, run_processes, run_processes_to_end
from tests.strategy.modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded
from tests.strategy.runs import Fit, Report, assert_same_result, fit_here, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")


def place(trainer: Any, module: Any) -> Any:
    strategy = trainer.strategy
    return {
        "global rank": trainer.global_rank,
        "node": trainer.node_rank,
        "local rank": trainer.local_rank,
        "world size": trainer.world_size,
        "stage": strategy.communicator.stage_index if isinstance(strategy, AutoPipeStrategy) else None,
    }


FIT = Fit(
    module_class=MlpModule,
    data=partial(InOrder, regression_data(18), regression_data(8, seed=1), batch_size=6, val_batch_size=4),
    after=place,
)
BY_HAND: dict[str, str] = {}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a run"}


def tell_place(processes_by_node: tuple[int, ...]) -> int:
    """Say to this process what a launcher would, who starts these numbers; gives its node's."""
    local_rank, node_rank = int(os.environ["RANK"]), 0
    while local_rank >= processes_by_node[node_rank]:
        local_rank -= processes_by_node[node_rank]
        node_rank += 1
    num_processes = processes_by_node[node_rank]
    told = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": num_processes,
        "NODE_RANK": node_rank,
        "GROUP_RANK": node_rank,
    }
    os.environ.update({name: str(value) for name, value in told.items()})
    return num_processes


def report_of(fit: Fit, *, num_stages: int, devices: int, num_nodes: int) -> Report:
    """One rank's report of a fit with what the Trainer is told."""
    return fit_here(replace(fit, trainer_options={"devices": devices, "num_nodes": num_nodes}), num_stages, 1)


def fit_twice(processes_by_node: tuple[int, ...], one_device: bool, num_nodes: int) -> list[Report]:
    num_processes = tell_place(processes_by_node)
    devices = 1 if one_device else num_processes
    return [report_of(FIT, num_stages=sum(processes_by_node), devices=devices, num_nodes=num_nodes) for _ in range(2)]


@pytest.mark.parametrize(
    ("environment", "one_device"), [(BY_HAND, False), (TORCHRUN, True)], ids=["by hand", "torchrun, one device each"]
)
def test_nodes_of_unlike_numbers_of_processes(environment: dict[str, str], one_device: bool) -> None:
    by_rank = run_processes(
        3, fit_twice, (1, 2), one_device, 2, initialize_process_group=False, environment=environment
    )
    plain = fit_plain(FIT)
    for reports in zip(*by_rank, strict=True):
        assert_same_result(plain, list(reports))
        assert [tuple(report.after.values()) for report in reports] == [
            # global rank, node, local rank, world size, stage
            (0, 0, 0, 3, 2),
            (1, 1, 0, 3, 1),
            (2, 1, 1, 3, 0),
        ]


@pytest.mark.parametrize(
    ("processes_by_node", "num_nodes", "message"),
    [
        ((1, 1), 1, "the processes run on 2 nodes, but the Trainer's num_nodes is 1"),
        ((2,), 2, "the processes run on 1 nodes, but the Trainer's num_nodes is 2"),
    ],
)
def test_another_number_of_nodes_ends_all(processes_by_node: tuple[int, ...], num_nodes: int, message: str) -> None:
    outcomes = run_processes_to_end(
        2, fit_twice, processes_by_node, False, num_nodes, initialize_process_group=False, timeout_s=40
    )
    for outcome in outcomes:
        assert f"ConfigurationError: {message}" in (outcome.traceback or ""), describe(outcomes)


def fit_with(devices: int, changes: dict[str, str], timeout_s: float) -> None:
    if os.environ["RANK"] == "1":
        os.environ.update(changes)
    trainer = quiet_trainer(AutoPipeStrategy(timeout=timeout_s), num_processes=devices)
    trainer.fit(seeded(MlpModule), datamodule=InOrder(regression_data(8), batch_size=4))


@pytest.mark.parametrize(
    ("num_processes", "devices", "changes", "message"),
    [
        (2, 4, {}, "the launcher started 2 processes, but the Trainer has 4 devices there: set devices=2"),
        (2, 2, {"WORLD_SIZE": "3"}, "world size is 3 for global rank 1"),
        (2, 2, {"LOCAL_RANK": "0"}, "2 processes of node 0 have the local ranks [0, 0]"),
    ],
)
def test_wrong_combinations_end_all(num_processes: int, devices: int, changes: dict[str, str], message: str) -> None:
    outcomes = run_processes_to_end(
        num_processes, fit_with, devices, changes, 10, initialize_process_group=False, timeout_s=40
    )
    assert all(outcome.exit_code == 1 for outcome in outcomes), describe(outcomes)
    for outcome in outcomes:
        assert message in (outcome.traceback or ""), describe(outcomes)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"RANK": "2", "LOCAL_RANK": "0"}, "global rank 2, but the world size is 2: set RANK"),
        ({"RANK": "1", "LOCAL_RANK": "2"}, "local rank 2 on node 0, but the Trainer has 2 devices there"),
    ],
)
def test_a_place_that_there_is_not_is_refused_by_the_trainer(
    told: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **told}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer("autopipe_h", num_processes=2)


def fit_in_wrong_world() -> None:
    os.environ["WORLD_SIZE"] = "3"
    trainer = quiet_trainer(AutoPipeStrategy(timeout=2), num_processes=1)
    trainer.fit(seeded(MlpModule), datamodule=InOrder(regression_data(8), batch_size=4))


def test_a_rank_that_never_starts_is_named_at_the_timeout() -> None:
    outcomes = run_processes_to_end(2, fit_in_wrong_world, initialize_process_group=False, timeout_s=40)
    for outcome in outcomes:
        assert "waited 2 s (timeout)" in (outcome.traceback or ""), describe(outcomes)
        assert "for global ranks [2] of 3, which did not come" in (outcome.traceback or ""), describe(outcomes)
