"""Every form an image may have gives the answer that the image deserves."""

import io

import numpy as np
import pytest
from legato.v1 import inference_pb2, media_pb2
from legato_client import CachedImage, InvalidArgument, NotFound, Options
from PIL import Image

from tests.e2e.scenes import overlap, two_shapes

SCENE = two_shapes()
PIXELS = np.asarray(SCENE.image)
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {  # EXIF orientation: how the stored pixels come from the displayed ones
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}
RAW = {
    media_pb2.PIXEL_FORMAT_RGB8: PIXELS,
    media_pb2.PIXEL_FORMAT_BGR8: PIXELS[..., ::-1],
    media_pb2.PIXEL_FORMAT_RGBA8: np.dstack([PIXELS, np.zeros_like(PIXELS[..., :1])]),
    media_pb2.PIXEL_FORMAT_BGRA8: np.dstack([PIXELS[..., ::-1], np.zeros_like(PIXELS[..., :1])]),
}


def raw(pixels, form, padding=0):
    """Pixels of shape (height, width, channels) as a message; `padding` bytes end every row."""
    height, width, channels = pixels.shape
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (0, padding)), constant_values=99)
    layout = media_pb2.PixelLayout(
        width=width, height=height, row_stride_bytes=width * channels + padding, format=form
    )
    return media_pb2.Image(raw=media_pb2.RawImage(layout=layout, data=rows.tobytes()))


def boxes(server, image, noun="red circle"):
    """The boxes found on an image given as a message."""
    response = server.inference.Detect(inference_pb2.DetectRequest(image=image, object=noun))
    return [found.box for found in response.objects]


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {"quality": 95}), ("PNG", {}), ("WEBP", {"quality": 95})]
)
def test_image_files(client, kind, options):
    """The shape is found in each kind of file."""
    result = client.detect(SCENE.file(kind, **options), "red circle")
    (found,) = result.objects
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.7
    assert (result.info.image.width, result.info.image.height) == SCENE.image.size


@pytest.mark.parametrize("form", RAW)
def test_raw_pixels(server, form):
    """The same pixels in any order of channels give the answer that their PNG gives."""
    assert boxes(server, raw(RAW[form], form)) == boxes(server, SCENE.message())


def test_raw_rows_may_be_padded(server):
    """What stands between the rows is not part of the image."""
    padded = raw(PIXELS, media_pb2.PIXEL_FORMAT_RGB8, padding=5)
    assert boxes(server, padded) == boxes(server, SCENE.message())


def test_grey_pixels(server, client):
    """An image without colours still shows its shapes."""
    grey = SCENE.image.convert("L")
    mono = raw(np.asarray(grey)[..., None], media_pb2.PIXEL_FORMAT_MONO8)
    (box,) = boxes(server, mono, "circle")
    (found,) = client.detect(grey, "circle").objects
    assert found.box.x_min == box.x_min
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.5


def test_a_image_is_named_by_its_id(client):
    """An earlier answer's image id stands for the image."""
    first = client.detect(SCENE.image, "red circle")
    again = client.detect(CachedImage(first.info.image.image_id), "red circle")
    assert again.objects == first.objects
    assert again.info.image.cache_hit
    with pytest.raises(NotFound) as caught:
        client.detect(CachedImage("img_unknown"), "red circle")
    assert caught.value.reason == "IMAGE_NOT_FOUND"


def test_a_image_that_may_not_be_kept_is_not(client):
    """With `cache_image` false the next request cannot name the image."""
    image = two_shapes(offset=67).image
    options = Options(cache_image=False)
    info = client.detect(image, "red circle", options=options).info
    with pytest.raises(NotFound):
        client.detect(CachedImage(info.image.image_id), "red circle")


@pytest.mark.parametrize("orientation", TURNS)
def test_boxes_are_in_the_displayed_frame(client, orientation):
    """A camera's turned file is answered as a viewer shows it."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    buffer = io.BytesIO()
    SCENE.image.transpose(TURNS[orientation]).save(buffer, "JPEG", exif=exif, quality=95)
    result = client.detect(buffer.getvalue(), "red circle")
    (found,) = result.objects
    assert overlap(found.box, SCENE.boxes["red circle"]) > 0.7
    assert (result.info.image.width, result.info.image.height) == SCENE.image.size


@pytest.mark.parametrize(
    "data", [b"not an image", SCENE.file("PNG")[:-400], SCENE.file("JPEG")[:300]]
)
def test_broken_files_are_refused(client, data):
    """What is no image, or only part of one, is the caller's mistake."""
    with pytest.raises(InvalidArgument) as caught:
        client.detect(data, "red circle")
    assert caught.value.reason == "IMAGE_UNDECODABLE"
    assert caught.value.field_violations[0].field == "image.encoded.data"


def test_too_many_pixels_are_refused(client):
    """An image over the limit is refused with the limit, without being decoded."""
    limit = client.server_info().limits.max_image_pixels
    buffer = io.BytesIO()
    Image.new("1", (8000, limit // 8000 + 1)).save(buffer, "PNG")
    with pytest.raises(InvalidArgument) as caught:
        client.detect(buffer.getvalue(), "red circle")
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert caught.value.metadata["limit"] == str(limit)
