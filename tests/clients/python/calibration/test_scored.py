"""Labels, and what of the answers is right by them."""

from __future__ import annotations

import json

import pytest
from legato_client import Box, Point
from legato_client._types.results import Token, TokenCertainty
from legato_client.calibration.scored import (
    UnusableLabels,
    certainties,
    product,
    read_labels,
    right_places,
)

COCO = {
    "images": [
        {"id": 7, "file_name": "a.jpg", "width": 200, "height": 100},
        {"id": 8, "file_name": "b.jpg", "width": 10, "height": 10},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 2, "bbox": [20, 10, 100, 50], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 3, "bbox": [0, 0, 5, 5], "iscrowd": 1},
    ],
    "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 3, "name": "bus"}],
}


def test_labels_in_cocos_form(tmp_path):
    """Boxes are shares of the image; absent categories are asked for too, crowds are not."""
    (tmp_path / "annotations.json").write_text(json.dumps(COCO))
    labels = read_labels(tmp_path, tmp_path / "annotations.json", absent=5)
    first, second = labels.images
    assert first.path == tmp_path / "a.jpg"
    assert first.boxes == {"dog": (Box(0.1, 0.1, 0.6, 0.6),), "cat": ()}
    assert second.boxes == {"cat": (), "dog": (), "bus": ()}
    assert labels.categories == {"cat": 1, "dog": 2, "bus": 3}
    fewer = read_labels(tmp_path, tmp_path / "annotations.json", absent=0)
    assert [set(each.boxes) for each in fewer.images] == [{"dog"}, set()]


@pytest.mark.parametrize("text", ["", "[]", '{"images": []}'])
def test_unusable_labels(tmp_path, text):
    """A file of another form is named."""
    path = tmp_path / "labels.json"
    path.write_text(text)
    with pytest.raises(UnusableLabels, match=r"labels\.json"):
        read_labels(tmp_path, path, absent=1)
    with pytest.raises(UnusableLabels, match=r"missing\.json"):
        read_labels(tmp_path, tmp_path / "missing.json", absent=1)


def test_scores_of_whole_objects():
    """The product of an object's tokens; the end and a part of an object have none."""
    sure = [TokenCertainty(0.5, 0.8), TokenCertainty(1.0, 0.5), TokenCertainty(1.0, 1.0)]
    tokens = [Token(5, "", certainty=each) for each in (*sure, *sure, sure[0])]
    found = certainties([*tokens, Token(0, "")], 3)
    assert found == [((0.5, 0.8), (1.0, 0.5), (1.0, 1.0))] * 2
    assert [product(each) for each in found] == pytest.approx([0.2, 0.2])


def test_a_true_box_is_found_once():
    """The surest object takes it; others like it, and boxes that fit badly, are wrong."""
    truth = [Box(0.0, 0.0, 0.4, 0.4), Box(0.5, 0.5, 1.0, 1.0)]
    places = [Box(0.0, 0.0, 0.4, 0.3), Box(0.0, 0.0, 0.4, 0.4), Box(0.7, 0.7, 1.0, 1.0)]
    assert right_places(places, [0.9, 0.8, 0.7], truth) == [True, False, False]
    assert right_places(places, [0.8, 0.9, 0.7], truth) == [False, True, False]
    points = [Point(0.2, 0.2), Point(0.3, 0.3), Point(0.9, 0.9), Point(0.45, 0.45)]
    assert right_places(points, [0.5, 0.6, 0.7, 0.8], truth) == [False, True, True, False]
