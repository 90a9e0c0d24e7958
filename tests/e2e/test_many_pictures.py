"""`legato run` and the notebook, against a server without a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from legato_client.cli import main
from PIL import Image
from pycocotools.coco import COCO

from tests.e2e.scenes import SIZE, two_shapes
from tests.e2e.server import Server

av = pytest.importorskip("av", reason="videos need PyAV")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
FRAMES, RATE = 8, 4  # of the video; in a second


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without a model."""
    with Server(
        tmp_path_factory.mktemp("null"), "--model", "null", "--null-objects", "2"
    ) as running:
        yield running
        running.settle()


@pytest.fixture
def folder(tmp_path):
    """Two images, one of them turned by its EXIF data, two bad files, and a video."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    scene = two_shapes()
    (folder / "a.png").write_bytes(scene.file())
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    (folder / "b.jpg").write_bytes(scene.file("JPEG", exif=exif))
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "bad.mp4").write_bytes(b"no video")
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height = SIZE
        for number in range(FRAMES):
            image = two_shapes(4 * number).image
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return folder


@pytest.fixture
def legato(server, tmp_path, monkeypatch):
    """Run `legato run` on the folder: its exit code, and its lines by source and frame."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)
    output = tmp_path / "out.jsonl"

    def run(*words):
        code = main(["run", *map(str, words), "--output", str(output)])
        lines = [json.loads(line) for line in output.read_text().splitlines()[1:]]
        return code, {(Path(line["source"]).name, line.get("frame")): line for line in lines}

    return run


def test_images_videos_and_bad_files(legato, folder, tmp_path, capsys):
    """Every file has its lines, COCO's reader reads the boxes, and drawings lie in their folder."""
    coco, drawn = tmp_path / "coco.json", folder / "drawn"
    words = [folder, "--task", "detect:cup", "--task", "segment:dog", "--every", "3"]
    words += ["--coco", coco, "--annotate", drawn, "--sorted"]
    code, lines = legato(*words)
    assert code == 1
    assert list(lines) == [
        ("a.png", None), ("b.jpg", None), ("bad.mp4", None), ("bad.png", None),
        ("clip.mp4", 0), ("clip.mp4", 3), ("clip.mp4", 6),
    ]  # fmt: skip
    assert "2 of 7 images failed" in capsys.readouterr().err
    assert lines["bad.png", None]["error"]["reason"] == "IMAGE_UNDECODABLE"
    assert lines["bad.mp4", None]["error"]["code"] == "UNREADABLE"
    assert [lines["clip.mp4", n]["time"] for n in (0, 3, 6)] == [0, 3 / RATE, 6 / RATE]
    assert (lines["b.jpg", None]["width"], lines["b.jpg", None]["height"]) == SIZE[::-1]
    _check_coco(COCO(str(coco)), lines)
    assert sorted(path.name for path in drawn.iterdir()) == ["a.png", "b.jpg", "clip.mp4"]
    with Image.open(drawn / "b.jpg") as image:
        assert image.height > image.width
    with av.open(str(drawn / "clip.mp4")) as container:
        frames = [(each.time, each.to_image()) for each in container.decode(video=0)]
    assert [time for time, _ in frames] == pytest.approx([0, 3 / RATE, 6 / RATE], abs=0.01)
    assert all(_has_colour(image) for _, image in frames)


def test_frames_by_time(legato, folder):
    """`--fps` takes the first frame of each period, and a slower video whole."""
    _, lines = legato(folder / "clip.mp4", "--task", "caption", "--fps", 2, "--sorted")
    assert list(lines) == [("clip.mp4", n) for n in range(0, FRAMES, 2)]


def test_drawings_do_not_replace_images(legato, folder):
    """Their folder must be another one."""
    before = (folder / "a.png").read_bytes()
    words = (folder / "a.png", "--task", "detect:cup", "--annotate", folder)
    assert legato(*words)[0] == 2
    assert (folder / "a.png").read_bytes() == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks(server, path, monkeypatch):
    """Each is of the published form and holds no output, and its cells run in their order."""
    monkeypatch.setenv("LEGATO_SERVER", server.address)
    import nbformat  # takes seconds, not needed by most

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(cell.source, f"{path.name}, {cell.id}", "exec"), names)
    assert names["lines"]


def _check_coco(coco, lines):
    """Its boxes and masks are where the lines say."""
    answered = [line for line in lines.values() if "error" not in line]
    assert len(coco.imgs) == len(answered) == 5
    assert {each["name"] for each in coco.loadCats(coco.getCatIds())} == {"cup", "dog"}
    for image, line in zip(coco.imgs.values(), answered, strict=True):
        assert (image["file_name"], image.get("frame")) == (line["source"], line.get("frame"))
        (dog,) = coco.getCatIds("dog")
        cups = coco.loadAnns(coco.getAnnIds(image["id"]))
        boxes = [each["bbox"] for each in cups if each["category_id"] != dog]
        found = [each["box_pixels"] for each in line["results"]["detect:cup"]["objects"]]
        assert [[x, y, x + w, y + h] for x, y, w, h in boxes] == found
        for each in coco.loadAnns(coco.getAnnIds(image["id"], dog)):
            mask = coco.annToMask(each)
            assert mask.shape == (line["height"], line["width"])
            left, top, width, height = map(round, each["bbox"])
            assert mask[top : top + height, left : left + width].sum() == mask.sum() > 0


def _has_colour(image: Image.Image) -> bool:
    """Whether a mark was drawn: the scene itself has no such blue."""
    red, green, blue = np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)
    return bool(((blue > 215) & (green > 120) & (red < 60)).any())
