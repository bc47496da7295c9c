"""Replicas with unlike numbers of micro-batches: which samples each takes; the numbers are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from lightning_autopipe.core.errors import ConfigurationError
from lightning_autopipe.core.mapping import DeviceMapping
from lightning_autopipe.core.partition import Partition
from lightning_autopipe.core.plan import PipelinePlan
from lightning_autopipe.core.schedule_spec import ScheduleSpec
from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.replica_shares import dealt, share_samples
from tests.harness import run_processes
from tests.strategy.modules import InOrder, LanguageModule, MlpModule, regression_data, token_data
from tests.strategy.runs import Fit, Report, _run, assert_same_result, fit_plain

pytestmark = pytest.mark.filterwarnings("ignore")

DATA: Any = list(range(100, 138))


@pytest.mark.parametrize(
    ("num_samples", "microbatches", "expected"),
    [
        (24, (8, 4), (16, 8)),
        (16, (2, 1), (11, 5)),
        (4, (8, 4), (3, 1)),
        (2, (8, 4), (1, 1)),
        (6, (1, 3, 8), (1, 1, 4)),
        (36, (1, 3, 8), (3, 9, 24)),
        (9, (1, 1), (5, 4)),
    ],
)
def test_shares_are_as_even_by_microbatch_as_they_can_be(
    num_samples: int, microbatches: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert share_samples(num_samples, microbatches) == expected


def loaders(
    microbatches: tuple[int, ...], *, num_samples: int = len(DATA), shuffle: bool = False, **options: Any
) -> Any:
    """What Lightning prepares for each replica, and the same dealt."""
    found = []
    for index in range(len(microbatches)):
        sampler: DistributedSampler[Any] = DistributedSampler(
            DATA[:num_samples], num_replicas=len(microbatches), rank=index, shuffle=shuffle
        )
        loader = DataLoader(DATA[:num_samples], batch_size=4, sampler=sampler, **options)
        found.append((loader, dealt(loader, replica_microbatches=microbatches, replica_index=index)))
    return found


def steps(loaders: list[Any]) -> list[list[int]]:
    """The samples of each step over all replicas."""
    batches = [[batch.tolist() for batch in loader] for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(batches[0])] * len(loaders)
    return [[sample for part in parts for sample in part] for parts in zip(*batches, strict=True)]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": True}, {"num_samples": 37}], ids=str)
@pytest.mark.parametrize("microbatches", [(2, 1), (1, 2, 3)])
def test_each_step_has_the_samples_that_equal_replicas_have(
    microbatches: tuple[int, ...], options: dict[str, Any]
) -> None:
    both = loaders(microbatches, **options)
    orders = []
    for epoch in range(2):
        for equal, own in both:
            equal.sampler.set_epoch(epoch)
            assert own.sampler is equal.sampler
        expected = steps([equal for equal, _ in both])
        found = steps([own for _, own in both])
        assert [sorted(step) for step in found] == [sorted(step) for step in expected]
        orders.append([sample for step in found for sample in step])
    if options.get("shuffle"):
        assert orders[0] != orders[1]
    else:  # in the order in which one device reads them
        assert orders[0][:32] == DATA[:32]
    sizes = [len(batch) for _, own in both for batch in [next(iter(own))]]
    assert sizes == list(share_samples(4 * len(microbatches), microbatches))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class OwnBatches(BatchSampler):
    pass


def sampler(num_replicas: int = 2) -> Any:
    return DistributedSampler(DATA, num_replicas=num_replicas, rank=0)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([[1], [2]], "come from a list"),
        (DataLoader(Stream(), batch_size=4), "Stream is a stream"),
        (DataLoader(DATA, batch_sampler=OwnBatches(sampler(), 4, False)), r"own batch sampler \(OwnBatches\)"),
        (DataLoader(DATA, batch_size=None, sampler=sampler()), "does not batch samples"),
        (DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)), r"sampler \(RandomSampler\) does not share"),
        (DataLoader(DATA, batch_size=4, sampler=sampler(4)), "between 4 replicas, not 2"),
    ],
)
def test_what_cannot_be_dealt_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"unlike numbers of micro-batches \(\(2, 1\)\).*{message}.*num_micro"
    ):
        dealt(loader, replica_microbatches=(2, 1), replica_index=0)


# In real processes -----------------------------------------------------------------------------------


def taken(trainer: Any, module: Any) -> Any:
    """This replica's number of micro-batches, and the samples of each of its batches."""
    if not isinstance(trainer.strategy, AutoPipeStrategy):
        return None
    (loader,) = trainer.fit_loop._combined_loader.flattened
    return trainer.strategy.session.pipeline.num_microbatches, [len(indices) for indices in loader.batch_sampler]


