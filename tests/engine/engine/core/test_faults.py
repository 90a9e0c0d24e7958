"""Invalid requests and images fail alone, with an error that says why."""

import dataclasses

import pytest
from legato_engine import failpoints
from legato_engine.errors import InternalError, TaskUnsupported, from_value
from legato_engine.ipc.messages import Done, Failed
from legato_engine.shm import BlobStore, new_namespace
from legato_engine.types import CachedImage, CaptionTask, DetectTask, EncodedImage, QueryTask

from tests.engine.engine.core.world import GatedFrontend, World, png


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "other"}, "ModelNotFound"),
        ({"adapter": "other"}, "AdapterNotFound"),
        ({"task": QueryTask(question="word " * 1000)}, "PromptTooLong"),
        ({"task": DetectTask(object="cat")}, "InvalidField"),
        ({"image": CachedImage(image_id="img_unknown")}, "ImageNotFound"),
        ({"deadline": 0.0}, "DeadlineExceeded"),
        ({"deadline": 0.0, "image": CachedImage(image_id="img_unknown")}, None),
    ],
)
def test_one_bad_request(world, fields, kind):
    """A request that cannot run fails alone, with the error that says why."""
    world.submit("good", QueryTask(question="hello"))
    world.submit("bad", **{"task": QueryTask(question="hello"), **fields})
    good, bad = world.run("good", "bad")
    assert isinstance(good, Done)
    assert isinstance(bad, Failed)
    assert kind in (None, type(world.error("bad")).__name__)


@pytest.mark.parametrize("data", [b"", b"GIF89a", png()[:200]])
def test_bad_image(world, data):
    """An image that cannot be decoded fails only its request."""
    world.submit("bad", CaptionTask(), world.encoded(data))
    world.run("bad")
    assert type(world.error("bad")).__name__ == "ImageUndecodable"


def test_blob_outside_of_the_namespace(world):
    """A blob outside of the namespace is an internal error and is not opened."""
    other = BlobStore(new_namespace())
    ref = other.put(png())
    world.submit("bad", CaptionTask(), EncodedImage(blob=ref, mime_type="image/png"))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    other.close()


def test_bug_in_the_frontend_is_internal(assembly):
    """An unexpected exception becomes InternalError without its text."""

    class Broken(GatedFrontend):
        def prepare_image(self, *arguments):
            raise ValueError("secret")

    world = World(dataclasses.replace(assembly, frontend=Broken(assembly.frontend)))
    world.submit("bad", CaptionTask(), world.encoded(png()))
    world.run("bad")
    assert isinstance(world.error("bad"), InternalError)
    assert "secret" not in world.error("bad").message
    world.close()


def test_a_wrong_request_does_not_wait_for_its_image(gated):
    """An error that does not depend on the image is sent at once."""
    world, frontend = gated
    world.submit("r", QueryTask(question="word " * 1000), world.encoded(png()))
    assert type(world.error("r")).__name__ == "PromptTooLong"
    assert world.core.load().waiting == 0
    frontend.gate.set()


class BlindFrontend(GatedFrontend):
    """A frontend that takes no images, and blocks if it gets one."""

    takes_images = False

    def make_task(self, request):
        """Refuse a request with an image."""
        if request.image is not None:
            raise TaskUnsupported("blind")
        return self._frontend.make_task(request)


def test_no_image_is_prepared_for_a_model_without_images(assembly):
    """For a model without images none is prepared; its frontend refuses the request."""
    frontend = BlindFrontend(assembly.frontend)
    world = World(dataclasses.replace(assembly, frontend=frontend))
    world.submit("bytes", CaptionTask(), world.encoded(png()))
    world.submit("named", CaptionTask(), CachedImage(image_id="any"))
    world.submit("text", QueryTask(question="hello"))
    held = world.hold(png())
    assert isinstance(world.run("text")[0], Done)
    assert isinstance(from_value(held.error), TaskUnsupported)
    assert isinstance(world.error("bytes"), TaskUnsupported)
    assert isinstance(world.error("named"), TaskUnsupported)
    assert not frontend.entered.is_set()
    world.close()


def test_logits_that_are_not_finite_fail_their_row_only(world, monkeypatch):
    """The first row of one launch fails with NumericError; its neighbour reads the same tokens."""
    world.submit("alone", QueryTask(question="hello"), return_tokens=True)
    (alone,) = world.run("alone")
    points = failpoints._parse("sample.nan=corrupt@4")
    monkeypatch.setattr(failpoints, "_points", points)
    monkeypatch.setattr(failpoints, "ACTIVE", True)
    for name in ("a", "b"):
        world.submit(name, QueryTask(question="hello"), return_tokens=True)
    ends = world.run("a", "b")
    (failed,) = (each for each in ends if isinstance(each, Failed))
    assert failed.error.kind == "NumericError"
    (done,) = (each for each in ends if isinstance(each, Done))
    assert done.tokens == alone.tokens
