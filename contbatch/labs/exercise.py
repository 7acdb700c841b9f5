"""Exercises: a number, a title, our own answer, and the rules that a right answer keeps.

Two kinds cover most of them. `function_exercise` compares a function with ours on examples, smallest first, and
knows some wrong functions: an answer that behaves like one of them is told which mistake it makes.
`value_exercise` is for a number or a choice, with a sentence for each wrong one that is likely. Anything else is an
`Exercise` with rules of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from contbatch.labs.guard import NotYet, Trouble, ask, call_text, is_stub, same
from contbatch.labs.result import Fault, Result

WRITE_FUNCTION = "write the function first"
GIVE_VALUE = "replace the ... with your answer first"


class Rule(NamedTuple):
    """One thing that a right answer does: in words, and how to see whether a given answer does it.

    `look` returns the fault or None. It may raise `Trouble` and `NotYet`, as `ask` does.
    """

    words: str
    look: Callable[[Any], Fault | None]


class Mistake(NamedTuple):
    """A wrong function that people write, and what to tell them."""

    words: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        number: of the notebook and in it, such as "06.1".
        title: a few words.
        reference: our own answer.
        rules: what a right answer does, the simplest first.
        todo: what to tell whoever has not begun.
    """

    number: str
    title: str
    reference: Any
    rules: Sequence[Rule]
    todo: str = WRITE_FUNCTION

    def check(self, answer: Any) -> Result:
        """Try every rule on an answer."""
        if is_stub(answer):
            return Result(self.number, self.title, todo=self.todo)
        try:
            faults = [self._try(rule, answer) for rule in self.rules]
        except NotYet:
            return Result(self.number, self.title, todo=self.todo)
        kept = tuple((rule.words, fault is None) for rule, fault in zip(self.rules, faults, strict=True))
        first = next((fault for fault in faults if fault is not None), None)
        return Result(self.number, self.title, kept, first)

    def _try(self, rule: Rule, answer: Any) -> Fault | None:
        try:
            return rule.look(answer)
        except Trouble as trouble:
            return Fault(trouble.words, trouble.example)


def function_exercise(
    number: str,
    title: str,
    reference: Callable[..., Any],
    examples: Mapping[str, Sequence[tuple[Any, ...]]],
    mistakes: Sequence[Mistake] = (),
    returns: type | tuple[type, ...] = object,
    a: str = "",
) -> Exercise:
    """An exercise whose answer is a function that must agree with ours.

    Args:
        number, title: as in `Exercise`.
        reference: our function; its name is the one in messages.
        examples: rule in words -> argument tuples, the smallest first.
        mistakes: known wrong functions, the most telling first.
        returns: what the function must return, and `a`: the same in words ("a list of numbers").
    """
    every = [arguments for group in examples.values() for arguments in group]

    def explain(answer: Any, words: str) -> str:
        for mistake in mistakes:
            if all(_agree(answer, mistake.function, arguments) for arguments in every):
                return mistake.words
        return words

    def rule(words: str, group: Sequence[tuple[Any, ...]]) -> Rule:
        def look(answer: Any) -> Fault | None:
            if not callable(answer):
                return Fault(f"this is not a function but {answer!r}; pass {reference.__name__} without brackets")
            for arguments in group:
                got, right = ask(answer, *arguments), reference(*arguments)
                call = call_text(reference, arguments)
                if not isinstance(got, returns):
                    return Fault(f"it must return {a}", f"{call} returned {got!r}")
                if not same(_plain(got), _plain(right)):
                    return Fault(explain(answer, words), f"{call} returned {got!r}, not {right!r}")
            return None

        return Rule(words, look)

    return Exercise(number, title, reference, [rule(words, group) for words, group in examples.items()])


def _plain(value: Any) -> Any:
    """A tuple counts as the list of the same values."""
    return list(value) if isinstance(value, tuple) else value


def _agree(answer: Any, wrong: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
    try:
        return same(_plain(ask(answer, *arguments)), _plain(wrong(*arguments)))
    except (Trouble, NotYet):
        return False


def value_exercise(
    number: str,
    title: str,
    reference: Any,
    explain: Callable[[Any], str],
    rule: str = "the answer is right",
) -> Exercise:
    """An exercise whose answer is a number or a choice.

    Args:
        number, title: as in `Exercise`.
        reference: the right value.
        explain: what to say to a wrong value; it may raise, then the value was of a strange kind.
        rule: what is asked, in words.
    """

    def look(answer: Any) -> Fault | None:
        if same(answer, reference):
            return None
        try:
            return Fault(explain(answer))
        except Exception:  # a value of a kind that was not expected
            return Fault(f"{answer!r} is a {type(answer).__name__}; the answer is a {type(reference).__name__}")

    return Exercise(number, title, reference, [Rule(rule, look)], GIVE_VALUE)
