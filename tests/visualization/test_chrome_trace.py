from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_autopipe.core import Action, ConfigurationError, Timeline, TimelineEvent
from lightning_autopipe.schedules import sliced_one_f_one_b
from lightning_autopipe.visualization import chrome_trace, save_chrome_trace

from .timelines import NUM_BYTES, a_cluster, a_timeline, an_unlike_timeline


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def names(document: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    found = [event for event in of_phase(document, "M") if event["name"] == f"{kind}_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in found}


@pytest.fixture
def timeline() -> Timeline:
    return a_timeline(3, 4, 2, exchange_s=0.001, is_tied=True)


def test_every_event_is_there_once_in_microseconds_in_the_order_of_time(timeline: Timeline) -> None:
    document = chrome_trace(timeline)
    slices = of_phase(document, "X")
    expected = Counter((str(event.action), round(1e6 * event.start_s, 3)) for event in timeline.events)
    assert Counter((event["name"], event["ts"]) for event in slices) == expected
    assert all(isinstance(event["ts"], float) and event["dur"] >= 0 for event in slices)
    end_us = max(event["ts"] + event["dur"] for event in slices)
    assert end_us == pytest.approx(1e6 * timeline.step_s, abs=0.01)
    phases = [event["ph"] for event in document["traceEvents"]]
    assert phases == sorted(phases, key=lambda phase: phase != "M")
    times = [event["ts"] for event in document["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)


def test_nothing_on_a_thread_overlaps(timeline: Timeline) -> None:
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in of_phase(chrome_trace(timeline), "X"):
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in by_thread.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(intervals)))


def test_a_process_for_each_replica_and_a_thread_for_each_rank_and_way(timeline: Timeline) -> None:
    document = chrome_trace(timeline)
    assert names(document, "process") == {(1, 0): "replica 0", (2, 0): "replica 1"}
    threads = names(document, "thread")
    assert len({thread for _, thread in threads}) == len(threads)
    assert [name for (process, _), name in threads.items() if process == 2] == [
        "stage 0 · rank 5",
        "stage 1 · rank 4",
        "stage 2 · rank 3",
        "rank 3 → rank 4",
        "rank 4 → rank 3",
        "rank 4 → rank 5",
        "rank 5 → rank 4",
    ]
    used = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["ph"] != "M"}
    assert used == set(threads)


def test_with_a_cluster_a_process_for_each_server(timeline: Timeline) -> None:
    document = chrome_trace(timeline, cluster=a_cluster(6))
    processes = {process: name for (process, _), name in names(document, "process").items()}
    assert set(processes.values()) == {"server A", "server B"}
    ranks = {name.split()[-1]: processes[key[0]] for key, name in names(document, "thread").items() if "stage" in name}
    assert ranks == {str(rank): f"server {'AB'[rank % 2]}" for rank in range(6)}


def test_arguments_say_what_and_how_much() -> None:
    timeline = a_timeline(2, 2, schedule=sliced_one_f_one_b(2, 2, num_sliced_first=1))
    document = chrome_trace(timeline, boundary_bytes=[(NUM_BYTES, 3 * NUM_BYTES)], title="a title")
    arguments = {event["name"]: event["args"] for event in of_phase(document, "X")}
    assert arguments["0F0.1"] == {"stage": 0, "replica": 0, "rank": 1, "microbatch": 0, "slice": 1}
    assert arguments["1B1"] == {"stage": 1, "replica": 0, "rank": 0, "microbatch": 1}
    assert arguments["0SA0.1"] == {"microbatch": 0, "slice": 1, "from_rank": 1, "to_rank": 0, "bytes": NUM_BYTES // 2}
    assert arguments["1SG1"] == {"microbatch": 1, "from_rank": 0, "to_rank": 1, "bytes": 3 * NUM_BYTES}
    assert arguments["optimizer"].keys() == {"stage", "replica", "rank"}
    assert "bytes" not in {key for event in of_phase(chrome_trace(timeline), "X") for key in event["args"]}
    assert document["otherData"] == {
        "title": "a title",
        "step_s": timeline.step_s,
        "bubble_fraction": timeline.bubble_fraction,
    }


def test_arrows_lead_from_messages_to_what_is_computed_from_them(timeline: Timeline) -> None:
    document = chrome_trace(timeline)
    begins = {event["id"]: event for event in of_phase(document, "s")}
    ends = {event["id"]: event for event in of_phase(document, "f")}
    at = {(event["pid"], event["tid"], event["ts"]): event["name"] for event in of_phase(document, "X")}
    assert len(begins) == len(ends) == 2 * 2 * 2 * 4
    found = set()
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        found.add((at[begin["pid"], begin["tid"], begin["ts"]], at[end["pid"], end["tid"], end["ts"]]))
    assert ("0SA2", "1F2") in found
    assert ("2SG1", "1B1") in found
    assert len(found) == 2 * 2 * 4


def test_messages_that_overlap_have_threads_side_by_side() -> None:
    actions = (("0F0", 1, 0, 1), ("0SA0", 1, 1, 3), ("0SA1", 1, 2, 4), ("0SA2", 1, 3, 5), ("1F0", 0, 5, 6))
    events = tuple(
        TimelineEvent(action=Action.parse(text), global_rank=rank, start_s=start_s, end_s=end_s)
        for text, rank, start_s, end_s in actions
    )
    document = chrome_trace(Timeline(events=events, step_s=6.0, bubble_fraction=0.0))
    threads = names(document, "thread")
    on = {event["name"]: threads[event["pid"], event["tid"]] for event in of_phase(document, "X")}
    assert [on[f"0SA{index}"] for index in range(3)] == [
        "rank 1 → rank 0",
        "rank 1 → rank 0 (2)",
        "rank 1 → rank 0",
    ]


def test_the_file_is_the_document_and_written_whole(tmp_path: Path, timeline: Timeline) -> None:
    path = tmp_path / "new" / "trace.json"
    save_chrome_trace(path, timeline, title="a")
    assert json.loads(path.read_text(encoding="utf-8")) == chrome_trace(timeline, title="a")
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    with pytest.raises(ConfigurationError, match="cannot be written"):
        save_chrome_trace(path / "below_a_file.json", timeline)


def test_arrows_lead_to_whoever_has_the_micro_batch_on_the_next_stage() -> None:
    document = chrome_trace(an_unlike_timeline())
    ways = [name for name in names(document, "thread").values() if "→" in name]
    assert {name.split(" (")[0] for name in ways} == {
        "rank 0 → rank 1",
        "rank 0 → rank 2",
        "rank 1 → rank 0",
        "rank 2 → rank 0",
    }
    # Six micro-batches, there and back.
    assert len(of_phase(document, "s")) == len(of_phase(document, "f")) == 12
    ends = Counter(event["tid"] - 1 for event in of_phase(document, "f"))
    assert ends == {0: 6, 1: 3, 2: 3}


def test_several_timelines_have_processes_threads_and_arrows_of_their_own(timeline: Timeline) -> None:
    single, document = chrome_trace(timeline), chrome_trace({"predicted": timeline, "measured": timeline})
    assert list(names(document, "process").values()) == [
        "predicted · replica 0",
        "predicted · replica 1",
        "measured · replica 0",
        "measured · replica 1",
    ]
    threads = names(document, "thread")
    assert len({thread for _, thread in threads}) == len(threads) == 2 * len(names(single, "thread"))
    arrows = [event["id"] for event in of_phase(document, "s")]
    assert len(set(arrows)) == len(arrows) == 2 * len(of_phase(single, "s"))
    assert set(document["otherData"]["timelines"]) == {"predicted", "measured"}


def test_how_long_a_rank_waited_is_told_of_what_it_waited_for() -> None:
    events = (
        TimelineEvent(action=Action.parse("0F0"), global_rank=1, start_s=0.0, end_s=1.0),
        TimelineEvent(action=Action.parse("1F0"), global_rank=0, start_s=2.0, end_s=3.0, waited_s=2.0),
    )
    document = chrome_trace(Timeline(events=events, step_s=3.0, bubble_fraction=0.5))
    waited = {event["name"]: event["args"].get("waited_us") for event in of_phase(document, "X")}
    assert waited == {"0F0": None, "1F0": 2e6}
