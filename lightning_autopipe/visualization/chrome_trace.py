"""A timeline as a Chrome trace, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_autopipe.core.cluster import ClusterTopology
from lightning_autopipe.core.files import write_whole
from lightning_autopipe.core.schedule import Action
from lightning_autopipe.core.timeline import Timeline
from lightning_autopipe.visualization.lanes import Bar, BarKind, Lane, Message, Ranks, make_lanes, make_messages

# Names from the viewer's own palette of colours.
_COLOURS = {
    BarKind.FORWARD: "thread_state_running",
    BarKind.FORWARD_SLICE: "thread_state_running",
    BarKind.BACKWARD: "thread_state_iowait",
    BarKind.BACKWARD_SLICE: "thread_state_iowait",
    BarKind.BACKWARD_INPUT: "thread_state_iowait",
    BarKind.BACKWARD_WEIGHT: "thread_state_uninterruptible",
    BarKind.TIED_GRADIENTS: "thread_state_unknown",
    BarKind.GRADIENTS: "thread_state_unknown",
    BarKind.EXCHANGE: "grey",
    BarKind.OPTIMIZER: "good",
}

TraceEvent = dict[str, Any]


def chrome_trace(
    timelines: Timeline | Mapping[str, Timeline],
    *,
    ranks: Ranks = (),
    cluster: ClusterTopology | None = None,
    boundary_bytes: Sequence[tuple[float, float]] = (),
    title: str = "",
    other: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One timeline or several as a document to be written as JSON; times are in microseconds, as the format has them.

    A process for each server, or for each replica where no cluster is given; in it a thread for each rank and for each
    pair of ranks that sends messages. Messages of one pair that overlap get threads side by side. Arrows lead from a
    message to what its receiver computes from it. Several timelines, such as predicted and measured, begin at once,
    each in processes of its own.

    Args:
        timelines: to be shown; several by name.
        ranks: ``ranks[r][s]`` runs stage s of replica r; empty: as the timelines tell.
        cluster: tells which server a rank is in.
        boundary_bytes: bytes across each cut, as for `make_messages`.
        title: kept with the figures of the step.
        other: to be kept with them, too.

    Raises:
        PlanError: a timeline does not tell which rank runs what.
    """
    by_name = {"": timelines} if isinstance(timelines, Timeline) else dict(timelines)
    events: list[TraceEvent] = []
    counts = _Counts()
    for name, timeline in by_name.items():
        messages = make_messages(timeline, ranks, boundary_bytes)
        events += _timeline_events(name, timeline, make_lanes(timeline, ranks), messages, cluster, counts)
    figures = {
        name: {"step_s": timeline.step_s, "bubble_fraction": timeline.bubble_fraction}
        for name, timeline in by_name.items()
    }
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": title, **figures.get("", {"timelines": figures}), **(other or {})},
        # Names first, then by time, as some viewers want it.
        "traceEvents": sorted(events, key=lambda event: (event["ph"] != "M", event.get("ts", 0.0))),
    }


@dataclass(slots=True)
class _Counts:
    """Numbers that are given once in a document. Number 0 is the idle process and thread of the machine to viewers."""

    processes: int = 0
    threads: int = 0
    arrows: int = 0


def _timeline_events(
    timeline_name: str,
    timeline: Timeline,
    lanes: Sequence[Lane],
    messages: Sequence[Message],
    cluster: ClusterTopology | None,
    counts: _Counts,
) -> list[TraceEvent]:
    processes = _process_names(lanes, cluster)
    names = list(dict.fromkeys(processes[lane.global_rank] for lane in lanes))
    process_ids = {rank: 1 + counts.processes + names.index(name) for rank, name in processes.items()}
    first_thread = 1 + counts.threads
    events: list[TraceEvent] = []
    for process_id, name in enumerate(names, start=1 + counts.processes):
        shown = f"{timeline_name} · {name}" if timeline_name else name
        events += _named("process", process_id, 0, shown, process_id)
    inputs: dict[tuple[int, str], tuple[int, Bar]] = {}
    for lane in lanes:
        process_id, thread_id = process_ids[lane.global_rank], first_thread + lane.global_rank
        events += _named("thread", process_id, thread_id, lane.label, lane.stage_index)
        for bar in lane.bars:
            events.append(_complete(process_id, thread_id, bar, lane))
            inputs[lane.global_rank, str(bar.event.action)] = thread_id, bar
    next_thread = first_thread + 1 + max(lane.global_rank for lane in lanes)
    for (sender, receiver), rows in _rows_by_pair(messages):
        for row_index, row in enumerate(rows):
            thread_id, next_thread = next_thread, next_thread + 1
            name = f"rank {sender} → rank {receiver}" + (f" ({row_index + 1})" if row_index else "")
            events += _named("thread", process_ids[sender], thread_id, name, 1_000_000 + sender)
            for message in row:
                events.append(_sent(process_ids[sender], thread_id, message))
                for text in _computed_from(message):
                    if (receiver, text) in inputs:
                        counts.arrows += 1
                        begin, end = (process_ids[sender], thread_id), (process_ids[receiver], *inputs[receiver, text])
                        events += _arrow(counts.arrows, begin, message, *end)
    counts.processes += len(names)
    counts.threads = next_thread - 1
    return events


