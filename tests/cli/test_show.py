from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_autopipe.cli import main
from lightning_autopipe.cluster import find_cluster_file, load_topology
from lightning_autopipe.core import DeviceMapping
from tests.planner.test_plan_step import a_plan


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    a_plan(num_layers=12, num_stages=2, num_replicas=6).save(path)
    return str(path)


def test_a_plan_is_shown_with_its_step(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", plan_file]) == 0
    output = capsys.readouterr().out
    for text in ("2 stages × 6 replicas, 1f1b, 3 micro-batches", "step 960 ms, bubble 25.0 %", "rank 0 → rank 1"):
        assert text in output
    assert "note: No cluster is given" in output
    assert "not measured" not in output


def test_links_are_shown_with_what_they_carry_and_who_meets_there(
    plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", plan_file, "--cluster", "rtx3090_v100"]) == 0
    output = capsys.readouterr().out
    assert "from → to bytes of sums busy share contended by flows" in " ".join(output.split())
    # A value of 1000 bytes and half of that back for each of three micro-batches, and the gradients' ring.
    assert "rank 11 → rank 10 2.93 KiB 0 B" in " ".join(output.split())
    assert max(map(len, output.splitlines())) <= 80
    assert "The cluster is not what" not in output


def test_a_mapped_plan_keeps_its_pipelines_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 sends to rank 0, and rank 1 to rank 2; in the order of ranks it would be 1 to 0 and 3 to 2."""
    mapping = DeviceMapping(stage_ranks=((3, 1), (0, 2)))
    replace(a_plan(num_replicas=2), mapping=mapping).save(tmp_path / "plan.json")
    files = [
        "--picture",
        str(tmp_path / "a.svg"),
        "--trace",
        str(tmp_path / "a.json"),
        "--html",
        str(tmp_path / "a.html"),
    ]
    assert main(["show", str(tmp_path / "plan.json"), *files]) == 0
    output = capsys.readouterr().out
    ways = ("rank 0 → rank 3", "rank 1 → rank 2", "rank 2 → rank 1", "rank 3 → rank 0")
    for way in ways:
        assert way in output
        assert way in (tmp_path / "a.json").read_text(encoding="utf-8")
    picture = (tmp_path / "a.svg").read_text(encoding="utf-8")
    lanes = [f"stage {stage} · rank {rank}" for stage, rank in ((0, 3), (1, 0), (0, 1), (1, 2))]
    for text in (picture, (tmp_path / "a.html").read_text(encoding="utf-8")):
        assert sorted(lanes, key=text.index) == lanes
    assert main(["simulate", str(tmp_path / "plan.json")]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.endswith(" B  ") or " ms" in line]
    assert [row for row in rows if row[0] in "01"][:4] == [
        ["0", "0", "3"],
        ["1", "0", "0"],
        ["0", "1", "1"],
        ["1", "1", "2"],
    ]


def test_devices_that_a_plan_is_not_for_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = load_topology(find_cluster_file("slow_network")).devices
    replace(a_plan(num_replicas=2), devices=devices).save(tmp_path / "plan.json")
    for cluster, problem in (
        ("slow_network", ""),
        ("no_peer_access_4", "rank 0 is RTX 2080 Ti, planned for CPU process, and 3 more"),
    ):
        assert main(["show", str(tmp_path / "plan.json"), "--cluster", cluster]) == 0
        output = capsys.readouterr().out
        assert ("note: The cluster is not what the plan is for: " in output) == bool(problem)
        assert problem in output


def test_everything_that_is_asked_for_is_written(plan_file: str, tmp_path: Path) -> None:
    files = {"--html": "a.html", "--picture": "b.svg", "--trace": "c.json"}
    options = [part for option, name in files.items() for part in (option, str(tmp_path / name))]
    assert main(["show", plan_file, "--cluster", "rtx3090_v100", *options]) == 0
    assert "2 stages × 6 replicas, 1f1b, 3 micro-batches" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" in (tmp_path / "b.svg").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    processes = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"]
    assert len(processes) == 2
    assert all(name.startswith("server ") for name in processes)
    assert any("bytes" in event.get("args", {}) for event in document["traceEvents"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.svg", "c.json", "plan.json"]


def test_what_was_not_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_plan(is_measured=False).save(tmp_path / "plan.json")
    for command in ("show", "simulate"):
        assert main([command, str(tmp_path / "plan.json")]) == 0
        assert "note: The plan's layers were not measured" in capsys.readouterr().out


def test_a_simulated_plan_shows_grid_and_timeline(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", plan_file]) == 0
    output = capsys.readouterr().out
    assert output.startswith("stage 0 | F0 F1 .  B0 F2 B1 .  B2\nstage 1 | .  F0 B0 F1 B1 F2 B2 .\n\n")
    assert "step 960 ms, bubble 25.0 %" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["show", "none.json"], "the plan file 'none.json' cannot be read"),
        (["show", "{folder}/bad.json"], "bad.json' is not valid: not JSON"),
        (["simulate", "{folder}/bad.json"], "bad.json' is not valid: not JSON"),
        (["show", "{plan}", "--cluster", "none"], "none"),
        (["show", "{plan}", "--cluster", "uneven_1_2_1"], "12 ranks (2 stages x 6 replicas), but the cluster has 4"),
        (["show", "{plan}", "--picture", "{folder}/a.pdf"], "a picture's file name ends in .png or .svg"),
        (["show", "{plan}", "--trace", "{plan}/below"], "below: cannot be written"),
        (["show", "{plan}", "--html", "{folder}"], ": cannot be written"),
        (["simulate", "{plan}", "--stages", "3"], "a plan says this itself; leave out --stages"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    arguments: list[str], problem: str, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{")
    assert main([text.format(folder=tmp_path, plan=plan_file) for text in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopipe: error: ")
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", [["--picture", "a.svg"], ["--html", "a.html"]])
def test_a_missing_library_is_told_in_one_line(
    option: list[str],
    plan_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    monkeypatch.chdir(tmp_path)
    assert main(["show", plan_file, *option]) == 2
    error = capsys.readouterr().err
    assert "pip install 'lightning-autopipe[plot]'" in error
    assert error.count("\n") == 1
