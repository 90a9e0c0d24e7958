"""The confidence of an object, from the certainties of its tokens.

The score is the product of both numbers of each token; docs/confidence.md derives it. A file beside
the weights may say how often objects of a score are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated

import msgspec

from legato_engine.errors import InvalidField
from legato_engine.types import SKILL_OF_RESULT, CalibrationInfo, Certainty

FILE_NAME = "confidence.json"
SKILLS_WITH_CONFIDENCE = tuple(
    skill for result, skill in SKILL_OF_RESULT.items() if result.has_places
)

_LEAST = 1e-9  # a score's distance from 0 and 1 in its logit


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A score s becomes the logistic of logit(s) / `temperature` + `offset`."""

    temperature: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    offset: float = 0.0

    def __call__(self, score: float) -> float:
        return _logistic(logit(score) / self.temperature + self.offset)

    def confidence(self, certainties: Iterable[Certainty | None]) -> float | None:
        raw = score(certainties)
        return None if raw is None else self(raw)


class CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `confidence.json`; `skills` without an entry are uncalibrated."""

    fitted_on: str
    fitted_at: date
    skills: Mapping[str, Calibration]


def read_calibrations(folder: Path) -> CalibrationFile | None:
    """Read the calibrations, or return None without a file.

    Raises:
        InvalidField: the file is malformed.
    """
    path = folder / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        content = msgspec.json.decode(data, type=CalibrationFile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidField(f"{path}: {error}", field="weights") from None
    unknown = set(content.skills) - set(SKILLS_WITH_CONFIDENCE)
    if unknown:
        problem = f"{path}: no skill with a confidence is called {min(unknown)}"
        raise InvalidField(problem, field="weights")
    return content


def confidence_info(
    skills: Sequence[str], calibrations: CalibrationFile | None
) -> CalibrationInfo | None:
    scored = tuple(skill for skill in SKILLS_WITH_CONFIDENCE if skill in skills)
    if not scored:
        return None
    if calibrations is None:
        return CalibrationInfo(skills=scored)
    midnight = datetime.combine(calibrations.fitted_at, time.min, UTC)
    return CalibrationInfo(
        skills=scored,
        calibrated=tuple(skill for skill in scored if skill in calibrations.skills),
        fitted_on=calibrations.fitted_on,
        fitted_at=int(midnight.timestamp()),
    )


def score(certainties: Iterable[Certainty | None]) -> float | None:
    """Score an object, or return None if a token's certainty is unknown."""
    product = 1.0
    for certainty in certainties:
        if certainty is None:
            return None
        product *= certainty[0] * certainty[1]
    return min(product, 1.0)


def logit(share: float) -> float:
    share = min(max(share, _LEAST), 1.0 - _LEAST)
    return math.log(share / (1.0 - share))


def _logistic(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
