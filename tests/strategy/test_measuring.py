"""Measured profiles in the strategy: shared between ranks, and what happens when they cannot be had."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopipe.core import LayerMeasurement, LayerProfile, ModelProfile
from lightning_autopipe.core.layout import ParallelLayout
from lightning_autopipe.profiling import LayerShare, ProfilingError
from lightning_autopipe.runtime.pipeline import Pipeline
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.strategy import measuring
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.measuring import measured_profile
from tests.harness import run_processes
from tests.profiling.models import LOGGED, Restless, features
from tests.profiling.support import state_hash
from tests.strategy.modules import InOrder, MlpModule, regression_data
from tests.strategy.runs import Fit, fit_all_here

STEP = "training_step"
BATCH = (torch.ones(4, 8), 0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.activation: Any = torch.relu

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = self.activation(block(batch))
        return batch.pow(2).mean()


class OtherRanks:
    """A communicator of two ranks, of which this one is 0.

    The other one says `other(number of the message, what this one says)`.
    """

    def __init__(self, other: Any = lambda index, mine: mine) -> None:
        self.layout = ParallelLayout(num_stages=2, num_replicas=1)
        self.global_rank = 0
        self.told: list[Any] = []
        self._other = other

    def gather_in_pipeline(self, value: Any) -> list[Any]:
        self.told.append(value)
        return [("", None) if value[0] else self._other(len(self.told) - 1, value), value]

    def gather_over_replicas(self, value: Any) -> list[Any]:
        return [value]


def as_rank(global_rank: int, message: Any, **changes: Any) -> Any:
    """What another rank would say in the place of this one, to begin with."""
    return "", replace(message[1], global_rank=global_rank, **changes)


def is_member(message: Any) -> bool:
    return hasattr(message[1], "global_rank")


def a_pipeline(module: nn.Module) -> Pipeline:
    layout = ParallelLayout(num_stages=2, num_replicas=1)
    return Pipeline(
        module, layout=layout, global_rank=0, transport=None, num_microbatches=1, make_schedule=get_schedule
    )


def measure(
    pipeline: Any, profile: ModelProfile, ranks: Any, *, may_fail: bool = False, batch: Any = BATCH, **options: Any
) -> ModelProfile:
    options = {"num_microbatches": 2, **options}
    return measured_profile(
        pipeline, profile, ranks, step_name=STEP, args=batch, kwargs={}, may_fail=may_fail, **options
    )


def one_rank() -> Communicator:
    layout = ParallelLayout(num_stages=1, num_replicas=1)
    return Communicator(layout=layout, global_rank=0, device=torch.device("cpu"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_AUTOPIPE_CACHE", str(folder))
    return folder


@pytest.fixture
def measured_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that were measured, in this order."""
    found: list[int] = []

    class NotedShare(LayerShare):
        def __init__(
            self, trace: Any, table: Any, module: Any, step: Any, args: Any, *rest: Any, **options: Any
        ) -> None:
            found.append(len(args[0]))
            super().__init__(trace, table, module, step, args, *rest, **options)

    monkeypatch.setattr(measuring, "LayerShare", NotedShare)
    return found


THEIRS = LayerMeasurement(
    forward_s=1.0, backward_s=1.0, activation_bytes=0, peak_bytes=0, sent_bytes=7, gradient_bytes=7
)


def the_other_half(global_rank: int, message: Any) -> Any:
    """What another rank says that shares the work and has no files: to each message in turn."""
    _, told = message
    if is_member(message):
        return as_rank(global_rank, message)
    if not isinstance(told, dict):
        return "", told if isinstance(told, float) else None
    missing = {size: set(range(found.num_layers)) - set(found.layers) for size, found in told.items()}
    return "", {size: replace(told[size], layers=dict.fromkeys(missing[size], THEIRS)) for size in told}


