"""What a fit leaves open is searched before it begins, and the search leaves no trace."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_autopipe import ConfigurationError, PlanError
from lightning_autopipe.core import ClusterTopology, Device, DeviceMapping, Link, PipelinePlan, ScheduleSpec
from lightning_autopipe.strategy import AutoPipeStrategy, layout_search
from tests.harness import run_processes
from tests.strategy.modules import InOrder, MlpModule, regression_data
from tests.strategy.runs import Fit, Report, _run, assert_same_result, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

TWO_SERVERS = ClusterTopology(
    devices=tuple(
        Device(global_rank=rank, server=server, model="any", memory_bytes=2**40) for rank, server in enumerate("ABAB")
    ),
    links=tuple(Link(a=server, b="switch", bandwidth_bytes_per_s=2e4) for server in "AB"),
)
"""Links so slow that gradients are not summed over them, and that the pipeline crosses once."""
FIT = Fit(
    module_class=MlpModule,
    data=partial(InOrder, regression_data(16), regression_data(8, seed=1), batch_size=8),
    trainer_options={"max_epochs": 2, "num_sanity_val_steps": 1},
)


class Noise:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.generator.normal()) + torch.rand(())


class NoisyData(Dataset[Any]):
    def __init__(self) -> None:
        self.data = regression_data(16)
        self.transforms = [Noise()]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return self.transforms[0](x), y


class DrawingModule(MlpModule):
    """Draws from the global generators, and from its own, while it reads its data, and shuffles them."""

    def __init__(self) -> None:
        super().__init__()
        self.data = NoisyData()
        self.order = torch.Generator().manual_seed(4)

    def train_dataloader(self) -> Any:
        torch.rand(3)
        return DataLoader(self.data, batch_size=8, shuffle=True, generator=self.order)

    def configure_optimizers(self) -> Any:
        self.num_train_dataloaders = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class CountedOrder(Sampler[int]):
    """Another order in every epoch, by what it has counted itself."""

    num_epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.num_epochs += 1
        return iter(torch.randperm(9, generator=torch.Generator().manual_seed(self.num_epochs)).tolist())

    def __len__(self) -> int:
        return 9


class OneBatchModule(MlpModule):
    """Two replicas would have no whole batch each."""

    def __init__(self) -> None:
        super().__init__()
        self.order = CountedOrder()

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(9), batch_size=8, sampler=self.order, drop_last=True)


class LateModule(MlpModule):
    """Its step needs what a hook makes that runs after the search."""

    def on_fit_start(self) -> None:
        self.scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale * super().training_step(batch, batch_idx)


class Stream(IterableDataset[Any]):
    """Samples that can be read once."""

    def __init__(self) -> None:
        self.samples: Iterator[Any] = iter([])

    def __iter__(self) -> Iterator[Any]:
        return self.samples


class StreamModule(MlpModule):
    def train_dataloader(self) -> Any:
        stream = Stream()
        stream.samples = iter(list(regression_data(8)))
        return DataLoader(stream, batch_size=8)


def searched(fit: Fit, **options: Any) -> tuple[Report, PipelinePlan, list[str]]:
    """The fit as one rank, its plan, and what was warned of."""
    options = {"timeout": 30, "verify": False} | options
    plan = options.get("plan")
    num_replicas = plan.layout.num_replicas if plan is not None else options.get("num_replicas", 1)
    strategy = AutoPipeStrategy(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = _run(fit, strategy, num_processes=int(os.environ["WORLD_SIZE"]), num_replicas=num_replicas)
    assert strategy.plan is not None
    return report, strategy.plan, [str(warning.message) for warning in caught]


# Four processes ------------------------------------------------------------


def on_four_ranks() -> dict[str, tuple[Report, PipelinePlan, list[str]]]:
    results = {"searched": searched(FIT, cluster=TWO_SERVERS, num_replicas=1)}
    _, plan, _ = results["searched"]
    results["again"] = searched(FIT, plan=plan)
    deep = replace(plan, schedule=ScheduleSpec(name="1f1b", depths=(3, 3, 1, 0)), num_microbatches=8)
    results["deep"] = searched(FIT, plan=deep)
    by_two = replace(
        plan,
        partition=replace(plan.partition, cut_points=(2,)),
        mapping=DeviceMapping(stage_ranks=((1, 2), (0, 3))),
        schedule=ScheduleSpec(name="1f1b"),
        num_microbatches=2,
        stage_work_shares=(),
        stage_predictions=(),
        times=(),
    )
    results["2 x 2"] = searched(FIT, plan=by_two)
    return results


def test_a_mapped_pipeline_trains_like_one_device() -> None:
    """The launcher's order would cross the slow link three times; whatever a rank runs, the numbers are the same."""
    by_rank = run_processes(4, on_four_ranks, initialize_process_group=False, timeout_s=150)
    plain = fit_plain(FIT)
    for name in by_rank[0]:
        assert_same_result(plain, [results[name][0] for results in by_rank])
        assert len({results[name][1].to_json() for results in by_rank}) == 1
    plan = by_rank[0]["searched"][1]
    servers = [TWO_SERVERS.devices[rank].server for rank in plan.layout.pipeline_ranks(0)]
    assert plan.num_stages == 4
    assert sum(a != b for a, b in pairwise(servers)) == 1, servers
    assert plan.step_prediction is not None
    assert plan.runners_up
    again = by_rank[0]["again"]
    assert all(torch.equal(value, by_rank[0]["searched"][0].values[name]) for name, value in again[0].values.items())
    assert by_rank[0]["2 x 2"][1].layout.pipeline_ranks(1) == (2, 3)


