"""Measures the links between the ranks of a running process group. The only file of this package that imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_autopipe.cluster.flows import (
    MESSAGE_BYTES,
    MeasuredRound,
    Round,
    fit_flow,
    measurement_rounds,
)
from lightning_autopipe.core.errors import PipelineRuntimeError

T = TypeVar("T")

_NUM_REPEATS = 5
_NUM_PINGS = 10
_PING_BYTES = 8
_SETTLE_S = 0.002
"""Between a common start and the messages: the first ones would hold up what tells the last ranks to start."""
_SIZE_LIMIT_S = 0.5
"""What the repeats of one size may be expected to take; larger sizes are left out."""


def measure_links(
    servers: Sequence[str],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    budget_s: float = 20.0,
    timeout_s: float = 30.0,
    rounds: Sequence[Round] | None = None,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
) -> tuple[MeasuredRound, ...]:
    """Latency and bandwidth of flows between ranks, alone and at once; equal on all ranks. Every rank calls it alike.

    Each round is timed from a common start to the arrival of its messages, for growing sizes, several times each.

    Args:
        servers: Of each global rank; ranks of one server are measured in more detail.
        group: All ranks, with nothing else under way in it; None: the default group.
        device: Where messages lie: that of the rank's accelerator for NCCL.
        budget_s: No round begins after this time; those left out are missing in the result. The first always runs.
        timeout_s: Limit of each wait for another rank.
        rounds: What to measure; None: `measurement_rounds`.
        message_bytes: Ascending sizes of messages.

    Raises:
        PipelineRuntimeError: a rank did not answer within ``timeout_s``, or its connection broke.
    """
    meter = _Meter(group, torch.device(device), timeout_s, message_bytes)
    began = time.monotonic()
    measured: list[MeasuredRound] = []
    for each in measurement_rounds(servers) if rounds is None else rounds:
        # What the slowest clock says decides for all, so that nobody waits for a round that others leave out.
        if measured and meter.agree(time.monotonic() - began, f"the start of round {each.name!r}") > budget_s:
            break
        measured.append(meter.run(each))
    return tuple(measured)


class _Meter:
    """One rank's part in all rounds."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, timeout_s: float, message_bytes: Sequence[int]
    ) -> None:
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._message_bytes = message_bytes
        self._own = dist.get_rank()

    def run(self, each: Round) -> MeasuredRound:
        """A round and how fast its flows were."""
        where = f"round {each.name!r} ({', '.join(map(str, each.flows))})"
        seconds: list[dict[int, list[float]]] = [{} for _ in each.flows]
        last_s: dict[int, list[float]] = {}
        for num_bytes in self._message_bytes:
            self._burst(each, num_bytes, where)  # connections open, buffers are touched
            for _ in range(_NUM_REPEATS):
                burst_s = self._burst(each, num_bytes, where)
                last_s.setdefault(num_bytes, []).append(max(burst_s))
                for flow_index, flow_s in enumerate(burst_s):
                    seconds[flow_index].setdefault(num_bytes, []).append(flow_s)
            slowest_s = max(median(times[num_bytes]) for times in seconds)
            following = [size for size in self._message_bytes if size > num_bytes]
            if following and slowest_s * following[0] / num_bytes * (_NUM_REPEATS + 1) > _SIZE_LIMIT_S:
                break
        round_trip_s = self._round_trip(each, where) if len(each.flows) == 1 else None
        return MeasuredRound(
            round=each,
            times=tuple(fit_flow(times, round_trip_s=round_trip_s) for times in seconds),
            together_bytes_per_s=len(each.flows) * max(last_s) / median(last_s[max(last_s)]),
        )

    def agree(self, value: float, where: str) -> float:
        """The largest of all ranks' values."""
        return self._largest([value], where)[0]

    def _burst(self, each: Round, num_bytes: int, where: str) -> list[float]:
        """Seconds of one message of every flow, all at once, from the common start to their arrival."""
        incoming = [index for index, flow in enumerate(each.flows) if flow.receiver == self._own]
        outgoing = [index for index, flow in enumerate(each.flows) if flow.sender == self._own]
        buffers = {
            index: torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) for index in incoming + outgoing
        }
        self.agree(0.0, f"the start of {where}")
        time.sleep(_SETTLE_S)
        began = time.perf_counter()
        # Receives first, so that no send waits for its receive to be posted.
        operations = [
            dist.P2POp(dist.irecv, buffers[index], each.flows[index].sender, self._group) for index in incoming
        ]
        operations += [
            dist.P2POp(dist.isend, buffers[index], each.flows[index].receiver, self._group) for index in outgoing
        ]
        own = [0.0] * len(each.flows)
        if operations:
            works = self._limited(lambda: dist.batch_isend_irecv(operations), where)
            # Gloo gives one work for each operation, NCCL one for all.
            for position, work in enumerate(works):
                self._wait(work, where)
                arrived = incoming if len(works) < len(operations) else incoming[position : position + 1]
                for index in arrived:
                    own[index] = time.perf_counter() - began
        return self._largest(own, where)

    def _round_trip(self, each: Round, where: str) -> float:
        """Seconds of a small message there and back."""
        flow = each.flows[0]
        trips = []
        ping = torch.zeros(_PING_BYTES, dtype=torch.uint8, device=self._device)
        for _ in range(_NUM_PINGS):
            began = time.perf_counter()
            if self._own == flow.sender:
                self._one(dist.isend, ping, flow.receiver, where)
                self._one(dist.irecv, ping, flow.receiver, where)
                trips.append(time.perf_counter() - began)
            elif self._own == flow.receiver:
                self._one(dist.irecv, ping, flow.sender, where)
                self._one(dist.isend, ping, flow.sender, where)
        return self.agree(median(trips) if trips else 0.0, where)

    def _one(self, operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int, where: str) -> None:
        work = self._limited(lambda: operation(tensor, peer, group=self._group), where)
        assert work is not None
        self._wait(work, where)

    def _largest(self, values: list[float], where: str) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        work = self._limited(
            lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True), where
        )
        assert work is not None
        self._wait(work, where)
        largest: list[float] = tensor.tolist()
        return largest

    def _wait(self, work: dist.Work, where: str) -> None:
        def wait() -> None:
            work.wait(self._timeout)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        self._limited(wait, where)

    def _limited(self, call: Callable[[], T], where: str) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise PipelineRuntimeError(
                f"rank {self._own}, measuring links, {where}: another rank did not answer within "
                f"{self._timeout.total_seconds():g} s (timeout_s), or has ended: {str(error).splitlines()[0]}"
            ) from error
