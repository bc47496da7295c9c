"""What holds for all tests."""

from __future__ import annotations

import os

# Nothing is read from or written to the home of whoever runs the tests; processes that tests start inherit it.
os.environ["LIGHTNING_AUTOPIPE_CACHE"] = "off"