def save_chrome_trace(
    path: str | os.PathLike[str], timelines: Timeline | Mapping[str, Timeline], **options: Any
) -> None:
    """Write the trace to a file, whole or not at all. Options and errors as of `chrome_trace`, and:

    Raises:
        ConfigurationError: the file cannot be written.
    """
    write_whole(path, json.dumps(chrome_trace(timelines, **options), ensure_ascii=False, allow_nan=False) + "\n")


def _process_names(lanes: Sequence[Lane], cluster: ClusterTopology | None) -> dict[int, str]:
    if cluster is None:
        return {lane.global_rank: f"replica {lane.replica_index}" for lane in lanes}
    servers = {device.global_rank: device.server for device in cluster.devices}
    return {lane.global_rank: f"server {servers.get(lane.global_rank, '?')}" for lane in lanes}


def _named(kind: str, process_id: int, thread_id: int, name: str, position: int) -> Iterator[TraceEvent]:
    where = {"ph": "M", "pid": process_id, "tid": thread_id}
    yield where | {"name": f"{kind}_name", "args": {"name": name}}
    yield where | {"name": f"{kind}_sort_index", "args": {"sort_index": position}}


def _complete(process_id: int, thread_id: int, bar: Bar, lane: Lane) -> TraceEvent:
    action = bar.event.action
    args: dict[str, Any] = {"stage": lane.stage_index, "replica": lane.replica_index, "rank": lane.global_rank}
    if isinstance(action, Action):
        args |= _microbatch(action) | {"stage": action.stage_index}
    if bar.event.waited_s:
        args["waited_us"] = _microseconds(bar.event.waited_s)
    return {
        "name": str(action),
        "cat": bar.kind.value,
        "ph": "X",
        "pid": process_id,
        "tid": thread_id,
        "cname": _COLOURS[bar.kind],
        **_times(bar.event.start_s, bar.event.end_s),
        "args": args,
    }


def _sent(process_id: int, thread_id: int, message: Message) -> TraceEvent:
    args = _microbatch(message.action) | {"from_rank": message.sender, "to_rank": message.receiver}
    if message.num_bytes is not None:
        args["bytes"] = round(message.num_bytes)
    return {
        "name": str(message.action),
        "cat": "message",
        "ph": "X",
        "pid": process_id,
        "tid": thread_id,
        **_times(message.event.start_s, message.event.end_s),
        "args": args,
    }


def _arrow(
    number: int, begin: tuple[int, int], message: Message, process_id: int, thread_id: int, bar: Bar
) -> tuple[TraceEvent, TraceEvent]:
    both = {"name": "message", "cat": "message", "id": number}
    process_and_thread = {"pid": begin[0], "tid": begin[1]}
    return (
        both | process_and_thread | {"ph": "s", "ts": _microseconds(message.event.start_s)},
        both | {"pid": process_id, "tid": thread_id} | {"ph": "f", "bp": "e", "ts": _microseconds(bar.event.start_s)},
    )


def _computed_from(message: Message) -> Iterator[str]:
    """What may be computed from it: a forward, or a backward or the first part of one."""
    action = message.action
    slice_text = "" if action.slice_index is None else f".{action.slice_index}"
    for letter in "F" if message.is_activation else "BI":
        yield f"{action.peer_stage_index}{letter}{action.microbatch_index}{slice_text}"


def _microbatch(action: Action) -> dict[str, Any]:
    args: dict[str, Any] = {"microbatch": action.microbatch_index}
    return args if action.slice_index is None else args | {"slice": action.slice_index}


def _rows_by_pair(messages: Iterable[Message]) -> Iterator[tuple[tuple[int, int], list[list[Message]]]]:
    """Messages of each pair of ranks in rows in which none overlaps another: viewers draw only nested ones else."""
    rows_by_pair: dict[tuple[int, int], list[list[Message]]] = {}
    for message in messages:
        rows = rows_by_pair.setdefault((message.sender, message.receiver), [])
        begin_us = _microseconds(message.event.start_s)
        free = (row for row in rows if _microseconds(row[-1].event.end_s) <= begin_us)
        row = next(free, None)
        if row is None:
            rows.append([message])
        else:
            row.append(message)
    yield from sorted(rows_by_pair.items())


def _times(start_s: float, end_s: float) -> dict[str, float]:
    start, end = _microseconds(start_s), _microseconds(end_s)
    return {"ts": start, "dur": round(end - start, 3)}


def _microseconds(seconds: float) -> float:
    """Rounded to nanoseconds, the finest that viewers know."""
    return round(1e6 * seconds, 3)
