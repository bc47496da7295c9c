"""Our executor and a peer on the same stage modules, and plans for stages that sleep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import contest, emulated_compute, runtime_overhead, slow_links
from benchmarks.contest import Contest, Entry, OurPipeline, mean_square, runner_of
from benchmarks.module_stage import ModuleStage, unit_shares
from benchmarks.peers import torch_pipelining
from benchmarks.planned_steps import KEPT_BYTES, PlannedModel, linear_seconds, planned, predicted_s, stash_bytes
from benchmarks.reporting import SKIPPED_STATUS, at_least, at_most, finish, parser, spread
from benchmarks.stage_modules import Seconds, Sleeping, Tiny
from lightning_autopipe.core import Link
from lightning_autopipe.runtime.split_backward import backward_of_leaves
from lightning_autopipe.schedules import get_schedule
from lightning_autopipe.schedules.sliced import sliced_one_f_one_b
from lightning_autopipe.schedules.zero_bubble import NAME as ZERO_BUBBLE
from tests.harness import run_processes

SLOW = [Link(a=server, b="network", bandwidth_bytes_per_s=25e6) for server in "AB"]


# Ends of scripts ---------------------------------------------------------------------------------------


def test_what_falls_short_fails_only_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [*at_least("speed", 0.9, 1.0), *at_most("memory", 1.0, 1.0)]
    file = tmp_path / "figures.json"
    assert finish(parser("").parse_args(["--check", "--json", str(file)]), {"a": 1}, short) == 1
    assert "Falls short: speed: 0.9, wanted is at least 1" in capsys.readouterr().out
    assert json.loads(file.read_text()) == {"a": 1, "falls_short": ["speed: 0.9, wanted is at least 1"]}
    assert finish(parser("").parse_args([]), {}, short) == 0
    assert finish(parser("").parse_args(["--check"]), {}, []) == 0
    assert spread([0.003, 0.001, 0.002]) == "2.0 [1.0 3.0] ms"


def test_without_namespaces_slow_links_is_skipped_and_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.namespaces.shutil.which", lambda command: None)
    assert slow_links.main(["--check"]) == SKIPPED_STATUS
    assert "SKIPPED, nothing was measured: there is no command 'ip'" in capsys.readouterr().err
    assert slow_links.main([]) == 0


# Stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["first stage", "later stage"])
def test_a_sleeping_stage_sleeps_once_for_each_part_of_its_backward(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.stage_modules.time.sleep", slept.append)
    model = Sleeping(seconds={4: Seconds(1, 2, 3)}, sample_bytes=40)
    stage = model.stage(0 if is_first else 1, 3)
    values = model.inputs(4) if is_first else torch.zeros(4, 10, requires_grad=True)
    output = stage(values)
    assert output.shape == (4, 10)
    assert slept == [1]
    root = torch.zeros_like(output)
    torch.autograd.backward(output, root)
    assert sorted(slept) == [1, 2, 3]
    assert stage.weight.grad is not None
    if is_first:
        return
    assert values.grad is not None
    assert values.grad.shape == values.shape
    slept.clear()
    output = stage(values)
    torch.autograd.grad(output, values, root, retain_graph=True)
    assert slept == [1, 2]
    _, rest = backward_of_leaves([stage(values)], [root], [values])
    assert slept == [1, 2, 1, 2]
    rest.run()
    assert slept == [1, 2, 1, 2, 3]


def test_units_are_shares_of_the_batch_in_its_order() -> None:
    shares = unit_shares(torch.arange(12.0).reshape(12, 1), [2, 1, 1])
    assert [share.flatten().tolist() for share in shares] == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    stage = ModuleStage(Tiny().stage(0, 1), loss=mean_square, slices=[2, 1], num_samples=4)
    stage.begin(torch.ones(8, 16))
    assert [stage.signature(index) for index in range(3)] == [2, 2, 4]
    roots = [stage.forward(index, ()).roots for index in range(3)]
    weights = [[float(weight) for weight in found()[1]] for found in roots if found is not None]
    assert weights == [[0.25], [0.25], [0.5]]


def gradients_of(entries: tuple[Entry, ...]) -> list[list[Tensor]]:
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for entry in entries:
        runner = runner_of(entry, rank, world_size, 20.0)
        runner.run()
        if isinstance(runner, OurPipeline):
            parameters = list(runner.module.parameters())
        else:
            assert isinstance(runner, torch_pipelining.TorchPipeline)
            parameters = [parameter for module in runner.modules.values() for parameter in module.parameters()]
        found.append([parameter.grad for parameter in parameters if parameter.grad is not None])
    return found


def test_the_peer_and_our_executor_compute_the_same() -> None:
    common: dict[str, Any] = {"title": "", "model": Tiny(), "num_microbatches": 4, "num_samples": 4}
    ours = (
        Entry(schedule=get_schedule("1f1b", 2, 4), **common),
        Entry(schedule=sliced_one_f_one_b(2, 4, num_sliced_first=1, num_sliced_last=1), **common),
        Entry(schedule=get_schedule(ZERO_BUBBLE, 2, 4), **common),
    )
    theirs = tuple(
        Entry(schedule=name, **common)
        for name in (torch_pipelining.ONE_F_ONE_B, torch_pipelining.GPIPE, torch_pipelining.ZERO_BUBBLE)
    )
    last, first = run_processes(2, gradients_of, (*ours, *theirs), timeout_s=60.0)
    num_ours = len(ours)
    for name, mine, peers in (
        ("first stage", first[:num_ours], last[num_ours:]),  # torch's stage 0 is on rank 0
        ("last stage", last[:num_ours], first[num_ours:]),
    ):
        for index, gradients in enumerate((*mine, *peers)):
            assert len(gradients) == 1, (name, index)
            torch.testing.assert_close(gradients, mine[0], msg=lambda text, at=(name, index): f"{at}: {text}")


def test_a_contest_tells_times_by_entry_and_stages_alone() -> None:
    model = Sleeping(seconds={2: Seconds(0.002, 0.003), 1: Seconds(0.001, 0.002)}, sample_bytes=400)
    common: dict[str, Any] = {"model": model, "num_microbatches": 2, "num_samples": 2}
    entries = (
        Entry(title="ours", schedule=sliced_one_f_one_b(2, 2, num_sliced_first=1), **common),
        Entry(title="torch", schedule=torch_pipelining.ONE_F_ONE_B, **common),
    )
    assert [entry.unit_sizes() for entry in entries] == [(2, 1), (2,)]
    measured = contest.run_contest(
        Contest(entries=entries, servers=("here",) * 2, num_repeats=2, is_prompt=False), limit_s=60.0
    )
    ours, peer = measured.entries
    for times in (ours, peer):
        assert len(times.seconds) == len(times.cpu_s) == 2
        assert min(times.seconds) >= 3 * 0.005 - 1e-4
    assert peer.alone == ()
    for whole, half in ours.alone:
        assert whole.forward >= 0.002
        assert whole.input >= 0.003
        assert half.forward >= 0.001
        assert half.input >= 0.002


# Plans -------------------------------------------------------------------------------------------------


def test_plans_are_those_of_the_search_in_the_memory_of_plain_1f1b() -> None:
    model = PlannedModel(num_stages=4, num_microbatches=4, seconds=linear_seconds(Seconds(0.01, 0.02), 4))
    assert model.seconds == {size: Seconds(0.0025 * size, 0.005 * size) for size in (1, 2, 4)}
    plain = planned(replace(model.space(num_microbatches=4), schedule="1f1b"))
    assert plain.step_s == pytest.approx((4 + 3) * 0.03)
    assert stash_bytes(plain, model) == model.plain_stash_bytes() == tuple(KEPT_BYTES * n for n in (4, 3, 2, 1))
    assert model.plain_stash_bytes(2) == tuple(KEPT_BYTES // 2 * n for n in (4, 3, 2, 1))
    limited = planned(model.space(kinds=["sliced_1f1b"], memory_of="each stage of 1F1B"))
    assert limited.step_s < 0.9 * plain.step_s
    assert all(
        ours <= theirs for ours, theirs in zip(stash_bytes(limited, model), model.plain_stash_bytes(), strict=True)
    )


def test_pinned_stages_stay_in_their_order_and_free_ones_do_not() -> None:
    model = PlannedModel(num_stages=4, num_microbatches=8, seconds={8: Seconds(0.01, 0.02)}, sample_bytes=62_500)
    given: dict[str, Any] = {"servers": ["B", "A", "B", "A"], "links": SLOW, "num_microbatches": 8}
    pinned, free = (planned(model.space(**given, is_pinned=is_pinned)) for is_pinned in (True, False))
    assert [rank for (rank,) in pinned.mapping.stage_ranks] == [3, 2, 1, 0]
    assert free.step_s < pinned.step_s
    entry = model.entry("free", free)
    assert "".join(given["servers"][rank] for rank in entry.ranks) == "AABB"


def test_predictions_come_from_what_was_measured() -> None:
    model = PlannedModel(num_stages=2, num_microbatches=4, seconds={4: Seconds(0.01, 0.02)})
    candidate = planned(replace(model.space(num_microbatches=4), schedule="1f1b"))
    alone = ((Seconds(0.02, 0.04),),) * 2
    times = contest.EntryTimes(seconds=(1.0,), cpu_s=(1.0,), alone=alone)
    assert predicted_s(candidate, times, None) == pytest.approx(5 * 0.06)
    assert predicted_s(candidate, times, None, overhead_s=0.001) == pytest.approx(5 * 0.062)


def test_what_halves_cost_decides_whether_they_are_planned() -> None:
    for share, is_sliced in ((0.55, True), (0.8, False)):
        model = emulated_compute.a_model(3, 4, emulated_compute.halved(share))
        chosen = planned(model.space(kinds=["sliced_1f1b"], memory_of="each stage of 1F1B"))
        assert chosen.schedule.is_sliced is is_sliced, (share, chosen.schedule)


def test_all_entries_of_the_overhead_have_a_peer() -> None:
    entries = runtime_overhead.entries()
    assert [entry.is_ours for entry in entries] == [True, False, True] * len(runtime_overhead.NUM_MICROBATCHES)
    assert [entry.is_replayed for entry in entries[:3]] == [False, False, True]
