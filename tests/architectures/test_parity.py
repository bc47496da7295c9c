"""Quick form of the table in docs/architectures.md: every architecture cut into four stages."""

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
    assert len(found.trace.layers) >= architecture.min_layers
    *_, most_stages = planned_cuts(len(found.trace.layers))
    differs = difference(module, batch, found, most_stages, reference)
    assert differs.relative <= MAX_RELATIVE_DIFFERENCE[architecture.dtype], differs
