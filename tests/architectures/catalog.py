"""All architectures, by name."""

from __future__ import annotations

from tests.architectures.architecture import Architecture
from tests.architectures.language import LANGUAGE
from tests.architectures.perception import PERCEPTION
from tests.architectures.plain import PLAIN

ARCHITECTURES: dict[str, Architecture] = {**LANGUAGE, **PERCEPTION, **PLAIN}
