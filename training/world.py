"""The little world of the corpus: who, where, what, and the bones of a story.

The one idea: a model of three million parameters can learn a small world well and a large one not at all. A few dozen
animals, children, places and things meet in sixteen plots. Each plot gives the first sentences of a story, its turn
and its end; the sentences between are left open for the teacher. So every story goes somewhere, and the openings are
those that people will type.

Left out: any care for variety of language. The teacher brings that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANIMALS = (
    "fox", "bear", "rabbit", "cat", "dog", "mouse", "duck", "frog", "bird", "turtle", "squirrel", "pig", "horse",
    "sheep", "hedgehog", "lion", "monkey", "cow", "puppy", "kitten",
)  # fmt: skip
GIRLS = ("Lily", "Anna", "Mia", "Emma", "Lucy", "Sara", "Ella", "Nina", "Amy", "Zoe")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Oscar", "Finn", "Paul")
PETS = ("Daisy", "Rusty", "Coco", "Pip", "Bella", "Benny", "Luna", "Teddy", "Rosie", "Milo", "Poppy", "Lulu")
KIN = ("mom", "dad", "grandma", "grandpa")
PLACES = (
    "in the park", "in the forest", "in the garden", "at the beach", "on the farm", "by the river", "by the lake",
    "on the hill", "in the field", "at the playground", "by the pond", "behind the house",
)  # fmt: skip
THINGS = (
    "ball", "kite", "boat", "hat", "book", "box", "drum", "bell", "balloon", "shell", "blanket", "lamp", "bike",
    "basket", "toy car", "teddy bear", "scarf",
)  # fmt: skip
FOODS = ("cake", "apple", "cookie", "sandwich", "pie", "banana", "pear", "carrot")
KINDS = ("little", "small", "happy", "kind", "brave", "shy", "clever", "sleepy", "funny", "young")
LOOKS = ("red", "blue", "yellow", "green", "big", "small", "shiny", "old", "new", "pretty", "round")
WEATHER = ("sunny", "rainy", "cold", "warm", "windy", "snowy")
SKILLS = (
    "swim", "sing", "dance", "read", "fly a kite", "bake a cake", "paint a picture", "ride a bike", "climb a tree",
    "catch a ball", "write a letter", "jump very high",
)  # fmt: skip
FEARS = ("the dark", "the deep water", "the loud thunder", "the tall tree", "the big dog", "the wind")
BUILDS = ("house", "boat", "snowman", "tower", "bridge", "castle", "nest", "tent")

REQUEST = "Write a short and gentle story for small children. Use simple words and short sentences."


@dataclass(frozen=True)
class Plot:
    """The bones of a story: how it starts, what changes, how it ends. Of each, one text is taken."""

    starts: tuple[str, ...]
    turns: tuple[str, ...]
    ends: tuple[str, ...]


PLOTS = (
    Plot(
        ("{Who} had a {look} {thing}. One day, the {thing} was gone.", "{Who} lost {his} {look} {thing} {place}."),
        ("Then {friend} found the {thing} {place}.", "\"Is this your {thing}?\" asked {friend}."),
        ("{Who} hugged the {thing} and was very happy.", "{Who} was so glad to have the {thing} back."),
    ),
    Plot(
        ("{Who} was afraid of {fear}.", "There was one thing that made {who} afraid. It was {fear}."),
        ("\"Do not be afraid,\" said {friend}. \"I am here.\"", "{Friend} took {who} by the hand."),
        ("After that, {who} was not afraid any more.", "Now {who} was brave, and {friend} was proud of {him}."),
    ),
    Plot(
        ("{Who} was sad because {he} had no friends.", "{Who} was lonely and wanted to find a friend."),
        ("Then {who} met {friend}.", "\"Do you want to play with me?\" asked {friend}."),
        ("From that day on, {who} and {friend} were best friends.", "{Who} was not lonely any more."),
    ),
    Plot(
        ("{Who} wanted to {skill}, but {he} did not know how.", "{Who} wanted to learn to {skill}."),
        ("\"I can help you,\" said {friend}.", "{Who} tried again and again."),
        ("Now {who} could {skill}, and {he} was very proud.", "\"I can do it!\" said {who} with a big smile."),
    ),
    Plot(
        ("{Who} was very hungry.", "{Who} was hungry, but there was no food {place}."),
        ("{Friend} had {a_food}. \"Let us share it,\" said {friend}.", "Then {who} saw {a_food} {place}."),
        ("They ate the {food} together and were happy.", "The {food} was so good that they laughed and danced."),
    ),
    Plot(
        ("{Who} had a new {thing} and did not want to share it.", "{Friend} wanted to play with the {look} {thing}, "
         "but {who} said no."),
        ("Then {who} saw that {friend} was sad.", "\"I am sorry,\" said {who}. \"You can have it too.\""),
        ("They played with the {thing} together all day.", "{Who} learned that it is good to share."),
    ),
    Plot(
        ("{Who} was playing {place} when it started to rain.", "{Who} and {friend} were playing {place}. Then it "
         "started to rain."),
        ("They ran under a big tree.", "{Friend} had a big umbrella."),
        ("When the sun came out again, they saw a big rainbow.", "Soon the sun came out, and everyone was happy."),
    ),
    Plot(
        ("{Who} found a {look} {thing} {place}.", "{Who} was walking {place} and saw a {look} {thing}."),
        ("\"Whose {thing} is this?\" asked {who}.", "{Who} showed the {thing} to {friend}."),
        ("{Friend} was so happy to have the {thing} back.", "They took the {thing} home and played with it."),
    ),
    Plot(
        ("{Who} heard a small voice {place}. \"Please help me!\"", "{Friend} was stuck in the mud {place}. {Who} "
         "wanted to help."),
        ("{Who} ran to help {friend}.", "{Who} pulled and pulled."),
        ("\"Thank you for helping me,\" said {friend}.", "{Friend} was safe, and they went home together."),
    ),
    Plot(
        ("It was {friend}'s birthday, and {who} wanted to give a present.", "Today was a big day. It was {who}'s "
         "birthday."),
        ("Then {who} had a good idea.", "All the friends came with a big cake."),
        ("\"This is the best birthday ever!\" they said.", "They sang and danced until the moon came out."),
    ),
    Plot(
        ("It was late, but {who} could not sleep.", "The moon was in the sky, and {who} was in bed. {Who} could not "
         "sleep."),
        ("{Friend} sang a soft song.", "{Friend} came and read a story."),
        ("{Who} closed {his} eyes and fell asleep.", "Soon {who} was asleep and had a sweet dream."),
    ),
    Plot(
        ("{Who} and {friend} wanted to build a {build}.", "{Who} was building a {build} {place}."),
        ("The {build} fell down, but they did not give up.", "They worked all day."),
        ("They looked at the {build} and were very proud.", "\"We did it!\" they said. It was the best {build}."),
    ),
    Plot(
        ("{Who} broke {friend}'s {thing}.", "{Who} was playing with {friend}'s {thing}. Then the {thing} broke."),
        ("\"I am sorry,\" said {who}.", "{Who} told {friend} what had happened."),
        ("They mended the {thing} together, and all was well.", "\"It is okay,\" said {friend} with a smile."),
    ),
    Plot(
        ("{Who} planted a seed in the garden.", "{Who} found a tiny seed and put it in the ground."),
        ("Every day, {who} gave it some water.", "The sun was warm, and the seed began to grow."),
        ("At last there was a beautiful flower, and {who} smiled.", "It was the prettiest flower in the garden."),
    ),
    Plot(
        ("{Who} went for a walk with {friend}. It was a {weather} day.", "{Who} and {friend} were playing {place}."),
        ("Then they saw a {look} {thing}.", "{Friend} had a good idea."),
        ("It was the best day ever.", "They went home tired and happy."),
    ),
    Plot(
        ("{Who} walked too far and could not find the way home.", "{Who} was lost {place}."),
        ("\"I know the way,\" said {friend}.", "Then {who} met {friend}."),
        ("{Who} was so glad to be home again.", "At home, {who} was safe and warm."),
    ),
)  # fmt: skip

CHILD_OPENINGS = (
    "Once upon a time, there was a {kind} {girl} named {name}.",
    "Once upon a time, there was a {girl} named {name}.",
    "{name} was a {kind} {girl}.",
    "One day, {name} went out to play.",
    "One {weather} day, {name} was playing {place}.",
    "One {weather} morning, {name} woke up early.",
    "It was a {weather} day.",
    "{name} and {friend} were good friends.",
    "",
    "",
)
ANIMAL_OPENINGS = (
    "Once upon a time, there was a {kind} {animal} named {name}.",
    "Once upon a time, there was a {kind} {animal}.",
    "Once upon a time, there was a {kind} {animal} who lived {place}.",
    "Once upon a time, {friend} and {who} were best friends.",
    "{name} was a {kind} {animal} who lived {place}.",
    "There was once a {kind} {animal} who lived {place}.",
    "One {weather} day, a {kind} {animal} went for a walk.",
    "One {weather} morning, the {animal} woke up early.",
)
NEXT_DAYS = (
    "The next day was {weather}.", "Then a new day came.", "The next day, {who} woke up early.",
    "The next day, {who} went out to play again.", "But that was not all.",
)  # fmt: skip
FIRST_LINKS = ("", "", " One day,", " So", " {Who}", " {He}", " {He} was", ' "', " They", " The", " Every day,")
SECOND_LINKS = ("", "", " {Who}", " {He}", " They", " Then", ' "', " {Friend}")


@dataclass(frozen=True)
class Skeleton:
    """One story before the teacher has seen it. The links begin the teacher's sentences."""

    index: int
    start: str
    first_link: str
    turn: str
    second_link: str
    end: str
    seeds: tuple[int, int]


