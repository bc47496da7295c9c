"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Nothing is read from or written to the home of whoever runs the tests; processes that tests start inherit it.
os.environ["LIGHTNING_AUTOPIPE_CACHE"] = "off"

# No example fails for being slow on a busy machine.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
