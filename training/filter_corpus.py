"""From the generator's files to the corpus: one story a line, compressed.

Beside the stories that the teacher filled in stand bare ones that it never saw: one plot, or two in a row with the
same cast. They show the student clean what a name at the start has to do with a name at the end.

The one idea: a word that the whole corpus uses once or twice cannot be learned, only stumbled over; stories with such
words are left out. Stories that came out alike are kept once.

    python training/filter_corpus.py part0.jsonl part1.jsonl --out training/corpus.txt.xz
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sentences import words_of
from world import bare_story

BARE_SEED, ORDER_SEED = 21, 22

RARE = 2
"""A word must stand in at least so many of the teacher's stories."""


def main() -> None:
    """Filter, write, and print the numbers that the model card gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="JSON-lines files of generate_corpus.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "corpus.txt.xz", help="%(default)s")
    parser.add_argument("--bare", type=int, default=12000, help="bare stories to add (%(default)s)")
    options = parser.parse_args()
    raw = read(options.files)
    taught = filtered(raw)
    bare = [bare_story(index, BARE_SEED) for index in range(options.bare)]
    stories = list(dict.fromkeys((*taught, *bare)))
    random.Random(ORDER_SEED).shuffle(stories)
    text = "\n".join(stories) + "\n"
    options.out.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(raw)} stories by the teacher, {len(taught)} kept; {len(stories) - len(taught)} bare ones")
    print(f"{len(text.split())} words, {len(text)} characters")
    print(f"{len(set(' '.join(stories).lower().split()))} different words with their punctuation")
    print(f"sha256 of the text {hashlib.sha256(text.encode()).hexdigest()}")
    print(f"{options.out.name}: {options.out.stat().st_size} bytes")


def read(files: Sequence[Path]) -> list[str]:
    """The teacher's stories in order of index; a last line that was cut off is left out."""
    stories: dict[int, str] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                stories[record["index"]] = record["text"]
    return [stories[index] for index in sorted(stories)]


def filtered(stories: Sequence[str]) -> list[str]:
    """Without doubles and without stories that hold a rare word."""
    different = list(dict.fromkeys(stories))
    counts = Counter(word for story in different for word in words_of(story))
    return [story for story in different if all(counts[word] >= RARE for word in words_of(story))]


if __name__ == "__main__":
    main()