def test_both_ranks_measurements_make_the_profile() -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})
    ranks = OtherRanks(lambda index, message: the_other_half(1, message))
    measured = measure(pipeline, profile, ranks)
    sent = [layer.measured.sent_bytes for layer in measured.layers if layer.measured]
    assert len(sent) == measured.num_layers
    assert 7 in sent
    assert set(sent) <= {7, 2 * 8 * 4, 0}  # two of four samples, or the end of the step
    assert len(set(sent)) > 1
    assert len(ranks.told) == 4  # who they are, what the first rank has on disk, that they can begin, what they found
    assert [(table.microbatch_size, len(table.forward_s)) for table in measured.times] == [(2, measured.num_layers)]
    assert measured.microbatch_size == 2
    assert pipeline.num_microbatches == 1
    assert not pipeline.tracing


def test_each_device_model_has_times_of_its_own() -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})

    def other(index: int, message: Any) -> Any:
        if is_member(message):
            return as_rank(1, message, device_model="another")
        if not isinstance(message[1], dict):
            return message
        (found,) = message[1].values()
        assert len(found.layers) == found.num_layers  # nobody shares the work
        return "", {2: replace(found, layers=dict.fromkeys(found.layers, THEIRS))}

    measured = measure(pipeline, profile, OtherRanks(other))
    own, theirs = measured.times
    assert theirs.device_model == "another" != own.device_model
    assert set(theirs.forward_s) == {1.0} != set(own.forward_s)
    assert own.dtype == theirs.dtype == "float32"
    # Devices of no known model count as rank 0's.
    assert all(layer.measured is not None and layer.measured.sent_bytes != 7 for layer in measured.layers)


@pytest.mark.parametrize("may_fail", [True, False])
def test_a_rank_that_fails_before_it_measures_tells_the_others(may_fail: bool) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("no room")

    pipeline = SimpleNamespace(
        module=Net(),
        device=torch.device("cpu"),
        silent=contextlib.nullcontext,
        planned_step=SimpleNamespace(capture_microbatch=fail),
    )
    profile = ModelProfile(layers=(LayerProfile(name="a", forward_flops=1.0),))
    ranks = OtherRanks()
    if may_fail:
        with pytest.warns(UserWarning, match=r"no room. Stages are balanced by counted .* profile='flops'"):
            assert measure(pipeline, profile, ranks, may_fail=True) is profile
    else:
        with pytest.raises(ProfilingError, match="no room"):
            measure(pipeline, profile, ranks, may_fail=False)
    assert ranks.told == [("MemoryError: no room", None)]


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_when_another_rank_fails_all_count_operations(when: int) -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})

    def other(index: int, message: Any) -> Any:
        if index == when:
            return "no kernel", None
        return as_rank(1, message) if is_member(message) else message

    ranks = OtherRanks(other)
    with pytest.warns(UserWarning, match="no kernel"):
        assert measure(pipeline, profile, ranks, may_fail=True) is profile
    assert len(ranks.told) == when + 1


BATCH_16 = (torch.ones(16, 8), 0)


def profiled(**options: Any) -> ModelProfile:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH_16, {})
    return measure(pipeline, profile, one_rank(), **{"batch": BATCH_16, "num_microbatches": 4, **options})


def test_several_sizes_are_measured_where_there_is_a_choice(measured_sizes: list[int]) -> None:
    measured = profiled(sizes=None)
    assert measured_sizes == [4, 2, 8, 1, 16]
    assert [table.microbatch_size for table in measured.times] == [1, 2, 4, 8, 16]
    assert measured.microbatch_size == 4
    assert [sized.microbatch_size for sized in measured.other_sizes] == [1, 2, 8, 16]
    assert [sized.layers[0].sent_bytes for sized in measured.other_sizes] == [size * 32 for size in (1, 2, 8, 16)]
    assert all(value.fixed_forward_bytes == 0 for value in measured.values)
    assert len(measured.values) == measured.num_layers - 1


