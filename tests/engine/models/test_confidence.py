"""Confidences of objects, and the file that calibrates them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from legato_engine.errors import InvalidField
from legato_engine.models.confidence import (
    Calibration,
    confidence_info,
    read_calibrations,
    score,
)

ROOT = Path(__file__).parents[3]
FILE = {
    "fitted_on": "scenes",
    "fitted_at": "2026-11-25",
    "skills": {"detect": {"temperature": 2.0, "offset": -1.0}},
}


def test_a_score_is_a_product():
    """Of both numbers of each token; it is not known where one of them is not."""
    assert score([(0.5, 0.5), (1.0, 0.8), (1.0, 0.5)]) == pytest.approx(0.1)
    assert score([(0.5, 0.5), None]) is None


def test_a_calibration_is_a_line_in_logits():
    """The identity by default; it keeps the order, and 0 and 1 stay inside."""
    assert Calibration()(0.3) == pytest.approx(0.3)
    fitted = Calibration(2.0, -1.0)
    assert fitted(0.9) == pytest.approx(1 / (1 + math.exp(1 - math.log(9) / 2)))
    scores = [0.0, 1e-6, 0.2, 0.7, 1.0]
    assert sorted(map(fitted, scores)) == [fitted(each) for each in scores]
    assert all(0 < fitted(each) < 1 for each in scores)


def test_the_file_beside_the_weights(tmp_path):
    """It says which skills are calibrated, on what and when; without it none is."""
    assert read_calibrations(tmp_path) is None
    (tmp_path / "confidence.json").write_text(json.dumps(FILE))
    content = read_calibrations(tmp_path)
    assert content is not None
    assert content.skills == {"detect": Calibration(2.0, -1.0)}
    info = confidence_info(("query", "detect", "segment"), content)
    assert info is not None
    assert (info.skills, info.calibrated) == (("detect", "segment"), ("detect",))
    assert (info.fitted_on, info.fitted_at) == ("scenes", 1795564800)
    uncalibrated = confidence_info(("detect",), None)
    assert uncalibrated is not None
    assert uncalibrated.calibrated == ()
    assert confidence_info(("query",), content) is None


@pytest.mark.parametrize(
    "change",
    [
        {"skills": {"detect": {"temperature": 0}}},
        {"skills": {"caption": {}}},
        {"fitted_at": "soon"},
        {"scale": 1},
    ],
)
def test_a_malformed_file_is_refused(tmp_path, change):
    """Weights with a file that says something else do not load."""
    (tmp_path / "confidence.json").write_text(json.dumps(FILE | change))
    with pytest.raises(InvalidField, match=r"confidence\.json"):
        read_calibrations(tmp_path)


def test_legato_tiny_ships_the_fits_that_helped():
    """None did: what helps all objects of the held-out scenes spoils those that they show."""
    record = json.loads((ROOT / "training/results/confidence.json").read_text())["skills"]
    assert read_calibrations(ROOT / "engine/tiny/legato_tiny") is None
    for each in record.values():
        worse = each["shown_ece_after"] > each["shown_ece_before"] + each["gain_error"]
        assert not each["ships"]
        assert worse or each["share_better"] < 0.95
