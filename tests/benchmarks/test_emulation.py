"""Sleeping layers on the real runtime, and servers made of network namespaces."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measured_mapping, prediction
from benchmarks.emulation import SleepingRun, layout_of, run_sleeping
from benchmarks.namespaces import INTERFACE, NamespacesUnavailableError, two_servers
from benchmarks.reporting import SKIPPED_STATUS
from lightning_autopipe.planner.simulator import simulate
from lightning_autopipe.planner.workload import StageWork, StepWork, UnitWork
from lightning_autopipe.schedules import one_f_one_b

RUN = Path("/run/netns")


def a_step(ranks: tuple[tuple[int, ...], ...] = ()) -> StepWork:
    """Two stages and two replicas that sleep some milliseconds."""
    unit = UnitWork(forward_s=0.002, backward_s=0.003, sent_bytes=4000, gradient_bytes=4000)
    stage = StageWork(units=(unit,), optimizer_s=0.001, reduced_bytes=400)
    stages = (stage, replace(stage, units=(replace(unit, forward_s=0.004),)))
    return StepWork(stages=(stages, stages), schedules=(one_f_one_b(2, 3, (2, 0)),) * 2, ranks=ranks)


def test_steps_run_on_the_ranks_that_they_name_and_take_at_least_their_sleeps() -> None:
    mapped = a_step(((2, 0), (1, 3)))
    assert layout_of(mapped).pipeline_ranks(0) == (2, 0)
    run = SleepingRun(
        steps=(a_step(), mapped), servers=("here",) * 4, num_rounds=2, num_repeats=2, links_budget_s=0.0, timeout_s=20.0
    )
    measured = run_sleeping(run, limit_s=50.0)
    assert measured.links == ()
    for step, of_step in zip(run.steps, measured.steps, strict=True):
        assert len(of_step.seconds) == 4
        assert min(of_step.seconds) >= simulate(step).step_s
        assert of_step.priced.list_ranks == step.list_ranks
        assert of_step.priced.exchange_s > 0
        for stages in of_step.priced.stages:
            first, last = (stage.units[0] for stage in stages)
            assert first.forward_s >= 0.002
            assert last.forward_s >= 0.004
            assert min(first.backward_s, last.backward_s) >= 0.003


def test_cases_use_all_ranks_and_their_schedules_run() -> None:
    for world_size in (2, 4, 8):
        for title, step in prediction.sleeping_cases(world_size).items():
            assert layout_of(step).world_size == world_size, title
            assert simulate(step).step_s > 0


def test_namespaces_are_gone_after_an_error() -> None:
    made: list[Path] = []
    try:
        with two_servers(1e8) as names:
            made += [RUN / name for name in names]
            assert all(path.exists() for path in made)
            shown = subprocess.run(
                ("tc", "-n", names[1], "qdisc", "show", "dev", INTERFACE), capture_output=True, text=True, check=True
            )
            assert "tbf" in shown.stdout
            raise KeyError("something else")
    except NamespacesUnavailableError as error:
        pytest.skip(str(error))
    except KeyError:
        pass
    assert not any(path.exists() for path in made)


def test_what_was_made_is_removed_where_limits_are_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, int(command[0] == "tc"), "", "Operation not permitted")

    monkeypatch.setattr("benchmarks.namespaces.subprocess.run", run)
    monkeypatch.setattr("benchmarks.namespaces.shutil.which", lambda command: command)
    with (
        pytest.raises(NamespacesUnavailableError, match=r"`tc .* failed: Operation not permitted"),
        two_servers(1e8),
    ):
        pytest.fail("there is no link")
    made = [command[3] for command in calls if command[1:3] == ("netns", "add")]
    assert len(made) == 2
    assert [command[3] for command in calls[-2:] if command[1:3] == ("netns", "delete")] == made


def test_what_is_skipped_does_not_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.namespaces.shutil.which", lambda command: None)
    assert measured_mapping.main(["--check"]) == SKIPPED_STATUS
    assert "SKIPPED, nothing was measured: there is no command 'ip'" in capsys.readouterr().err
    assert measured_mapping.main([]) == 0
