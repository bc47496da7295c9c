"""The layers of one trace at the places of another's."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopipe.capture.cuts import CutTable, layers_from_keys, positions_from_keys
from lightning_autopipe.capture.records import CutKey, Layer, StepTrace
from lightning_autopipe.core.errors import CaptureError


def align_layers(trace: StepTrace, table: CutTable, keys: Sequence[CutKey]) -> tuple[Layer, ...]:
    """Give the layers of a trace (a micro-batch's) that begin where those of another one (a batch's) begin.

    Args:
        trace: whose layers are wanted.
        table: its cuts.
        keys: where the layers begin, the first one included.

    Raises:
        CaptureError: the trace cannot be cut at one of these places.
    """
    positions = positions_from_keys(trace, table, keys[1:])
    if positions is None or sorted({0, *positions}) != [0, *positions]:
        raise CaptureError("the step of one micro-batch cannot be cut where that of the whole batch can")
    return layers_from_keys(trace, table, keys)
