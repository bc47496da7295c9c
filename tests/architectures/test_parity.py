"""Quick form of the table in docs/architectures.md: every architecture cut in two in the middle, and in four."""

from __future__ import annotations

import pytest

from tests.architectures.catalog import ARCHITECTURES
from tests.architectures.parity import MAX_RELATIVE_DIFFERENCE, difference, planned_cuts, uncut
from tests.capture.support import traced


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cut_as_uncut(name: str) -> None:
    architecture = ARCHITECTURES[name]
    module, batch = architecture.module(), architecture.batch()
    reference = uncut(module, batch)
    found = traced(module, (batch, 0))
    cuts = list(planned_cuts(len(found.trace.layers)))
    assert len(found.trace.layers) >= architecture.min_layers
    for cut_points in (cuts[len(cuts) // 2], cuts[-1]):
        differs = difference(module, batch, found, cut_points, reference)
        assert differs.relative <= MAX_RELATIVE_DIFFERENCE[architecture.dtype], differs
