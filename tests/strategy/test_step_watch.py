from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_autopipe.cli.main import main
from lightning_autopipe.core import Action, ConfigurationError, ParallelLayout, PipelinePlan, StepEnd
from lightning_autopipe.core.stage_times import StageTimes
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.plan_step import plan_step
from lightning_autopipe.planner.replanning import planned_stage_times
from lightning_autopipe.runtime.timeline_recorder import Ran, RankStep
from lightning_autopipe.strategy import AutoPipeStrategy
from lightning_autopipe.strategy.communicator import Communicator
from lightning_autopipe.strategy.figure_log import FigureLog, RankFigures, peak_memory_bytes, summary
from lightning_autopipe.strategy.replanning import NUM_STEPS, ReplanningWatch
from lightning_autopipe.strategy.step_watch import StepWatch, WatchedStep
from tests.planner.test_plan_step import a_plan

from .modules import InOrder, MlpModule, quiet_trainer, regression_data, seeded
from .runs import Fit, Report, fit_in_processes

CPU = torch.device("cpu")


def a_communicator(global_rank: int, num_stages: int = 2, num_replicas: int = 1) -> Communicator:
    layout = ParallelLayout(num_stages=num_stages, num_replicas=num_replicas)
    return Communicator(layout=layout, global_rank=global_rank, device=CPU)


# Readers --------------------------------------------------------------------


class Diary:
    """A reader that writes down what it is told."""

    def __init__(self, note: Any = None) -> None:
        self.told: list[Any] = []
        self._note = note

    def before_step(self, number: int) -> None:
        self.told.append(("before", number))

    def after_step(self, watched: WatchedStep) -> None:
        ran = [str(what) for what, *_ in watched.step.ran]
        self.told.append(("after", watched.number, watched.num_samples, watched.sent_bytes, ran))

    def note(self) -> Any:
        return self._note

    def take(self, notes: list[Any]) -> None:
        self.told.append(("take", notes))

    def end(self) -> None:
        self.told.append("end")


def test_a_step_ends_when_the_next_one_begins_or_the_fit() -> None:
    silent, talking = Diary(), Diary("hello")
    sent = iter([(10, 20), (15, 20), (100, 100), (101, 103)])
    watch = StepWatch([silent, talking], sent_bytes=sent.__next__)
    for num_samples in (6, 4):
        watch.begin_step()
        watch.recorder.ran(Action.parse("0F0"), 0.0, 0.0, 1.0)
        watch.schedule_ended(num_samples=num_samples, has_ties=num_samples == 6)
        watch.take([watch.notes, [None, "of another rank"]])
    watch.end()
    assert watch.notes == [None, "hello"]
    assert silent.told == [
        ("before", 1),
        ("take", []),
        ("after", 1, 6, (5, 0), ["0F0", "tied gradients"]),
        ("before", 2),
        ("take", []),
        ("after", 2, 4, (1, 3), ["0F0"]),
        "end",
    ]
    assert talking.told[1] == ("take", ["hello", "of another rank"])


def test_a_call_that_runs_nothing_is_no_step() -> None:
    diary = Diary("hello")
    watch = StepWatch([diary])
    for _ in range(3):
        watch.begin_step()  # a batch of an accumulation window that is kept for its last one
    watch.recorder.ran(Action.parse("0F0"), 0.0, 0.0, 1.0)
    assert watch.notes == ["hello"]
    watch.begin_step()
    watch.end()
    assert diary.told == [("before", 1), ("after", 1, 0, (0, 0), ["0F0"]), ("before", 2), "end"]


def test_nothing_travels_where_nobody_has_anything_to_tell() -> None:
    watch = StepWatch([Diary(), Diary()])
    watch.begin_step()
    assert watch.notes == []
    watch.take([[], []])


# Figures --------------------------------------------------------------------


class Logger:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((metrics, step))