def test_sizes_can_be_named(measured_sizes: list[int]) -> None:
    profiled(sizes=[8, 4])
    assert measured_sizes == [4, 8]


def share_without_room(size: int, when: str) -> type[LayerShare]:
    """Cannot be made for, or not run on, micro-batches of so many samples."""

    class SmallShare(LayerShare):
        size = 0
        is_warm = False

        def __init__(
            self, trace: Any, table: Any, module: Any, step: Any, args: Any, *rest: Any, **options: Any
        ) -> None:
            self.size = len(args[0])
            self.refuse_at("__init__")
            super().__init__(trace, table, module, step, args, *rest, **options)
            self.is_warm = True

        def run_round(self) -> None:
            if self.is_warm:
                self.refuse_at("run_round")
            super().run_round()

        def refuse_at(self, place: str) -> None:
            if place == when and self.size == size:
                raise torch.OutOfMemoryError(f"{size} samples are too many")

    return SmallShare


@pytest.mark.parametrize("when", ["__init__", "run_round"])
def test_a_size_that_cannot_be_run_is_left_out(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring, "LayerShare", share_without_room(8, when))
    with caplog.at_level("INFO", logger=measuring.__name__):
        measured = profiled(sizes=[8, 2])
    assert [table.microbatch_size for table in measured.times] == [2, 4]
    assert "8 samples are left out of the profile" in caplog.text
    assert "8 samples are too many" in caplog.text


@pytest.mark.parametrize("when", ["__init__", "run_round"])
def test_without_the_size_in_use_there_is_no_profile(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "LayerShare", share_without_room(4, when))
    with pytest.raises(ProfilingError, match="one by one: OutOfMemoryError: 4 samples are too many"):
        profiled(sizes=[8, 2])


def test_the_second_time_it_is_read_from_disk(cache: Path, measured_sizes: list[int]) -> None:
    first = profiled(sizes=[2])
    assert measured_sizes == [4, 2]
    assert profiled(sizes=[2]) == first
    assert measured_sizes == [4, 2]
    assert len(list(cache.iterdir())) == 1
    assert ModelProfile.load(next(cache.iterdir())) == first