FITS = {
    "samples": Fit(
        module_class=MlpModule,
        module_options={"optimizer": "adamw", "lr": 0.05},
        data=partial(InOrder, regression_data(38), regression_data(8, seed=1), batch_size=12, val_batch_size=4),
        after=taken,
    ),
    "tokens": Fit(
        module_class=LanguageModule,
        module_options={"optimizer": "adamw", "lr": 0.05},
        data=partial(InOrder, token_data(36, valid=[1, 5, 7, 0, 3, 2, 0, 4, 6]), batch_size=12),
        trainer_options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
}


def fits_by_plan(fits: dict[str, Fit], plans: dict[str, PipelinePlan]) -> dict[str, Report]:
    return {
        name: _run(
            fit,
            AutoPipeStrategy(plan=plans[name], timeout=30, verify=False),
            num_processes=plans[name].layout.world_size,
            num_replicas=plans[name].layout.num_replicas,
        )
        for name, fit in fits.items()
    }


def planned(fit: Fit, num_stages: int, replica_microbatches: tuple[int, ...]) -> PipelinePlan:
    """A plan for two replicas, with the layers that a run in this process finds."""
    strategy = AutoPipeStrategy(num_stages=1, num_microbatches=1, profile="flops", verify=False)
    _run(replace(fit, trainer_options={"max_steps": 1}), strategy, num_processes=1, num_replicas=1)
    found = strategy.plan
    assert found is not None
    num_layers, num_replicas = len(found.layers), len(replica_microbatches)
    cuts = tuple(round(num_layers * stage / num_stages) for stage in range(1, num_stages))
    return PipelinePlan(
        module_fingerprint=found.module_fingerprint,
        layers=found.layers,
        partition=Partition(num_layers=num_layers, cut_points=cuts),
        mapping=DeviceMapping(
            stage_ranks=tuple(
                tuple(replica * num_stages + num_stages - 1 - stage for replica in range(num_replicas))
                for stage in range(num_stages)
            )
        ),
        schedule=ScheduleSpec(name="1f1b"),
        num_microbatches=max(replica_microbatches),
        replica_microbatches=replica_microbatches,
    )


@pytest.fixture(scope="module")
def plain() -> dict[str, Report]:
    return {name: fit_plain(fit) for name, fit in FITS.items()}


@pytest.mark.parametrize(("num_stages", "microbatches"), [(1, (2, 1)), (2, (1, 3))])
def test_unlike_replicas_give_the_numbers_of_one_device(
    plain: dict[str, Report], num_stages: int, microbatches: tuple[int, int]
) -> None:
    plans = {name: planned(fit, num_stages, microbatches) for name, fit in FITS.items()}
    by_rank = run_processes(2 * num_stages, fits_by_plan, FITS, plans, initialize_process_group=False, timeout_s=100.0)
    for name in FITS:
        assert_same_result(plain[name], [reports[name] for reports in by_rank])
    sizes = {2: [8, 8, 8, 1], 1: [4, 4, 4, 1] if microbatches == (2, 1) else [3, 3, 3, 1], 3: [9, 9, 9, 1]}
    expected = [(number, sizes[number]) for number in microbatches for _ in range(num_stages)]
    assert [reports["samples"].after for reports in by_rank] == expected