def a_trainer(loggers: Sequence[Logger] = (), every: int = 2) -> Any:
    epoch_loop = SimpleNamespace(_batches_that_stepped=0)
    return SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=epoch_loop), log_every_n_steps=every, loggers=list(loggers)
    )


def watched(number: int, ran: Sequence[Ran], num_samples: int = 4, begin_s: float = 0.0) -> WatchedStep:
    return WatchedStep(number=number, step=RankStep(begin_s=begin_s, ran=tuple(ran)), num_samples=num_samples)


def test_figures_are_told_at_the_trainers_interval_once_each_and_logged_on_rank_0() -> None:
    loggers = [Logger(), Logger()]
    trainer = a_trainer(loggers)
    log, other = (FigureLog(trainer, a_communicator(rank), CPU) for rank in range(2))
    ran: list[Ran] = [(Action.parse("1F0"), 0.0, 1.0, 2.0), (StepEnd.EXCHANGE, 2.0, 2.0, 4.0)]
    assert log.note() is None, "nothing has run"
    for number in (1, 2, 3):
        log.after_step(replace(watched(number, ran), sent_bytes=(0, 100 * number)))
        other.after_step(watched(number, ran[:1]))
        trainer.fit_loop.epoch_loop._batches_that_stepped = number
        note, others = log.note(), other.note()
        assert (note is None) == (others is None) == (number != 2)
        assert log.note() is None, "an interval is told once"
        other.take([others] if others else [])
        log.take([note, others] if note and others else [])
    (metrics, step), *more = loggers[0].logged
    assert loggers[1].logged == loggers[0].logged
    assert (more, step) == ([], 1)
    # Steps of 4 and 2 s in which each rank computes for one; four samples each.
    assert metrics.pop("autopipe/bubble_fraction") == pytest.approx(1 - 1 / 3)
    assert metrics.pop("autopipe/step_s") == pytest.approx(3.0)
    assert metrics.pop("autopipe/samples_per_s") == pytest.approx(4 / 3)
    assert metrics.pop("autopipe/sent_bytes/stage_1_to_0") == 150
    assert set(metrics) == {"autopipe/peak_memory_bytes/stage_0", "autopipe/peak_memory_bytes/stage_1"}
    assert all(value > 1 << 20 for value in metrics.values())


def test_figures_of_replicas_are_joined() -> None:
    communicator = a_communicator(0, num_replicas=2)
    figures = [
        RankFigures(
            global_rank=rank,
            num_steps=2,
            num_samples=10 + rank,
            step_s=4.0,
            busy_s=1.0 + rank,
            peak_memory_bytes=100 * rank,
            sent_forward_bytes=6 if rank in (1, 3) else 0,
        )
        for rank in range(4)
    ]
    assert summary(figures, communicator) == {
        "autopipe/bubble_fraction": pytest.approx(1 - 2.5 / 4),
        "autopipe/step_s": 2.0,
        "autopipe/samples_per_s": pytest.approx((11 + 13) / 4.0),
        "autopipe/peak_memory_bytes/stage_0": 300.0,
        "autopipe/peak_memory_bytes/stage_1": 200.0,
        "autopipe/sent_bytes/stage_0_to_1": 6.0,
    }


def test_two_ranks_in_a_circle_send_both_kinds_to_each_other() -> None:
    figures = [
        RankFigures(
            global_rank=rank,
            num_steps=1,
            num_samples=1,
            step_s=1.0,
            busy_s=1.0,
            peak_memory_bytes=0,
            sent_forward_bytes=30 + rank,
            sent_backward_bytes=200,
        )
        for rank in range(2)
    ]
    metrics = summary(figures, a_communicator(0))
    assert metrics["autopipe/sent_bytes/stage_0_to_1"] == 231
    assert metrics["autopipe/sent_bytes/stage_1_to_0"] == 230


def test_memory_on_the_cpu_is_that_of_the_process() -> None:
    before = peak_memory_bytes(CPU)
    block = torch.ones(1 << 26)
    assert peak_memory_bytes(CPU) >= before > 1 << 20
    assert float(block[-1]) == 1.0


