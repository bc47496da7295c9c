"""What any rank may decide by itself between two batches, asked of all ranks by one small message."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class SharedDecisions:
    """Named questions, each answered with yes where some rank says so; all of them are asked at once.

    Behind each batch it is asked once, for `stopping` and for `termination`: a message costs what it costs whether it
    carries two answers or four.

    Args:
        on_any_rank: For each of some decisions whether it is True on some rank. Collective over all ranks.
    """

    def __init__(self, on_any_rank: Callable[[Sequence[bool]], Sequence[bool]]) -> None:
        self._on_any_rank = on_any_rank
        self._questions: dict[str, Callable[[], bool]] = {}
        self._answers: dict[str, bool] | None = None

    def add(self, name: str, question: Callable[[], bool]) -> None:
        """Adds what is asked on this rank; all ranks add the same in the same order."""
        self._questions[name] = question

    def ask(self) -> dict[str, bool]:
        """The answers as they are now. Collective over all ranks."""
        votes = [question() for question in self._questions.values()]
        self._answers = dict(zip(self._questions, self._on_any_rank(votes), strict=True))
        return self._answers

    def latest(self) -> dict[str, bool]:
        """The answers since the last call of this; asks where nobody has asked since. Collective over all ranks."""
        answers = self._answers or self.ask()
        self._answers = None
        return answers
