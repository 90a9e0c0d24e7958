"""Captions, questions and answers about a scene, as plain text."""

from collections.abc import Iterator, Sequence

import numpy as np

from legato_training.lexicon import COLOUR_NAMES, Lexicon, Phrase, with_article
from legato_training.scenes import BACKGROUNDS, Scene

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PLACES = (
    ("in the top left", "at the top", "in the top right"),
    ("on the left", "in the center", "on the right"),
    ("in the bottom left", "at the bottom", "in the bottom right"),
)


class Narrator:
    """Words for one scene; groups are the kinds in order of their leftmost instance."""

    def __init__(self, scene: Scene, rng: np.random.Generator, words: Lexicon) -> None:
        self.scene = scene
        self.rng = rng
        self.lexicon = words
        self.members: dict[int, list[int]] = {}
        for i, kind in enumerate(scene.kinds):
            self.members.setdefault(kind, []).append(i)

    def pick(self, *options: str) -> str:
        """One of the options."""
        return options[self.rng.integers(len(options))]

    def place(self, i: int) -> str:
        """Where object ``i`` is, on a three by three grid."""
        x0, y0, x1, y1 = self.scene.boxes[i]
        return PLACES[min(2, int((y0 + y1) * 1.5))][min(2, int((x0 + x1) * 1.5))]

    def colour(self, kind: int) -> str | None:
        """Return the one colour all instances of a kind share, unless it is part of the name."""
        colours = {self.scene.colours[i] for i in self.members[kind]}
        if len(colours) > 1 or -1 in colours or self.lexicon.kinds[kind].colour >= 0:
            return None
        return COLOUR_NAMES[colours.pop()]

    def counted(self, kind: int, adjective: str | None = None) -> str:
        """Return ``a dog`` or ``three red apples``."""
        entry, count = self.lexicon.kinds[kind], len(self.members[kind])
        prefix = f"{adjective} " if adjective and adjective not in entry.names[0].split() else ""
        if count == 1:
            return (
                with_article(prefix + entry.names[0])
                if not prefix
                else article_for(prefix, entry.names[0])
            )
        return f"{NUMBERS[count]} {prefix}{entry.plurals[0]}"

    def listing(self) -> str:
        """Everything in the image as one list."""
        return join([self.counted(kind) for kind in self.members])

    def short(self) -> str:
        """Return ``A dog and two apples.`` or the like."""
        return sentence(self.listing()) if self.members else "An empty picture."

    def normal(self) -> str:
        """List the objects with colours and, for single ones, places."""
        if not self.members:
            return f"An empty picture. {self.background()}".strip()
        parts = []
        for kind, members in self.members.items():
            text = self.counted(kind, self.colour(kind))
            parts.append(f"{text} {self.place(members[0])}" if len(members) == 1 else text)
        return sentence(join(parts))

    def long(self) -> str:
        """Describe the objects, then where they are and their colours, then the background."""
        if not self.members:
            return f"The picture is empty. {self.background()}".strip()
        parts = [f"The picture shows {self.listing()}."]
        for kind, members in self.members.items():
            name = self.lexicon.kinds[kind].names[0]
            colour = self.colour(kind)
            if len(members) == 1:
                tint = f"{colour} and " if colour and colour not in name.split() else ""
                verb = "are" if self.is_plural(kind) else "is"
                parts.append(f"The {name} {verb} {tint}{self.place(members[0])}.")
        parts.append(self.background())
        return " ".join(part for part in parts if part)

    def is_plural(self, kind: int) -> bool:
        """Whether even one of it takes a plural verb (grapes, scissors)."""
        return self.lexicon.kinds[kind].names[0] == self.lexicon.kinds[kind].plurals[0]

    def background(self) -> str:
        """Describe the background in a sentence."""
        kind, (first, second) = BACKGROUNDS[self.scene.background], self.scene.background_names
        if kind == "photo":
            return "The background is a photo."
        if kind == "textured":
            return "The background is textured."
        if first < 0:
            return f"The background is {'a gradient' if kind == 'gradient' else kind}."
        if kind == "plain":
            return f"The background is plain {COLOUR_NAMES[first]}."
        pair = f"{COLOUR_NAMES[first]} and {COLOUR_NAMES[second]}"
        return (
            f"The background is a {pair} gradient."
            if kind == "gradient"
            else f"The background is {kind} {pair}."
        )

    def name(self, kind: int) -> Phrase:
        """One of a kind's own names, the first most often."""
        phrases = self.lexicon.phrases_of[kind]
        if len(phrases) == 1 or self.rng.random() < 0.6:
            return phrases[0]
        return phrases[1 + self.rng.integers(len(phrases) - 1)]

    def matching(self, phrase: Phrase) -> list[int]:
        """Objects a phrase covers, left to right."""
        return [i for i, kind in enumerate(self.scene.kinds) if kind in phrase.kinds]

    def question(self, absent: int) -> tuple[str, str]:
        """Return a random question and its answer; ``absent`` is a kind that is not there."""
        makers = (
            self.ask_what,
            self.ask_count,
            self.ask_colour,
            self.ask_where,
            self.ask_presence,
            self.ask_beside,
            self.ask_background,
        )
        odds = (0.14, 0.26, 0.14, 0.14, 0.16, 0.12, 0.04)
        while True:
            maker = makers[self.rng.choice(len(makers), p=odds)]
            asked = maker(absent)
            if asked:
                return self.vary(asked[0]), asked[1]

    def vary(self, text: str) -> str:
        """Lower case, missing or extra punctuation, shouting."""
        roll = self.rng.random()
        if roll < 0.12:
            return text[0].lower() + text[1:]
        if roll < 0.22:
            return text.rstrip("?").lower()
        if roll < 0.27:
            return text.rstrip("?")
        return text.upper() if roll < 0.28 else text

    def random_kind(self) -> int | None:
        """Return a kind that is present."""
        kinds = list(self.members)
        return kinds[self.rng.integers(len(kinds))] if kinds else None

    def single(self) -> tuple[int, int] | None:
        """(kind, object) of a kind that is there exactly once."""
        singles = [(kind, m[0]) for kind, m in self.members.items() if len(m) == 1]
        return singles[self.rng.integers(len(singles))] if singles else None

    def ask_what(self, _: int) -> tuple[str, str] | None:
        """Ask for the objects in the image."""
        if len(self.members) > 4:
            return None
        question = self.pick(
            "What is in this picture?",
            "What is in the image?",
            "What do you see?",
            "What can you see in this image?",
            "What is this?",
            "What does the picture show?",
            "List the objects.",
            "What objects are there?",
            "What's in this image?",
            "Describe the picture.",
        )
        return question, self.short()

    def ask_count(self, absent: int) -> tuple[str, str]:
        """How many of a kind, of a group, or of everything."""
        roll = self.rng.random()
        kind = self.random_kind()
        if kind is None or roll < 0.08:
            phrase, count = self.name(absent), 0
        elif roll < 0.18:
            return self.pick(
                "How many objects are there?", "How many things are in the picture?"
            ), answer_number(len(self.scene.kinds))
        else:
            groups = self.lexicon.groups_of[kind]
            phrase = (
                groups[self.rng.integers(len(groups))]
                if groups and roll < 0.30
                else self.name(kind)
            )
            count = len(self.matching(phrase))
        question = self.pick(
            "How many {} are there?",
            "How many {} are in the picture?",
            "How many {} are in this image?",
            "How many {} do you see?",
            "How many {} can you see?",
            "Count the {}.",
            "How many {}?",
        )
        return question.format(phrase.plural), answer_number(count)

    def ask_colour(self, _: int) -> tuple[str, str] | None:
        """Which colour something has, when the drawing has a clear one."""
        kind = self.random_kind()
        if kind is None:
            return None
        entry = self.lexicon.kinds[kind]
        if entry.colour >= 0:
            phrase = self.lexicon.groups_of[kind][0]
            if len(self.matching(phrase)) != 1:
                return None
            name = phrase.singular
            colour: str | None = COLOUR_NAMES[entry.colour]
        else:
            colour = self.colour(kind)
            phrase = self.name(kind)
            name = phrase.singular if len(self.members[kind]) == 1 else phrase.plural
        if not colour:
            return None
        verb = "are" if self.is_plural(kind) or name == phrase.plural else "is"
        question = self.pick(
            "What color {v} the {n}?",
            "What colour {v} the {n}?",
            "Which color {v} the {n}?",
            "What is the color of the {n}?",
        )
        return question.format(v=verb, n=name), f"{colour.capitalize()}."

    def ask_where(self, _: int) -> tuple[str, str] | None:
        """Where the only one of a kind is."""
        found = self.single()
        if not found:
            return None
        verb = "are" if self.is_plural(found[0]) else "is"
        question = self.pick(
            "Where {v} the {n}?", "Where {v} the {n} in the picture?", "Where can I find the {n}?"
        )
        return question.format(v=verb, n=self.name(found[0]).singular), sentence(
            self.place(found[1])
        )

    def ask_presence(self, absent: int) -> tuple[str, str]:
        """Is there one, yes or no."""
        kind = self.random_kind()
        yes = kind is not None and self.rng.random() < 0.5
        phrase = self.name(kind if kind is not None and yes else absent)
        if self.rng.random() < 0.25:
            question = self.pick(
                "Are there any {}?", "Are there {} in the picture?", "Do you see any {}?"
            ).format(phrase.plural)
        else:
            one = with_article(phrase.singular)
            verb = "Are" if phrase.singular == phrase.plural else "Is"
            question = self.pick(
                "{v} there {n}?",
                "{v} there {n} in the picture?",
                "{v} there {n} in this image?",
                "Do you see {n}?",
                "Can you see {n}?",
            ).format(v=verb, n=one)
        return question, "Yes." if yes else "No."

    def ask_beside(self, _: int) -> tuple[str, str] | None:
        """Ask for the neighbour of the only one of a kind."""
        found = self.single()
        if not found or len(self.scene.kinds) > 4:
            return None
        kind, i = found
        side = self.rng.integers(4)
        middle = (self.scene.boxes[:, :2] + self.scene.boxes[:, 2:]) / 2
        axis, sign = (
            (0, -1) if side == 0 else (0, 1) if side == 1 else (1, -1) if side == 2 else (1, 1)
        )
        ahead = (middle[:, axis] - middle[i, axis]) * sign
        if np.any((np.abs(ahead) < 0.06) & (np.arange(len(ahead)) != i)):
            return None
        chosen = dict.fromkeys(k for j, k in enumerate(self.scene.kinds) if ahead[j] > 0)
        where = ("to the left of", "to the right of", "above", "below")[side]
        name = self.name(kind).singular
        words = [
            with_article(self.lexicon.kinds[k].names[0])
            if sum(ahead[j] > 0 for j in self.members[k]) == 1
            else self.some(k, ahead)
            for k in chosen
        ]
        return f"What is {where} the {name}?", sentence(join(words)) if words else "Nothing."

    def some(self, kind: int, ahead: np.ndarray) -> str:
        """``two dogs``: the counted ones of a kind on one side."""
        count = sum(bool(ahead[j] > 0) for j in self.members[kind])
        return f"{NUMBERS[count]} {self.lexicon.kinds[kind].plurals[0]}"

    def ask_background(self, _: int) -> tuple[str, str]:
        return self.pick(
            "What is the background?", "Describe the background.", "What is in the background?"
        ), self.background()


