"""``autopipe plan``: from profiles of every form, for clusters that are elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.cli import main
from lightning_autopipe.cluster import find_cluster_file, load_topology, save_topology
from lightning_autopipe.core import ClusterTopology, DeviceMapping, Partition, PipelinePlan
from lightning_autopipe.planner import simulate
from lightning_autopipe.planner.plan_step import plan_step
from tests.planner.mappings import a_cluster, a_model
from tests.planner.test_search import a_profile, with_a_heavy_layer

HEAVY = ("torch", "lightning", "hydra", "matplotlib", "jinja2")
TEXT_GRAPH = "".join(
    f"node{index} -- layer_{index} -- forward_compute_time={time}, backward_compute_time={2 * time}, "
    f"activation_size=4000000, parameter_size={size}\n"
    for index, (time, size) in enumerate([(1, 400), (3, 100), (3, 100), (1, 400)])
) + "".join(f"\tnode{index} -- node{index + 1}\n" for index in range(3))
PIPER = {
    "maxDevices": 4,
    "maxMemoryPerDevice": 1e10,
    "bandwidth": 1e9,
    "mbsInBatch": 8,
    "nodes": [
        {
            "id": index,
            "name": f"layer {index}",
            "TMPCs": {
                "1": [
                    {
                        "id": "vanilla",
                        "timePerSample": 0.01,
                        "parameterSize": 100.0,
                        "memoryUsageA": 10.0,
                        "memoryUsageB": 300.0,
                    }
                ]
            },
        }
        for index in range(4)
    ],
    "edges": [{"sourceId": index, "destId": index + 1, "communicationCost": 1000.0} for index in range(3)],
}


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


def planned(*arguments: str) -> PipelinePlan:
    """The plan that the command writes."""
    assert main(["plan", "-o", "plan.json", *arguments]) == 0
    return PipelinePlan.load("plan.json")


def counts(plan: PipelinePlan) -> list[int]:
    return [len(ranks) for ranks in plan.mapping.stage_ranks]


def save_model(times: Sequence[float], **options: Any) -> None:
    a_model(times, **options).save("profile.json")


# Where costs and devices come from -----------------------------------------


def test_a_text_graph_on_devices_that_are_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bert-pbs-6.txt").write_text(TEXT_GRAPH)
    plan = planned("--profile", "bert-pbs-6.txt", "--cluster", "slow_network", "--stages", "2", "--batch-size", "48")
    output = capsys.readouterr().out
    assert counts(plan) == [2, 2]
    assert (plan.num_microbatches, plan.microbatch_size) == (8, 6.0)
    assert plan.devices == load_topology(find_cluster_file("slow_network")).devices
    assert plan.step_prediction is not None
    assert plan.step_prediction.num_samples == 96
    for text in (
        "2 stages × 2 replicas",
        "8 micro-batches of 6",
        "a step takes 2 × 48 samples",
        "of sums",
        "contended",
    ):
        assert text in output
    words = " ".join(output.split())
    assert "note: times are those of the profiled device; CPU process: by the speeds that the cluster says" in words
    assert "note: the profile does not say which module it is of" in words
    assert max(map(len, output.splitlines())) <= 80


def test_pipers_profile_and_a_saved_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("piper.json").write_text(json.dumps(PIPER))
    plan = planned("--profile", "piper.json", "--cluster", "slow_network", "--microbatches", "8", "--schedule", "gpipe")
    assert plan.schedule.name == "gpipe"
    assert [layer.measured is not None for layer in plan.layers] == [True] * 4
    replace(a_profile(), module_fingerprint="abc").save("saved.json")
    saved = planned("--profile", "saved.json", "--cluster", "slow_network", "--batch-size", "8")
    assert (plan.module_fingerprint, saved.module_fingerprint) == ("unknown, of piper.json", "abc")
    assert capsys.readouterr().out.count("note: the profile does not say which module") == 1


def test_processes_on_this_machine_share_it() -> None:
    a_profile().save("saved.json")
    plan = planned("--profile", "saved.json", "--devices", "3", "--batch-size", "4", "--replicas", "1")
    assert len(plan.devices) == 3
    assert len({(device.server, device.memory_bytes) for device in plan.devices}) == 1
    plan.require_devices(plan.devices)


def test_times_of_a_model_are_found_by_the_name_that_people_use() -> None:
    """All devices are as fast as their own times say, whatever speeds the file gives."""
    models = {"NVIDIA GeForce RTX 3090": 1.0, "Tesla V100-SXM2-32GB": 0.5}
    a_profile(models=models).save("saved.json")
    topology = a_cluster("AB")
    named = (replace(device, model=name) for device, name in zip(topology.devices, ("RTX 3090", "V100"), strict=True))
    save_topology(replace(topology, devices=tuple(named)), "cluster.yaml")
    plan = planned(
        "--profile", "saved.json", "--cluster", "cluster.yaml", "--stages", "2", "--batch-size", "8", "--no-slices"
    )
    assert [table.device_model for table in plan.times] == list(models)
    assert plan.mapping.stage_ranks == ((1,), (0,))
    first, last = (len(plan.stage_layers(stage)) for stage in range(2))
    assert first < last
    again = simulate(plan_step(plan, cluster=load_topology("cluster.yaml")))
    assert plan.step_prediction is not None
    assert again.step_s == pytest.approx(plan.step_prediction.step_s)


# Row 36: every layer on one stage, no stage empty ---------------------------


@pytest.mark.parametrize(
    ("times", "num_stages"),
    [((1.0,) * 5, 4), ((1.0,) * 30, 4), ((1.0,) * 42, 16), ((500.0, *(1.0,) * 9), 4)],
)
@pytest.mark.parametrize("partition", ["auto", "uniform"])
def test_layers_are_covered_and_no_stage_is_empty(times: tuple[float, ...], num_stages: int, partition: str) -> None:
    save_model(times)
    save_topology(replace(a_cluster("A" * num_stages), links=()), "cluster.yaml")
    plan = planned(
        *("--profile", "profile.json", "--cluster", "cluster.yaml", "--stages", str(num_stages)),
        *("--microbatches", "8", "--partition", partition, "--schedule", "1f1b"),
    )
    sizes = [len(plan.stage_layers(stage_index)) for stage_index in range(num_stages)]
    assert sum(sizes) == len(times)
    assert min(sizes) >= 1
    if times[0] > 1 and partition == "auto":
        assert sizes[0] == 1
    elif partition == "auto":
        assert max(sizes) == -(-len(times) // num_stages)


# Row 37: as good as brute force on two servers; servers with unlike numbers of devices


def every_plan(plan: PipelinePlan, topology: ClusterTopology) -> list[PipelinePlan]:
    """All cuts and all choices of servers for the places of two stages and four replicas, rank 0 in its own."""
    own, other = (topology.server_ranks(server) for server in topology.servers)
    plans = []
    places = [(stage, replica) for replica in range(4) for stage in (1, 0)]
    for on_own in combinations(places[1:], len(own) - 1):
        left = {True: iter(own), False: iter(other)}
        rank_of = {place: next(left[place == places[0] or place in on_own]) for place in places}
        ranks = tuple(tuple(rank_of[stage, replica] for replica in range(4)) for stage in range(2))
        plans.extend(
            replace(
                plan,
                mapping=DeviceMapping(stage_ranks=ranks),
                partition=Partition(cut_points=(cut,), num_layers=len(plan.layers)),
                stage_predictions=(),
                stage_work_shares=(),
            )
            for cut in range(1, len(plan.layers))
        )
    return plans


def test_two_servers_of_four_are_planned_as_by_brute_force() -> None:
    save_model((2.0, 1.0, 4.0, 1.0, 3.0), num_bytes=2, gradient_bytes=6)
    topology = a_cluster("AAAABBBB", speeds=(1.0,) * 4 + (0.5,) * 4, bandwidth=3.0)
    save_topology(topology, "cluster.json")
    plan = planned(
        *("--profile", "profile.json", "--cluster", "cluster.json", "--stages", "2"),
        *("--microbatches", "3", "--schedule", "1f1b"),
    )
    best_s = min(simulate(plan_step(other, cluster=topology)).step_s for other in every_plan(plan, topology))
    assert plan.step_prediction is not None
    assert plan.step_prediction.step_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize(("cluster", "num_devices"), [("uneven_1_2_1", 4), ("rtx3090_v100", 12)])
def test_servers_with_unlike_numbers_of_devices(cluster: str, num_devices: int) -> None:
    """1 + 2 + 1, and 8 + 4: all are used, and the same step is predicted when the plan is shown."""
    Path("graph.txt").write_text(TEXT_GRAPH)
    plan = planned("--profile", "graph.txt", "--cluster", cluster, "--stages", "4", "--microbatches", "4")
    assert plan.mapping.ranks == tuple(range(num_devices))
    assert plan.mapping.stage_ranks[-1][0] == 0
    shown = simulate(plan_step(plan, cluster=load_topology(find_cluster_file(cluster))))
    assert plan.step_prediction is not None
    assert shown.step_s == pytest.approx(plan.step_prediction.step_s)


# For study, and files --------------------------------------------------------


def test_plans_for_study_are_written_shown_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks for a dear layer; halves; both say that they cannot be run."""
    with_a_heavy_layer(a_profile(value_bytes=16, gradient_bytes=400), 14.0).save("saved.json")
    save_topology(a_cluster("ABC", bandwidth=20.0), "cluster.yaml")
    common = ("--profile", "saved.json", "--cluster", "cluster.yaml")
    plan = planned(
        *common, "--global-batch-size", "24", "--no-equal-replicas", "--picture", "a.svg", "--html", "a.html"
    )
    assert counts(plan) == [2, 1]
    assert "note: this plan can be simulated, but not run yet" in capsys.readouterr().out
    assert "2 stages of 2 + 1 replicas" in Path("a.svg").read_text(encoding="utf-8")
    page = Path("a.html").read_text(encoding="utf-8")
    for text in ("2 stages of 2 + 1 replicas", "Runners-up", "contended", "A → switch"):
        assert text in page
    assert main(["simulate", "plan.json", "--cluster", "cluster.yaml", "--trace", "a.json"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("stage 0, rank 1 | F0 F2")
    assert "stage 1, rank 0 | F0 B0 F1 B1" in output
    step_s = json.loads(Path("a.json").read_text(encoding="utf-8"))["otherData"]["step_s"]
    assert plan.step_prediction is not None
    assert step_s == pytest.approx(plan.step_prediction.step_s)
    a_profile(fixed=0.1).save("saved.json")
    sizes = ("--batch-size", "8", "--microbatches", "4", "--stages", "4")
    sliced = planned("--profile", "saved.json", "--devices", "4", *sizes, "--schedule", "sliced_1f1b")
    assert sliced.schedule.is_sliced
    capsys.readouterr()
    assert main(["simulate", "plan.json"]) == 0
    assert "F0.0 F0.1" in capsys.readouterr().out


def test_replicas_that_take_unlike_numbers_have_a_grid_each(capsys: pytest.CaptureFixture[str]) -> None:
    a_profile(models={"gpu": 1.0, "slow": 0.5}).save("saved.json")
    topology = a_cluster("AABB")
    devices = tuple(device if device.server == "A" else replace(device, model="slow") for device in topology.devices)
    save_topology(replace(topology, devices=devices), "cluster.yaml")
    plan = planned(
        *("--profile", "saved.json", "--cluster", "cluster.yaml", "--global-batch-size", "24"),
        *("--no-equal-replicas", "--replicas", "2", "--microbatches", "6", "--schedule", "1f1b"),
    )
    assert sum(plan.replica_microbatches) == 12
    assert max(plan.replica_microbatches) in (8, 9)  # equally long
    capsys.readouterr()
    assert main(["simulate", "plan.json"]) == 0
    output = capsys.readouterr().out
    assert output.count("stage 0 | ") == 2
    assert f" B{max(plan.replica_microbatches) - 1}\n" in output


def test_files_are_written_before_anything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Who reads the tables may stop reading (`| head`)."""
    a_profile().save("saved.json")
    script = "import sys; from lightning_autopipe.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "plan", "--profile", "saved.json", "--devices", "1", "--batch-size", "8"]
    process = subprocess.Popen([*command, "-o", "plan.json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(timeout=60)
    assert PipelinePlan.load("plan.json").num_stages == 1


def test_a_file_is_planned_from_without_torch() -> None:
    a_profile().save("saved.json")
    script = (
        "import sys; from lightning_autopipe.cli import main;"
        "main(['plan', '--profile', 'saved.json', '--devices', '2', '--batch-size', '8']);"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], 'end')"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1].strip() == "end", result.stderr


# Errors -------------------------------------------------------------------------

DAMAGED = {
    "cut.json": '{"schema_version": 1, "layers": [{"name": "a"',
    "empty.json": "",
    "list.json": "[1, 2]",
    "other.json": '{"answer": 42}',
    "version.json": '{"schema_version": 7, "layers": []}',
    "graph.txt": "node1 -- a -- forward_compute_time=x, backward_compute_time=1, activation_size=1, parameter_size=1\n",
    "cluster.yaml": "schema_version: 1\nservers: [",
    "words.yaml": "just words",
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--profile none.json --batch-size 8", "none.json: cannot be read"),
        ("--profile cut.json --batch-size 8", "cut.json:1: not JSON"),
        ("--profile empty.json --batch-size 8", "empty.json: empty; expected a profile"),
        ("--profile list.json --batch-size 8", "list.json: no profile"),
        ("--profile other.json --batch-size 8", "other.json: no profile: JSON with answer"),
        ("--profile version.json --batch-size 8", "version.json: schema_version is 7"),
        ("--profile plan.json --batch-size 8", "plan.json: schema_version is 3, this version of lightning_autopipe"),
        ("--profile graph.txt --batch-size 8", "graph.txt:1: "),
        ("--profile binary --batch-size 8", "binary: not a text file"),
        ("--profile good.json --batch-size 8 --cluster none", "none: no such file, and no example"),
        ("--profile good.json --batch-size 8 --cluster cluster.yaml", "cluster.yaml"),
        ("--profile good.json --batch-size 8 --cluster words.yaml", "words.yaml"),
        ("--profile good.json --batch-size 8 --cluster other.json", "other.json"),
        ("--profile good.json", "give --batch-size (of each replica) or --global-batch-size (of a step)"),
        ("--profile good.json --microbatches 4", "measured are micro-batches of 1, 2, 4, 8 samples"),
        ("--profile good.json --batch-size 0", "--batch-size must be a whole number >= 1, got '0'"),
        ("--profile good.json --global-batch-size x", "--global-batch-size must be a whole number"),
        ("--profile good.json --batch-size 8 --devices 2.5", "--devices must be a whole number >= 1"),
        ("--profile good.json --batch-size 8 --devices 2 --stages 3", "num_stages=3 x num_replicas=auto does not use"),
        ("--profile good.json --batch-size 8 --devices 9 --stages 9", "one stage for each of the 8 layers"),
        ("--profile good.json --batch-size 64 --microbatches 2", "no times are known for micro-batches"),
        ("--profile good.json --batch-size 8 --partition zigzag", "--partition is auto, uniform, parameters, or the"),
        ("--profile good.json --batch-size 8 --partition 4,4", "ascending, such as 4,8; got '4,4'"),
        ("--profile good.json --batch-size 8 --partition 8 --devices 2", "8"),
        ("--profile good.json --batch-size 8 --partition 4 --stages 3 --devices 3", "1 cuts make 2 stages"),
        ("--profile good.json --batch-size 8 --no-equal-replicas", "give --global-batch-size"),
        ("--profile good.json --batch-size 8 --time-unit ms", "time_unit given, but a profile that was saved here"),
        ("--profile good.json --batch-size 8 --microbatch-size 2", "microbatch_size given"),
        ("--profile good.json --batch-size 8 model=small", "goes with --recipe"),
        ("--profile good.json --batch-size 8 --save-profile a.json", "--save-profile goes with --recipe"),
        ("--recipe gpt2 --time-unit ms", "--time-unit goes with --profile"),
        ("--recipe gpt2 --batch-size 8", "leave out --batch-size, set data.batch_size=N"),
        ("--profile good.json --batch-size 8 --picture a.pdf", "ends in .png or .svg"),
        ("--profile good.json --batch-size 8 -o good.json/below", "below: cannot be written"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    a_profile().save("good.json")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    for name, text in DAMAGED.items():
        Path(name).write_text(text)
    Path("plan.json").write_text('{"schema_version": 3, "layers": [], "partition": {}}')
    assert main(["plan", *arguments.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("autopipe: error: ")
    assert problem in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--profile", "a", "--recipe", "b"],
        ["--profile", "a", "--cluster", "b", "--devices", "2"],
        ["--profile", "a", "--schedule", "zigzag"],
        ["--profile", "a", "--time-unit", "h"],
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert "usage: autopipe plan" in capsys.readouterr().err
