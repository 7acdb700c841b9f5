"""Openings of stories that the embedded model continues well.

The one idea: an example's text must be the same on every machine. Along the greedy continuation of each of these
openings, past the end of the story too, the best token is ahead of the second best by far more than rounding can move;
a test watches that. The
first eight are what `contbatch demo` and the notebooks serve: they differ in length and end at different times.
"""

from __future__ import annotations

EXAMPLE_PROMPTS: tuple[str, ...] = (
    "Once upon a time, there was a little duck who",
    "Ben wanted to learn to dance.",
    "It was late, but Sam could not sleep.",
    "Once upon a time, there was a little mouse named Pip. Pip was lonely and wanted to find a friend.",
    "Anna lost her red ball",
    "One sunny day, Mia was playing in the garden.",
    "The kitten was afraid of the dog.",
    "Lucy planted a seed in the garden. Every day,",
    "Mia had a red ball. One day, the ball was gone.",
    "Paul had a new",
    "Amy and her dad",
    "The horse and the pig were",
    "One snowy morning, Oscar woke up early. Oscar and the bear wanted to build a",
    "It was a warm day. The frog was walking by the pond and saw",
    "Max found a shiny shell at the beach.",
    "Finn had a new bike and did not want to share it.",
    "There was one thing that made Zoe afraid.",
    "Sara broke Tim's kite.",
    "Emma and Jack wanted to build a snowman.",
    "Jack and the fox were good friends. It was late, but Jack could not sleep. The fox came and read a story. Soon "
    "Jack was asleep and had a sweet dream. The next day,",
)
"""At least sixteen; those that the demo and the notebooks use come first."""

DEMO_PROMPTS: tuple[str, ...] = EXAMPLE_PROMPTS[:8]
"""The eight of the demo and the notebooks."""