def skeleton(index: int, seed: int) -> Skeleton:
    """The bones of story `index`: they depend on `index` and `seed` only, so that any story can be made again."""
    rng = random.Random(f"{seed}:{index}")
    words = _cast(rng)
    plot = rng.choice(PLOTS)
    opening = rng.choice(words.pop("openings").split("|"))
    start, turn, end = rng.choice(plot.starts), rng.choice(plot.turns), rng.choice(plot.ends)
    if not opening and start[:5] != "{Who}":
        start = "One day, " + start[0].lower() + start[1:] if start[0] != "{" else start

    def fill(text: str) -> str:
        return with_articles(text.format(**words))

    return Skeleton(
        index,
        fill(f"{opening} {start}".strip()),
        fill(rng.choice(FIRST_LINKS)),
        fill(turn),
        fill(rng.choice(SECOND_LINKS)),
        fill(end),
        (rng.randrange(2**31), rng.randrange(2**31)),
    )


def bare_story(index: int, seed: int) -> str:
    """Bones alone, a short story in itself; two times in three a second plot follows, with the same cast."""
    rng = random.Random(f"bare {seed}:{index}")
    words = _cast(rng)
    plots = rng.sample(PLOTS, rng.choice((1, 2, 2)))
    parts = [rng.choice(words.pop("openings").split("|"))]
    for number, plot in enumerate(plots):
        parts += [rng.choice(NEXT_DAYS)] * (number > 0)
        parts += [rng.choice(plot.starts), rng.choice(plot.turns), rng.choice(plot.ends)]
    return with_articles(" ".join(part for part in parts if part).format(**words))


