"""What can be named: kinds (a noun, or a shape in a colour), phrases that ask for them, groups."""

from dataclasses import dataclass
from functools import lru_cache

from legato_training.nouns import all_nouns, group_members, pluralise

SHAPES = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "diamond shape",
    "pentagon",
    "hexagon",
    "cross",
    "ring shape",
    "arrow",
    "oval",
)
# Named colours and the RGB (0..1) their tint is jittered around.
COLOURS = {
    "red": (0.88, 0.12, 0.12),
    "orange": (0.97, 0.55, 0.08),
    "yellow": (0.98, 0.86, 0.12),
    "green": (0.13, 0.66, 0.22),
    "blue": (0.12, 0.35, 0.88),
    "purple": (0.52, 0.18, 0.72),
    "pink": (0.97, 0.50, 0.72),
    "brown": (0.47, 0.28, 0.14),
    "black": (0.06, 0.06, 0.06),
    "white": (0.97, 0.97, 0.97),
    "gray": (0.52, 0.52, 0.52),
}
COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Kind:
    """One class of objects; ``shape`` and ``colour`` are indices for drawn shapes, else -1."""

    names: tuple[str, ...]
    plurals: tuple[str, ...]
    mirror: bool
    shape: int = -1
    colour: int = -1


@dataclass(frozen=True)
class Phrase:
    """Something one can ask for and the kinds it covers."""

    singular: str
    plural: str
    kinds: frozenset[int]


@dataclass(frozen=True)
class Lexicon:
    """All kinds; phrases per kind (its own names first) and the groups that contain it."""

    kinds: tuple[Kind, ...]
    phrases_of: tuple[tuple[Phrase, ...], ...]
    groups_of: tuple[tuple[Phrase, ...], ...]
    num_nouns: int


def noun_kinds() -> list[Kind]:
    return [Kind(noun.names, noun.plurals, noun.mirror) for noun in all_nouns()]


def shape_kinds() -> list[Kind]:
    """Every shape in every colour."""
    kinds = []
    for shape, name in enumerate(SHAPES):
        for colour, colour_name in enumerate(COLOUR_NAMES):
            full = f"{colour_name} {name}"
            kinds.append(Kind((full,), (pluralise(full),), False, shape, colour))
    return kinds


def groups(kinds: list[Kind], num_nouns: int) -> list[Phrase]:
    """Names that cover several kinds: apple, animal, vehicle, circle, ..."""
    named = [(name, members) for name, members in group_members().items()]
    for shape, name in enumerate(SHAPES):
        named.append((name, [i for i in range(num_nouns, len(kinds)) if kinds[i].shape == shape]))
    return [Phrase(name, pluralise(name), frozenset(members)) for name, members in named]


@lru_cache(maxsize=1)
def lexicon() -> Lexicon:
    """Build the one lexicon."""
    nouns = noun_kinds()
    kinds = nouns + shape_kinds()
    phrases = tuple(
        tuple(
            Phrase(one, many, frozenset([i]))
            for one, many in zip(kind.names, kind.plurals, strict=True)
        )
        for i, kind in enumerate(kinds)
    )
    listed = groups(kinds, len(nouns))
    groups_of = tuple(tuple(g for g in listed if i in g.kinds) for i in range(len(kinds)))
    return Lexicon(tuple(kinds), phrases, groups_of, len(nouns))
