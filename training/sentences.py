"""Which of the teacher's sentences go into the corpus.

The one idea: a sentence is kept or the text is cut before it, so that what stays is always the beginning of what the
teacher wrote and hangs together. Refused are sentences that were cut off, that repeat, that bring in strangers (a name
that is not of this world), that are long or hard to read, and words that are not for a classroom.
"""

from __future__ import annotations

import re

from world import BOYS, GIRLS, PETS

PROPER = {*GIRLS, *BOYS, *PETS, "I", "Mom", "Dad", "Grandma", "Grandpa", "Mommy", "Daddy"}
UNFIT = re.compile(
    r"\b(kill\w*|dead|death|die[ds]?|dying|blood\w*|gun\w*|shot|shoot\w*|knife|weapon\w*|war|fight\w*|fought|hit|beat|"
    r"hate[ds]?|stupid|ugly|fat|drunk|wine|beer|drug\w*|smok\w*|naked|sex\w*|kiss\w*|love[rd]? affair|hell|devil|god|"
    r"jesus|church|pray\w*|money|dollars?|police|prison|jail|steal|stole\w*|thief|evil|witch\w*|ghost\w*|monster\w*|"
    r"poison\w*|bomb\w*|burn\w*|cry baby|slave\w*|marry|married|husband|wife|pregnan\w*|butt|poop\w*|pee|bitch|damn|"
    r"crazy|idiot|bully\w*|bullie\w*|attack\w*|scream\w*|disease|hospital|cancer|story|stories|author|character\w*|"
    r"reader\w*|chapter|title|moral|lesson|english|user|assistant|prompt|ai|medicine|company|"
    r"bathroom|eat (him|her|them|you)|ate (him|her|them))\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?]+\"?(?=\s|$)")
ALLOWED = re.compile(r"[A-Za-z .,!?'\"-]+")
MOST_WORDS, LONGEST_WORD = 20, 10


def normalise(text: str) -> str:
    """Straight quotes and single spaces."""
    for curly, straight in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("—", ", "), ("…", "...")):
        text = text.replace(curly, straight)
    return re.sub(r"\s+", " ", text).strip()


def good_beginning(before: str, text: str, most: int = 3) -> str:
    """The first sentences of `text` that are fit to stand after `before`; "" if there is none."""
    kept: list[str] = []
    earlier = [words_of(sentence) for sentence in split(before)]
    for sentence in split(normalise(text))[:most]:
        words = words_of(sentence)
        if not is_readable(sentence) or any(repeats(words, other) for other in earlier):
            break
        kept.append(sentence)
        earlier.append(words)
    return " ".join(kept)


def split(text: str) -> list[str]:
    """Whole sentences; one in which speech is still open is joined to the next. A cut-off rest is dropped."""
    sentences, start = [], 0
    for match in SENTENCE_END.finditer(text):
        sentence = text[start : match.end()].strip()
        if sentence.count('"') % 2 == 0:
            sentences.append(sentence)
            start = match.end()
    return sentences


def is_readable(sentence: str) -> bool:
    """Short, plain, of this world, fit for a classroom."""
    words = re.findall(r"[A-Za-z']+", sentence)
    inner = re.findall(r"(?<![.!?\"] )(?<![\"^])\b[A-Z][a-z]*", sentence[1:])
    return (
        2 <= len(words) <= MOST_WORDS
        and ALLOWED.fullmatch(sentence) is not None
        and max(map(len, words)) <= LONGEST_WORD
        and all(name in PROPER for name in inner)
        and len(set(words)) > len(words) / 2
        and UNFIT.search(sentence) is None
        and (sentence[0].isupper() or sentence[0] == '"')
        and not re.search(r"\b(\w+) \1\b", sentence, re.IGNORECASE)
    )


def words_of(sentence: str) -> frozenset[str]:
    """The set of lower-case words."""
    return frozenset(re.findall(r"[a-z']+", sentence.lower()))


def repeats(words: frozenset[str], other: frozenset[str]) -> bool:
    """True if most of the words are the same."""
    return len(words & other) > 0.7 * len(words | other)