# Two processes -------------------------------------------------------------


def fit_of(module_class: type[MlpModule], **changes: Any) -> Fit:
    return replace(FIT, module_class=module_class, **changes)


def no_data(num_replicas: int) -> Any:
    return None


STREAM_FIT = fit_of(StreamModule, data=no_data, trainer_options={"max_epochs": 1})


def on_two_ranks() -> dict[str, tuple[Report, PipelinePlan, list[str]]]:
    results = {}
    drawing = fit_of(DrawingModule, data=no_data)
    with mock.patch.object(layout_search, "search", wraps=layout_search.search) as spy:
        results["all open"] = searched(drawing)
        searched(FIT, num_stages=1, num_replicas=2)
        searched(FIT, num_stages=1, num_replicas=2, loss_over="batch")
        # What loaders of map-style data allow is searched, but not where batches are compared as a whole.
        equal_shares = [call.args[0].equal_shares for call in spy.call_args_list]
    assert equal_shares == ([] if os.environ["RANK"] != "0" else [False, False, True])
    _, plan, _ = results["all open"]
    results["as found"] = searched(drawing, plan=plan)
    results["one batch"] = searched(fit_of(OneBatchModule, data=no_data))
    results["late"] = searched(fit_of(LateModule))
    results["stream"] = searched(STREAM_FIT)
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple[Report, PipelinePlan, list[str]]]]:
    return run_processes(2, on_two_ranks, initialize_process_group=False, timeout_s=150)


def test_a_search_leaves_no_trace(two_ranks: list[Mapping[str, Any]]) -> None:
    """The same order of samples, draws and values as without a search."""
    for results in two_ranks:
        found, as_given = results["all open"][0], results["as found"][0]
        assert found.metrics == as_given.metrics
        assert all(torch.equal(value, as_given.values[name]) for name, value in found.values.items())
    layout = two_ranks[0]["all open"][1].layout
    assert layout.world_size == 2
    # Two batches of 8 for one replica, one for each of two.
    assert len(two_ranks[0]["all open"][0].gradients) == 2 * 2 // layout.num_replicas


def test_replicas_without_a_batch_are_not_planned_and_samplers_count_on(two_ranks: list[Mapping[str, Any]]) -> None:
    assert_same_result(
        fit_plain(fit_of(OneBatchModule, data=no_data)), [results["one batch"][0] for results in two_ranks]
    )
    assert two_ranks[0]["one batch"][1].num_stages == 2
    assert not [message for message in two_ranks[0]["one batch"][2] if "could not be searched" in message]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("late", "training_step raised AttributeError"), ("stream", "a stream")],
)
def test_what_cannot_be_searched_takes_the_defaults(two_ranks: list[Mapping[str, Any]], name: str, reason: str) -> None:
    report, plan, told = two_ranks[0][name]
    assert (plan.num_stages, plan.layout.num_replicas) == (2, 1)
    assert any(reason in message and "defaults are taken" in message for message in told), told
    plain = fit_plain(
        fit_of(StreamModule, data=no_data, trainer_options={"max_epochs": 1}) if name == "stream" else FIT
    )
    assert_same_result(plain, [results[name][0] for results in two_ranks])
    assert report.values.keys() == plain.values.keys()


# Refusals ------------------------------------------------------------------


def refused() -> list[str]:
    messages = []
    other = (
        Device(global_rank=0, server="a", model="some GPU", memory_bytes=2**30),
        Device(global_rank=1, server="a", model="some GPU", memory_bytes=2**30),
    )
    _, plan, _ = searched(FIT, num_stages=2, num_microbatches=2)
    for options in ({"plan": replace(plan, devices=other)}, {"cluster": TWO_SERVERS}, {"cluster": "no_such_cluster"}):
        with pytest.raises((PlanError, ConfigurationError)) as caught:
            searched(FIT, **options)
        messages.append(str(caught.value))
    return messages


def test_a_plan_for_other_devices_and_another_cluster_are_refused_on_every_rank() -> None:
    for messages in run_processes(2, refused, initialize_process_group=False, timeout_s=100):
        foreign, larger, missing = messages
        assert "the plan is for another cluster: global rank 0 is planned for 'some GPU'" in foreign
        assert "cluster= describes 4 devices, but 2 processes were started" in larger
        assert "no_such_cluster" in missing
