"""Frames of videos as players show them, and videos that players show as they were drawn."""

from __future__ import annotations

import fractions
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from legato_client.batch import video
from PIL import Image

SIZE = WIDTH, HEIGHT = (64, 48)
RED, GREEN, BLUE, WHITE = (200, 30, 30), (30, 160, 40), (40, 40, 200), (255, 255, 255)
CORNERS = [[RED, GREEN], [BLUE, WHITE]]
EVERY = video.FrameChoice()


def scene(size: tuple[int, int] = SIZE) -> Image.Image:
    """A colour in each corner."""
    return Image.fromarray(np.array(CORNERS, np.uint8)).resize(size, Image.Resampling.NEAREST)


def corners(image: Image.Image) -> list[list[tuple[int, int, int]]]:
    """The colours of `CORNERS` that the corners are nearest to, which is near enough."""
    known = np.array(CORNERS).reshape(4, 3)
    rows = []
    for y in (1 / 4, 3 / 4):
        row = []
        for x in (1 / 4, 3 / 4):
            pixel = np.array(image.getpixel((int(image.width * x), int(image.height * y))))
            distances = np.abs(known - pixel).max(axis=1)
            assert distances.min() < 25, pixel
            row.append(tuple(known[distances.argmin()].tolist()))
        rows.append(row)
    return rows


def write(
    path: Path,
    times: tuple[int, ...] = (0, 1, 2),
    *,
    aspect: fractions.Fraction | None = None,
    size: tuple[int, int] = SIZE,
) -> Path:
    """A video of the scene; `times` are in hundredths of a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.codec_context.time_base = fractions.Fraction(1, 100)
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for time in times:
            frame = av.VideoFrame.from_image(scene(size))
            frame.pts, frame.time_base = time, fractions.Fraction(1, 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def set_matrix(path: Path, matrix: tuple[float, float, float, float]) -> None:
    """Write a, b, c and d of the display matrix into the header of the MP4 file's track."""
    data = bytearray(path.read_bytes())
    header = data.index(b"tkhd") + 4
    assert data[header] == 0, "the version with times of 32 bits"
    a, b, c, d = (round(each * (1 << 16)) for each in matrix)
    struct.pack_into(">9i", data, header + 40, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)


DISPLAYED = {  # matrix: what is shown, by the definition in ISO/IEC 14496-12
    (1, 0, 0, 1): [[RED, GREEN], [BLUE, WHITE]],
    (-1, 0, 0, 1): [[GREEN, RED], [WHITE, BLUE]],
    (1, 0, 0, -1): [[BLUE, WHITE], [RED, GREEN]],
    (-1, 0, 0, -1): [[WHITE, BLUE], [GREEN, RED]],
    (0, 1, -1, 0): [[BLUE, RED], [WHITE, GREEN]],
    (0, -1, 1, 0): [[GREEN, WHITE], [RED, BLUE]],
    (0, 1, 1, 0): [[RED, BLUE], [GREEN, WHITE]],
    (0, -1, -1, 0): [[WHITE, GREEN], [BLUE, RED]],
    (0, 0, 0, 0): [[RED, GREEN], [BLUE, WHITE]],  # broken
}


@pytest.mark.parametrize("matrix", DISPLAYED)
def test_frames_are_turned_and_mirrored(tmp_path, matrix):
    """As the display matrix says, drawn on and sent."""
    path = write(tmp_path / "a.mp4")
    set_matrix(path, matrix)
    (frame, *_) = video.frames(str(path), EVERY)
    assert corners(frame.image()) == DISPLAYED[matrix]
    size = SIZE if not matrix[1] else SIZE[::-1]
    assert frame.image().size == size
    sent = frame.read()
    assert (sent.width, sent.height) == size
    assert bytes(sent.view) == frame.image().tobytes()


@pytest.mark.parametrize(
    ("aspect", "size"),
    [
        ("1", (64, 48)),
        ("4/3", (85, 48)),
        ("64/45", (91, 48)),
        ("1/2", (64, 96)),
        ("255/1", (64, 48)),  # broken
    ],
)
def test_pixels_that_are_not_square_are_stretched(tmp_path, aspect, size):
    """To the longer side, so that no pixel is lost."""
    path = write(tmp_path / "a.mp4", aspect=fractions.Fraction(aspect))
    (frame, *_) = video.frames(str(path), EVERY)
    assert frame.image().size == size
    assert corners(frame.image()) == CORNERS


