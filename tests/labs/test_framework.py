"""The checks' framework: whatever an answer does, a check answers in one line and never raises."""

from __future__ import annotations

import pytest

from contbatch import labs
from contbatch.errors import UnknownName
from contbatch.labs import Exercise, Fault, Mistake, Rule, function_exercise, value_exercise
from contbatch.labs.guard import is_stub
from contbatch.trace import Trace


def double(numbers: list[int]) -> list[int]:
    return [2 * n for n in numbers]


DOUBLE = function_exercise(
    "99.1",
    "double",
    double,
    {"an empty list stays empty": [([],)], "each number is doubled": [([1],), ([1, 2],)]},
    [Mistake("you added one instead", lambda numbers: [n + 1 for n in numbers])],
    list,
    "a list",
)


def test_the_reference_passes_every_rule() -> None:
    result = DOUBLE.check(double)
    assert result.passed
    assert repr(result) == "99.1 double: PASS 2/2"


def test_an_untouched_stub_is_not_yet() -> None:
    def dots(numbers):
        """Say twice."""

    def raises(numbers):
        raise NotImplementedError

    def returns_dots(numbers):
        result = ...
        return result

    for stub in (dots, raises, returns_dots, ..., None, lambda numbers: ...):
        result = DOUBLE.check(stub)
        assert result.not_yet and not result.passed
        assert repr(result) == "99.1 double: NOT YET - write the function first"


def test_a_function_that_does_something_is_no_stub() -> None:
    assert not is_stub(lambda: 5)
    assert not is_stub(lambda: print())
    assert not is_stub(0)
    assert not is_stub([])


def test_the_smallest_failing_example_is_shown_as_code() -> None:
    result = DOUBLE.check(lambda numbers: list(numbers))
    assert repr(result) == (
        "99.1 double: 1/2 - each number is doubled; smallest failing example: double([1]) returned [1], not [2]"
    )


def test_a_known_mistake_is_named() -> None:
    assert "you added one instead" in repr(DOUBLE.check(lambda numbers: [n + 1 for n in numbers]))


def test_a_tuple_counts_as_a_list() -> None:
    mistaken = function_exercise("99.2", "t", double, {"r": [([1],)]})
    assert mistaken.check(lambda numbers: tuple(double(numbers))).passed


def loops(numbers):
    while True:
        pass


def loops_over_exceptions(numbers):
    while True:
        try:  # noqa: SIM105  # as a student would write it
            numbers = numbers[:]
        except Exception:
            pass


def calls_itself(numbers):
    return calls_itself(numbers)


def edits(numbers):
    numbers.append(0)
    return numbers


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (loops, "still running after 100,000 lines"),
        (loops_over_exceptions, "still running after 100,000 lines"),
        (calls_itself, "calls itself without end"),
        (edits, "changed what it was given"),
        (lambda numbers: numbers.sort(), "returned None"),
        (lambda numbers: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda one, two: [], "raised TypeError"),
        (lambda numbers: exit(), "called exit()"),
        (lambda numbers: 5, "it must return a list"),
        ([2, 4], "this is not a function but [2, 4]; pass double without brackets"),
    ],
)
def test_a_strange_answer_gets_a_kind_sentence(answer, words: str, capsys) -> None:
    result = DOUBLE.check(answer)
    assert not result.passed and not result.not_yet
    assert words in repr(result)
    assert "\n" not in repr(result)


def test_prints_of_an_answer_are_not_shown(capsys) -> None:
    def prints(numbers):
        print("here")
        return double(numbers)

    assert DOUBLE.check(prints).passed
    assert capsys.readouterr().out == ""


def test_a_strange_equality_does_not_stop_a_check() -> None:
    class Strange:
        def __eq__(self, other):
            raise ValueError("no")

    assert not value_exercise("99.3", "v", 3, lambda value: f"{value + 1} it is not").check(Strange()).passed


def test_values_true_and_one_are_different() -> None:
    exercise = value_exercise("99.3", "value", 1, lambda value: f"not {value}")
    assert exercise.check(1).passed
    assert not exercise.check(True).passed
    assert repr(exercise.check(...)) == "99.3 value: NOT YET - replace the ... with your answer first"
    assert repr(exercise.check(2)) == "99.3 value: 0/1 - not 2"
    assert "is a str; the answer is a int" in repr(value_exercise("99.3", "v", 1, lambda v: f"{v + 1}").check("2"))


def test_html_says_the_verdict_in_words_and_escapes() -> None:
    result = value_exercise("99.3", "<b>", "x", lambda value: f"not {value}").check("</script>")
    html = result._repr_html_()
    assert "</script>" not in html and "&lt;/script&gt;" in html
    assert "broken" in html and "✘" in html
    assert "✔" in DOUBLE.check(double)._repr_html_() and "kept" in DOUBLE.check(double)._repr_html_()
    assert "NOT YET" in DOUBLE.check(...)._repr_html_()


def test_a_fault_in_a_run_says_where_to_look() -> None:
    exercise = Exercise("99.4", "run", 0, [Rule("no rule", lambda answer: Fault("it went wrong", "", Trace(), 7))])
    assert repr(exercise.check(1)) == "99.4 run: 0/1 - it went wrong; result.player shows step 7"


def test_an_unknown_exercise_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match=r"06\.99.*06\.1"):
        labs.check("06.99", 1)
    with pytest.raises(UnknownName, match="numbers look like"):
        labs.check("nonsense", 1)
    with pytest.raises(UnknownName, match="numbers look like"):
        labs.check("../x.1", 1)