def article_for(prefix: str, name: str) -> str:
    """Put an article first: ``a red car``, ``an orange cat``, ``green grapes``."""
    if with_article(name) == name:
        return prefix + name
    return f"{'an' if prefix[0] in 'aeiou' else 'a'} {prefix}{name}"


def answer_number(count: int) -> str:
    """Return ``Three.`` or the like."""
    return f"{NUMBERS[count].capitalize()}."


def join(parts: list[str]) -> str:
    """Join as in ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(text: str) -> str:
    """Capital first letter, full stop."""
    return f"{text[0].upper()}{text[1:]}."


def every_word(words: Lexicon, further: Sequence[str] = ()) -> Iterator[str]:
    """Texts that together hold each word of answers in each of its forms.

    `further` are names that an adapter has for kinds.
    """
    names = {name for kind in words.kinds for name in (kind.names[0], kind.plurals[0])} | set(
        further
    )
    for name in names:
        yield f"The picture shows {with_article(name)}."
        yield f"The {name} are in the center, a {name} and the {name}."
        yield sentence(with_article(name))
    for counted in NUMBERS:
        yield f"{counted.capitalize()}. {sentence(counted)} A and {counted}, {counted}."
    for place in (place for row in PLACES for place in row):
        yield f"{sentence(place)} The {place}."
    for colour in COLOUR_NAMES:
        yield f"{colour.capitalize()}. A {colour} and {colour}, {article_for(colour + ' ', 'cat')}."
        yield sentence(article_for(f"{colour} ", "cat"))
    kinds = " ".join(BACKGROUNDS)
    yield f"Yes. No. Nothing. An empty picture. The picture is empty. The background is {kinds}."
    yield "The background is a photo. The background is textured. It is plain, a gradient."
