"""Which builds of the resident kernel there are, and what a model can have of them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from legato_engine.kernels.resident_launch import ResidentSteps


class Kind(enum.StrEnum):
    """What tokens of a launch have: nothing but ids, values too, or draft tokens beside them."""

    WORDS = "words"
    VALUES = "values"
    DRAFTS = "drafts"


class Build(NamedTuple):
    """The kernel for launches of up to `rows` rows, with all draft tokens that these may have."""

    kind: Kind
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class ResidentOffer:
    """Launches of the kernel that a model can have on its device.

    `subject`: what their times depend on, by name. `make` compiles some of the `builds`, and packs
    a second copy of the weights.
    """

    subject: Mapping[str, str]
    builds: tuple[Build, ...]
    make: Callable[[Collection[Build]], ResidentSteps]
