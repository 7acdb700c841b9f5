"""Text from a stream of tokens: whole characters only, never taken back, stop strings never shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contbatch.detokenize import IncrementalDetokenizer
from tests.toy import Bytes, Pieces


def feed(
    decoder: Bytes | Pieces | None, tokens: Sequence[int], stop: Sequence[str] = ()
) -> tuple[list[str], IncrementalDetokenizer]:
    """The pieces of text that come out token by token, until a stop string is found; then the flush."""
    detokenizer = IncrementalDetokenizer(decoder, stop)
    released = []
    for token in tokens:
        released.append(detokenizer.feed(token))
        if detokenizer.stopped:
            break
    released.append(detokenizer.flush())
    assert detokenizer.text == "".join(released), "what was given out is the text"
    return released, detokenizer


@pytest.mark.parametrize(
    ("text", "released"),
    [
        ("ďx", ["", "ď", "x", ""]),
        ("😀", ["", "", "", "😀", ""]),
        ("a€b", ["a", "", "", "€", "b", ""]),
        ("é\n", ["", "é", "\n", ""]),
    ],
)
def test_b158_characters_of_several_tokens_come_whole(text: str, released: list[str]) -> None:
    assert feed(Bytes(), list(text.encode()))[0] == released


def test_b158_joined_emoji_and_text_around_it() -> None:
    text = "hi 👩‍👩‍👧 x"
    released, _ = feed(Bytes(), list(text.encode()))
    assert "".join(released) == text and not any("\ufffd" in piece for piece in released)


def test_an_incomplete_character_at_the_end_shows_as_u_fffd() -> None:
    released, detokenizer = feed(Bytes(), [*b"ok", 0xC4])
    assert released == ["o", "k", "", "\ufffd"] and detokenizer.text == "ok\ufffd"


def test_bytes_that_are_no_text_do_not_hold_up_what_follows() -> None:
    _, detokenizer = feed(Bytes(), [0xFF, 0xC4, *b"abc"])
    assert detokenizer.text == "\ufffd\ufffdabc"


def test_a_tokenizer_that_means_u_fffd_loses_nothing() -> None:
    _, detokenizer = feed(Pieces("a", "\ufffd", "b"), [0, 1, 1, 2, 1])
    assert detokenizer.text == "a\ufffd\ufffdb\ufffd"


def test_tokens_without_text_are_harmless() -> None:
    released, _ = feed(Pieces("", "a", ""), [0, 1, 2, 1])
    assert released == ["", "a", "", "a", ""]


@pytest.mark.parametrize(
    ("pieces", "stop", "released", "stopped"),
    [
        (["The", " quick", " br", "own", " fox", " jumps"], ["own fox"], "The quick br", True),
        ([" four,", " five", " six,"], ["five"], " four, ", True),
        (["ple", "as"], ["please"], "pleas", False),
        (["ab", "ab", "ac"], ["abac"], "ab", True),
        (["aaa", "ab"], ["aab"], "aa", True),
        (["one", "two"], ["three", "two"], "one", True),
        (["a", "b", "c"], ["bc", "b"], "a", True),
        (["ab"], ["b", "ab"], "", True),
        (["x"], ["x"], "", True),
        (["no", "thing"], [], "nothing", False),
        (["ends with sto"], ["stop"], "ends with sto", False),
        (["s", "t", "o", "x"], ["stop"], "stox", False),
    ],
)
def test_b145_b147_b153_stop_strings(pieces: list[str], stop: list[str], released: str, stopped: bool) -> None:
    _, detokenizer = feed(Pieces(*pieces), range(len(pieces)), stop)
    assert detokenizer.text == released and detokenizer.stopped is stopped


def test_text_is_held_only_while_it_could_become_a_stop_string() -> None:
    released, _ = feed(Pieces("ple", "as", "e", "ant", "!"), [0, 1, 3, 4], ["please"])
    assert released == ["", "", "pleasant", "!", ""]


def test_nothing_comes_after_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(Pieces("a", "STOP", "b"), ["STOP"])
    assert [detokenizer.feed(token) for token in (0, 1, 2)] == ["a", "", ""]
    assert detokenizer.flush() == "" and detokenizer.text == "a"


def test_a_stop_string_found_at_the_flush_is_cut_too() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), ["b"])
    for token in b"a":
        detokenizer.feed(token)
    assert IncrementalDetokenizer(Pieces("b\ufffd"), ["b"]).flush() == ""
    late = IncrementalDetokenizer(Pieces("b\ufffd"), ["b"])
    assert late.feed(0) == "" and not late.stopped, "held: it may still become a character"
    assert late.flush() == "" and late.stopped


def test_flush_twice_gives_nothing_more() -> None:
    detokenizer = IncrementalDetokenizer(Bytes(), ["stop"])
    for token in b"sto":
        detokenizer.feed(token)
    assert detokenizer.flush() == "sto" and detokenizer.flush() == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    released, detokenizer = feed(None, [1, 2, 3])
    assert released == [""] * 4 and detokenizer.text == ""


@given(text=st.text(max_size=20), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3), data=st.data())
def test_any_text_in_any_pieces(text: str, stop: list[str], data: st.DataObject) -> None:
    """Whatever the tokens, a stream shows the text up to the first stop string, and shows none of that."""
    text = text.replace("\ufffd", "")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text))), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for decoder, tokens in ((Pieces(*pieces), list(range(len(pieces)))), (Bytes(), list(text.encode()))):
        _, detokenizer = feed(decoder, tokens, stop)
        found = [text.find(word) for word in stop if word in text]
        assert not any(word in detokenizer.text for word in stop)
        assert text.startswith(detokenizer.text)
        assert detokenizer.stopped is bool(found)
        if not found:
            assert detokenizer.text == text
        if len(stop) == 1 and found:
            assert detokenizer.text == text[: found[0]]