def test_pixels_are_stretched_before_the_frame_is_turned(tmp_path):
    """The width of a pixel is that of the stored one."""
    path = write(tmp_path / "a.mp4", aspect=fractions.Fraction(2))
    set_matrix(path, (0, 1, -1, 0))
    (frame, *_) = video.frames(str(path), EVERY)
    assert frame.image().size == (48, 128)
    assert corners(frame.image()) == [[BLUE, RED], [WHITE, GREEN]]


def test_a_variable_rate_keeps_its_times(tmp_path):
    """Frames have the times of the file, not those of a rate; `fps` chooses by them."""
    times = (0, 4, 50, 52, 54, 200)
    path = str(write(tmp_path / "a.mp4", times))
    found = list(video.frames(path, EVERY))
    assert [frame.time for frame in found] == pytest.approx([each / 100 for each in times])
    assert [frame.number for frame in video.frames(path, video.FrameChoice(fps=2))] == [0, 2, 5]
    assert [frame.number for frame in video.frames(path, video.FrameChoice(every=2))] == [0, 2, 4]


@pytest.mark.parametrize("size", [(64, 48), (90, 160), (360, 640), (641, 361), (1280, 96)])
def test_a_written_video_has_the_size_of_its_frames(tmp_path, size):
    """Less the last column or row of an odd size; its pixels are square and its times kept."""
    path, times = tmp_path / "out.mp4", (0.0, 0.04, 0.5, 2.0)
    with video.VideoWriter(path) as writer:
        for time in times:
            writer.write(scene(size), time)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        shown = list(container.decode(stream))
        even = size[0] // 2 * 2, size[1] // 2 * 2
        assert (stream.width, stream.height) == even
        assert stream.sample_aspect_ratio in (None, 1)
    assert {(each.width, each.height) for each in shown} == {even}
    assert [each.time for each in shown] == pytest.approx(times, abs=1e-3)
    assert all(corners(each.to_image()) == CORNERS for each in shown)


def test_frames_of_another_size_are_fitted(tmp_path):
    """To that of the first one."""
    path = tmp_path / "out.mp4"
    with video.VideoWriter(path) as writer:
        for time, size in enumerate([(90, 160), (160, 90), (45, 80)]):
            writer.write(scene(size), time)
    shown = [frame.image() for frame in video.frames(str(path), EVERY)]
    assert [image.size for image in shown] == [(90, 160)] * 3
    assert all(corners(image) == CORNERS for image in shown)


@pytest.mark.parametrize("size", [(360, 640), (640, 360), (700, 700)])
def test_an_annotated_video_has_the_shape_of_its_source(run, tmp_path, size):
    """A clip in portrait is not squashed, and its marks are where the answer has them."""
    clip, drawn = write(tmp_path / "clip.mp4", size=size), tmp_path / "drawn"
    assert run(clip, "--annotate", drawn)[0] == 0
    with av.open(str(drawn / "clip.mp4")) as container:
        shown = [frame.to_image() for frame in container.decode(video=0)]
    assert len(shown) == 3
    assert {image.size for image in shown} == {size}
    # The scripted box is from (0.25, 0.5) to (0.75, 1): its left edge crosses the blue corner.
    pixels = np.asarray(shown[0]).astype(int)
    row = pixels[int(0.85 * size[1])]
    (marked,) = np.nonzero(np.abs(row - BLUE).max(axis=1)[: size[0] // 2 - 8] > 60)
    assert marked.size
    assert abs(marked.mean() / size[0] - 0.25) < 0.02
    outside = pixels[int(0.2 * size[1]), : size[0] // 2 - 8]
    assert np.abs(outside - RED).max() < 25


def test_an_image_without_frames_is_an_error(tmp_path):
    """A file of sound has nothing to ask about."""
    path = tmp_path / "a.wav"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame(format="s16", layout="mono", samples=800)
        sound.rate = 8000
        container.mux([*stream.encode(sound), *stream.encode()])
    with pytest.raises(ValueError, match=r"a\.wav has no"):
        next(video.frames(str(path), EVERY))
