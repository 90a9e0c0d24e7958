"""Leases of images in the engine."""

import math
import time

from legato_engine.ipc.messages import Done, DropImage, HoldImage, ImageDropped
from legato_engine.types import CachedImage, DetectTask, RequestKey

from tests.engine.engine.core.world import GatedFrontend, World, png


def test_a_leased_image_gives_the_result_of_its_bytes(world):
    """A leased image named by its id gives the result of its bytes; once dropped, it is unknown."""
    world.submit("a", DetectTask(object="x"), world.encoded(png()), cache_image=False)
    (by_bytes,) = world.run("a")
    named = CachedImage(image_id=world.hold(png()).image.image_id)
    world.submit("b", DetectTask(object="x"), named)
    (by_id,) = world.run("b")
    assert by_id.result == by_bytes.result
    assert by_id.image.cache_hit
    world.core.drop(DropImage(request_id=RequestKey("d"), image_id=named.image_id, owner="me"))
    assert world.of("d", ImageDropped)
    world.submit("c", DetectTask(object="x"), named)
    world.run("c")
    assert type(world.error("c")).__name__ == "ImageNotFound"


def test_a_running_request_keeps_its_image(world):
    """A request keeps its image when that is dropped before the request runs."""
    named = CachedImage(image_id=world.hold(png()).image.image_id)
    world.submit("a", DetectTask(object="x"), named)
    world.core.drop(DropImage(request_id=RequestKey("d"), image_id=named.image_id, owner="me"))
    assert isinstance(world.run("a")[0], Done)


def test_the_loop_wakes_for_the_end_of_a_lease(world):
    """An idle engine frees an image at the end of its lease."""
    held = world.hold(png(), ttl=0.05)
    assert world.core.next_deadline() == held.until
    assert world.core.load().images_cached == 1
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.core.step()
    assert world.core.load().images_cached == 0
    assert world.core.next_deadline() == math.inf


def test_a_lease_ends_on_time_however_late_the_loop_is(world):
    """A request after the expiry gets `ImageNotFound` even if the loop has not run since."""
    held = world.hold(png(), ttl=0.05)
    while time.monotonic() < held.until:
        time.sleep(0.01)
    world.submit("late", DetectTask(object="x"), CachedImage(image_id=held.image.image_id))
    assert type(world.error("late")).__name__ == "ImageNotFound"


def test_leases_wait_in_the_same_queue(assembly):
    """Pending leases count against the queue limit like requests."""
    world = World(assembly, max_waiting=1, preprocess_threads=1)
    gated = GatedFrontend(assembly.frontend)
    world.core._preprocessor._frontend = gated
    for number in range(3):
        image = world.encoded(png(number))
        world.core.hold(
            HoldImage(request_id=RequestKey(str(number)), image=image, owner="me", ttl=9.0)
        )
    assert [type(world.error(name)).__name__ for name in "12"] == ["QueueFull"] * 2
    assert not world.of("0")
    for number in range(3):
        world.core.abort(RequestKey(str(number)))
    gated.gate.set()
    world.close()


def test_leases_and_requests_of_a_tenant_share_its_part_of_the_queue(assembly):
    """A lease is its caller's tenant's, whoever owns the image by the quota of bytes."""
    world = World(assembly, max_waiting_per_tenant=1, preprocess_threads=1)
    gated = GatedFrontend(assembly.frontend)
    world.core._preprocessor._frontend = gated
    for name, tenant in (("a", "x"), ("b", "y")):
        key = RequestKey(name, tenant)
        world.core.hold(
            HoldImage(request_id=key, image=world.encoded(png()), owner=f"tenant:{tenant}", ttl=9.0)
        )
    world.submit("c", DetectTask(object="x"), world.encoded(png(1)), tenant="x")
    assert type(world.error("c")).__name__ == "QuotaExceeded"
    assert not world.of("a") + world.of("b")
    for name, tenant in (("a", "x"), ("b", "y")):
        world.core.abort(RequestKey(name, tenant))
    gated.gate.set()
    world.close()
