"""What a check answers: one line of text, the same in colour for a notebook, and the run where it went wrong.

A result is never raised. An exercise that is not done yet is no error, and a wrong answer is told in words: which
rule it breaks, and the smallest example that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from contbatch.trace import Trace

if TYPE_CHECKING:
    from contbatch.viz.player import Player


class Fault(NamedTuple):
    """One thing that is wrong with an answer.

    Args:
        words: the broken rule, as a sentence part without a full stop.
        example: the smallest example that shows it, as code and what came out.
        trace, step: the run in which it happened, and the guilty step.
    """

    words: str
    example: str = ""
    trace: Trace | None = None
    step: int = 0


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of one check.

    Args:
        number, title: of the exercise.
        rules: every rule that was tried, and whether the answer keeps it.
        fault: what is wrong first; None if nothing is.
        todo: what to do first, where the exercise is not done yet.
    """

    number: str
    title: str
    rules: tuple[tuple[str, bool], ...] = ()
    fault: Fault | None = None
    todo: str = ""
    _players: list[Player] = field(default_factory=list, init=False, compare=False)

    @property
    def passed(self) -> bool:
        """True if every rule is kept."""
        return not self.todo and self.fault is None

    @property
    def not_yet(self) -> bool:
        """True if there is no answer yet."""
        return bool(self.todo)

    @property
    def player(self) -> Player | None:
        """The run that shows the fault, opened at the guilty step; None where there is no such run."""
        if self.fault is None or self.fault.trace is None:
            return None
        if not self._players:
            from contbatch.viz import Player

            title = f"{self.number} {self.title}: {self.fault.words}"
            self._players.append(Player(self.fault.trace, title=title, t=self.fault.step))
        return self._players[0]

    @property
    def verdict(self) -> str:
        """The line without number and title."""
        kept = sum(ok for _, ok in self.rules)
        if self.todo:
            return f"NOT YET - {self.todo}"
        if self.fault is None:
            return f"PASS {kept}/{len(self.rules)}"
        example = f"; smallest failing example: {self.fault.example}" if self.fault.example else ""
        run = f"; result.player shows step {self.fault.step}" if self.fault.trace is not None else ""
        return f"{kept}/{len(self.rules)} - {self.fault.words}{example}{run}"

    def __repr__(self) -> str:
        return f"{self.number} {self.title}: {self.verdict}"

    def _repr_html_(self) -> str:
        mark = "○" if self.todo else "✔" if self.passed else "✘"
        colour = "#999999" if self.todo else "#009E73" if self.passed else "#D55E00"
        rules = "".join(f"<li>{'✔ kept' if ok else '✘ broken'}: {escape(words)}</li>" for words, ok in self.rules)
        return (
            f'<div style="border-left:6px solid {colour};padding:4px 12px;font-size:16px">'
            f'<strong><span aria-hidden="true">{mark}</span> {escape(f"{self.number} {self.title}")}</strong>: '
            f"{escape(self.verdict)}"
            + (f'<ul style="list-style:none;margin:4px 0 0;padding:0">{rules}</ul>' if rules else "")
            + "</div>"
        )