def _cast(rng: random.Random) -> dict[str, str]:
    """Who is who: the words that fill a plot."""
    female = rng.random() < 0.5
    animal, other = rng.sample(ANIMALS, 2)
    child, playmate = rng.sample(GIRLS if female else BOYS, 1)[0], rng.choice(GIRLS + BOYS)
    words = {
        "he": "she" if female else "he", "him": "her" if female else "him", "his": "her" if female else "his",
        "girl": "girl" if female else "boy", "animal": animal,
    }  # fmt: skip
    if rng.random() < 0.55:
        friend = rng.choice([playmate if playmate != child else "Grandma", f"the {animal}", _relative(rng, words)])
        words |= {"who": child, "name": child, "friend": friend, "openings": "|".join(CHILD_OPENINGS)}
    else:
        opening = rng.choice(ANIMAL_OPENINGS)
        pet = rng.choice(PETS)
        who = pet if "{name}" in opening else f"the {animal}"
        words |= {"who": who, "name": pet, "openings": opening, "friend": rng.choice([f"the {other}", playmate])}
    food = rng.choice(FOODS)
    words |= {
        "kind": rng.choice(KINDS), "look": rng.choice(LOOKS), "thing": rng.choice(THINGS), "place": rng.choice(PLACES),
        "weather": rng.choice(WEATHER), "skill": rng.choice(SKILLS), "fear": rng.choice(FEARS), "food": food,
        "a_food": f"a big {food}", "build": rng.choice(BUILDS),
    }  # fmt: skip
    return words | {key.capitalize(): words[key][0].upper() + words[key][1:] for key in ("who", "friend", "he")}


def _relative(rng: random.Random, words: dict[str, str]) -> str:
    return f"{words['his']} {rng.choice(KIN)}"


def with_articles(text: str) -> str:
    """Write "an" for "a" before a vowel."""
    words = text.split(" ")
    for i in range(len(words) - 1):
        if words[i] in ("a", "A") and words[i + 1][:1] in "aeiou":
            words[i] += "n"
    return " ".join(words)
