"""Measuring how long a device works."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch


class Stopwatch:
    """Measures one span on the CPU, in wall time, or on a CUDA device, between two events in its stream."""

    host_clock: ClassVar[Callable[[], float]] = staticmethod(time.perf_counter)
    """What tells the time on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._marks: list[Any] = []
        self.excluded_s = 0.0
        """Time inside the span that does not count; on a CUDA device, which works on meanwhile, it does not matter."""

    def start(self) -> None:
        """Begin the span."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        self.excluded_s = 0.0
        self._marks = [self._mark()]

    @property
    def is_running(self) -> bool:
        """Whether the span has begun and not ended."""
        return len(self._marks) == 1

    def stop(self) -> None:
        """End the span."""
        self._marks.append(self._mark())

    def elapsed_s(self) -> float:
        """Give the span's length in seconds; waits for the device."""
        begin, end = self._marks
        if self._is_cuda:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3
        return max(float(end - begin) - self.excluded_s, 0.0)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return Stopwatch.host_clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