# Replanning -----------------------------------------------------------------


class Watched:
    """The watches of a two-stage plan's ranks, fed with steps."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.ranks = [ReplanningWatch(a_communicator(rank), lambda: plan, None) for rank in range(2)]
        self.planned = planned_stage_times(plan)

    def run(self, *factors: float, num_samples: int = 3, num_steps: int = NUM_STEPS) -> int:
        """Steps with stages so many times as slow as planned; gives how many ranks had something to tell."""
        for number in range(1, num_steps + 1):
            for times in self.planned:
                slow = factors[times.stage_index]
                if number == 7:
                    slow *= 50  # what one step takes does not count
                ran: list[Ran] = [
                    (Action.parse(f"{times.stage_index}F0"), 0.0, 1.0, 1.0 + slow * times.forward_s),
                    (Action.parse(f"{times.stage_index}B0"), 5.0, 6.0, 6.0 + slow * times.backward_s),
                ]
                self.ranks[times.global_rank].after_step(watched(number, ran, num_samples))
        notes = [note for note in (rank.note() for rank in self.ranks) if note is not None]
        for rank in self.ranks:
            rank.take(notes)
        return len(notes)


@pytest.fixture
def run() -> Watched:
    return Watched(replace(a_plan(6), microbatch_size=1.0))


def test_a_slow_stage_is_told_once_with_what_a_new_plan_gains(run: Watched) -> None:
    message = (
        r"stage 1 \(global rank 0\) takes 50 % longer than planned: 540 ms instead of 360 ms .* a step takes \d+ ms; "
        r"with partition=\[4\] it would take \d+ ms \(\d+ % less\)"
    )
    with pytest.warns(UserWarning, match=message):
        assert run.run(1.0, 1.5) == 2
    run.run(1.0, 1.5)
    run.run(1.05, 1.45)
    run.run(1.0, 1.0)  # as planned again
    run.run(1.0, 1.5)  # what there is to gain was told
    run.run(1.0, 2.5)
    with pytest.warns(UserWarning, match=r"stage 0 .* takes 100 % longer .*with partition=\[2\]"):
        run.run(2.0, 1.0)
    with pytest.warns(UserWarning, match=r"takes 100 % longer .*no other cut is notably faster"):
        run.run(2.0, 2.0)
    run.run(1.0, 1.0)
    run.run(2.0, 2.0)


def test_ranks_that_come_to_their_medians_in_different_steps_are_judged_together(run: Watched) -> None:
    slow = [replace(times, forward_s=2 * times.forward_s) for times in run.planned]
    run.ranks[0].take([(slow[0],)])
    with pytest.warns(UserWarning, match="takes 25 % longer"):
        run.ranks[0].take([(run.planned[1],)])


def test_what_is_about_as_planned_is_not_told(run: Watched) -> None:
    assert run.run(1.15, 0.85) == 2


def test_what_cannot_be_helped_is_told_as_such(run: Watched) -> None:
    with pytest.warns(UserWarning, match=r"takes 100 % longer .*no other cut is notably faster"):
        run.run(2.0, 2.0)


def test_steps_of_other_sizes_do_not_count(run: Watched) -> None:
    assert run.run(1.0, 2.0, num_samples=9) == 0


def test_an_error_ends_the_watch_and_nothing_else(run: Watched, caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = [StageTimes(global_rank=0, stage_index=0, forward_s=1.0, backward_s=1.0), None]
    run.ranks[0].take([broken])
    assert "stage times cannot be compared with the plan: AttributeError" in caplog.text
    run.run(1.0, 3.0)


# A real run -----------------------------------------------------------------


def _without_observer(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    strategy: Any = trainer.strategy
    return strategy.session.pipeline.observer, strategy.session.training.watch


def test_a_fit_writes_a_trace_and_logs_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "trace"
    traced = Fit(
        module_class=MlpModule,
        data=partial(InOrder, regression_data(72), regression_data(16, seed=1), batch_size=8),
        strategy_options={"trace": str(folder), "profile": "measured", "num_microbatches": 4},
        trainer_options={"log_every_n_steps": 4, "limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 1},
        logger=partial(CSVLogger, str(tmp_path), name="", version="log"),
        after=_without_observer,
    )
    reports: list[Report] = fit_in_processes({"traced": traced}, num_stages=2)["traced"]
    assert [report.after for report in reports] == [(None, None)] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "timeline.svg", "trace.json"]
    document = json.loads((folder / "trace.json").read_text())
    assert list(document["otherData"]["timelines"]) == ["predicted", "step 5", "step 6", "step 7"]
    plan = PipelinePlan.load(folder / "plan.json")
    expected = {str(event.action) for event in simulate(plan_step(plan)).events}
    names = {
        event["args"]["name"]: event["pid"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    for step in ("step 5", "step 6", "step 7"):
        pid = names[f"{step} · replica 0"]
        found = [event["name"] for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] == pid]
        # Messages need time only with links, which this plan has none of.
        assert expected - {"gradients"} <= set(found) | {"tied gradients"}
        assert {"exchange", "optimizer"} <= set(found)
        assert sum(name == "0F0" for name in found) == 1, "validation in between does not count"
    table = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    for name in ("bubble_fraction", "step_s", "samples_per_s", "peak_memory_bytes/stage_0"):
        assert f"autopipe/{name}" in table[0]
    # Of each of the batch's 8 samples a vector of 8 float64, and its gradient.
    for name in ("autopipe/sent_bytes/stage_0_to_1", "autopipe/sent_bytes/stage_1_to_0"):
        assert {_value(table, line, name) for line in table[1:]} == {"", "512.0"}
    assert sum(line.count(",") > 0 and _value(table, line, "autopipe/step_s") != "" for line in table[1:]) == 2
    assert main(["trace", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "predicted: " in shown
    assert "step 6: " in shown
    assert "clocks of ranks agree to" in shown


def _value(table: list[str], line: str, name: str) -> str:
    return line.split(",")[table[0].split(",").index(name)]


def test_a_fit_that_ends_too_early_says_so_and_one_within_the_window_writes_what_there_is(tmp_path: Path) -> None:
    for num_batches, folder in ((3, tmp_path / "none"), (6, tmp_path / "two")):
        strategy = AutoPipeStrategy(trace=folder, num_microbatches=2, replan=False)
        trainer = quiet_trainer(strategy, num_processes=1, limit_train_batches=num_batches, max_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(seeded(MlpModule), datamodule=InOrder(regression_data(64), batch_size=8))
        told = [str(warning.message) for warning in caught if "no trace is written" in str(warning.message)]
        assert len(told) == (num_batches == 3)
        assert (folder / "trace.json").exists() == (num_batches == 6)
    document = json.loads((tmp_path / "two" / "trace.json").read_text())
    assert list(document["otherData"]["timelines"]) == ["step 5", "step 6"]
    assert document["otherData"]["ranks"][0]["predicted_idle_s"] is None


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"trace=.* must be a folder that global rank 0 can write to"):
        quiet_trainer(AutoPipeStrategy(trace=tmp_path / "file" / "trace"), num_processes=1)


@pytest.mark.filterwarnings("ignore")
def test_without_trace_and_measured_times_nobody_watches() -> None:
    strategy = AutoPipeStrategy(num_microbatches=2, profile="flops")
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append((strategy.session.training.watch, strategy.session.pipeline.observer))

    trainer = quiet_trainer(strategy, num_processes=1, max_steps=2, callbacks=[Look()])
    trainer.fit(seeded(MlpModule), datamodule=InOrder(regression_data(64), batch_size=8))
    assert seen == [(None, None)] * 2


@pytest.mark.parametrize("content", [None, "{}", '{"otherData": {}}', "no json"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "trace.json").write_text(content)
    assert main(["trace", str(tmp_path)]) == 2
    assert "trace.json: " in capsys.readouterr().err