@pytest.mark.parametrize(
    "change", ["sizes", "batch", "microbatches", "frozen", "activation", "optimizer", "autocast", "threads"]
)
def test_what_measurements_depend_on_is_in_the_key(
    change: str, cache: Path, measured_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(changed: bool) -> None:
        module = Net()
        if changed and change == "activation":
            module.activation = torch.tanh
        if changed and change == "frozen":
            module.blocks[0].requires_grad_(False)
        batch = (torch.ones(24 if changed and change == "batch" else 16, 8), 0)
        options: dict[str, Any] = {"sizes": [2] if changed and change == "sizes" else ()}
        options["num_microbatches"] = 2 if changed and change == "microbatches" else 4
        if changed and change == "optimizer":
            options["optimizers"] = [torch.optim.SGD(module.parameters(), lr=0.1)]
        if changed and change == "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        with torch.autocast("cpu", torch.bfloat16, enabled=changed and change == "autocast"):
            pipeline = a_pipeline(module)
            measure(pipeline, pipeline.profile(STEP, batch, {}), one_rank(), batch=batch, **options)

    for changed in (False, True, False, True):
        run(changed)
    assert len(list(cache.iterdir())) == 2
    assert len(measured_sizes) == (3 if change == "sizes" else 2)


@pytest.mark.parametrize("damage", ["damaged", "foreign"])
def test_a_file_that_cannot_be_used_is_measured_again(cache: Path, measured_sizes: list[int], damage: str) -> None:
    first = profiled()
    (path,) = cache.iterdir()
    if damage == "damaged":
        path.write_text(path.read_text()[:-9])
    else:
        replace(first, layers=tuple(replace(layer, name="x") for layer in first.layers)).save(path)
    with pytest.warns(UserWarning, match=r"profile file .*\.json.* the layers are measured again"):
        profiled()
    assert len(measured_sizes) == 2
    profiled()
    assert len(measured_sizes) == 2


def test_the_first_rank_decides_whether_it_is_known(cache: Path, measured_sizes: list[int]) -> None:
    """A rank that finds nothing itself takes what the first one has read."""
    known = profiled()

    def other(index: int, message: Any) -> Any:
        return as_rank(0, message) if is_member(message) else ("", known)

    ranks = OtherRanks(other)
    ranks.global_rank = 1
    pipeline = a_pipeline(Net())
    assert measure(pipeline, pipeline.profile(STEP, BATCH, {}), ranks) == known
    assert len(measured_sizes) == 1
    assert len(list(cache.iterdir())) == 1


def test_what_only_another_rank_has_on_disk_does_not_count(cache: Path, measured_sizes: list[int]) -> None:
    pipeline = a_pipeline(Net())
    profile = pipeline.profile(STEP, BATCH, {})
    measure(pipeline, profile, OtherRanks(lambda index, message: the_other_half(1, message)))
    assert len(list(cache.iterdir())) == 1
    ranks = OtherRanks(lambda index, message: the_other_half(0, message))
    ranks.global_rank = 1
    measure(pipeline, profile, ranks)
    assert measured_sizes == [2, 2]
    ranks = OtherRanks(lambda index, message: the_other_half(1, message))
    measure(pipeline, profile, ranks)
    assert measured_sizes == [2, 2]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_AUTOPIPE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept for the next run: .* LIGHTNING_AUTOPIPE_CACHE"):
        assert profiled().times


def test_optimizers_are_tried_on_copies() -> None:
    module = Net()
    module.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.1)
    pipeline = a_pipeline(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    measured = measure(
        pipeline, pipeline.profile(STEP, BATCH_16, {}), one_rank(), batch=BATCH_16, optimizers=[optimizer]
    )
    assert not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert [layer.optimizer_bytes for layer in measured.layers] == [
        2 * layer.trainable_bytes for layer in measured.layers
    ]
    seconds = measured.times[0].optimizer_s
    assert len(seconds) == measured.num_layers
    assert seconds[0] == 0.0


def test_everything_is_as_before() -> None:
    LOGGED.clear()
    module, batch = Restless(), features()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    optimizer = torch.optim.Adam(module.parameters())
    pipeline = a_pipeline(module)
    profile = pipeline.profile(STEP, (batch, 0), {})
    before = state_hash(module, batch)
    measured = measure(pipeline, profile, one_rank(), batch=(batch, 0), sizes=None, optimizers=[optimizer])
    assert [table.microbatch_size for table in measured.times] == [2, 4, 8]  # one sample has no statistics
    assert state_hash(module, batch) == before
    assert not optimizer.state
    assert not LOGGED


def profile_text(trainer: Any, module: Any) -> str:
    return str(trainer.strategy.profile.to_json())


def test_processes_end_with_one_profile_which_the_next_run_has_as_well(tmp_path: Path) -> None:
    fit = Fit(
        module_class=MlpModule,
        data=partial(InOrder, regression_data(8), batch_size=8),
        strategy_options={"profile": "measured"},
        after=profile_text,
    )
    by_rank = run_processes(
        2,
        fit_all_here,
        {"first": fit, "second": fit},
        2,
        1,
        initialize_process_group=False,
        environment={"LIGHTNING_AUTOPIPE_CACHE": str(tmp_path)},
        timeout_s=100.0,
    )
    texts = {report.after for reports in by_rank for report in reports.values()}
    assert len(texts) == 1
    profile = ModelProfile.from_json(texts.pop())
    assert [table.microbatch_size for table in profile.times] == [2]
    assert all(layer.optimizer_bytes == 0 for layer in profile.layers)  # SGD
    assert [ModelProfile.load(path) for path in tmp_path.iterdir()] == [profile]
