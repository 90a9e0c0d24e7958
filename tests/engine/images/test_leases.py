"""Leases of images, byte quotas, the cache of prepared images and pixels in a slab."""

import concurrent.futures
import hashlib
import io
import random
import threading
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.core.leases import LeaseHandler
from legato_engine.core.preprocessor import Preprocessor
from legato_engine.core.requests import PendingLease, RequestTable
from legato_engine.errors import BytesExceeded, from_value
from legato_engine.images.cache import ImageCache, ImageKey, ImageLeases
from legato_engine.images.memory import PAGE, ByteQuota, PixelMemory, host_slab
from legato_engine.ipc.messages import DropImage, Failed, HoldImage, ImageDropped, ImageHeld
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.shm import BlobReader, BlobStore, new_namespace
from legato_engine.types import EncodedImage, ImageProperties, PixelFormat, RawImage, RequestKey
from PIL import Image

from tests.fakes import FakeClock


def png(colour):
    """Return an image of 8 by 6 pixels, 144 bytes once prepared."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(buffer, "PNG")
    return buffer.getvalue()


RED, GREEN, BLUE = (png(colour) for colour in ("red", "green", "blue"))
PREPARED = 144


class PixelFrontend:
    """A frontend that keeps the pixels, once `gate` is set."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.prepared = []

    def prepare_image(self, pixels_HWC, key, info):
        """Wrap the pixels."""
        self.gate.wait(30)
        self.prepared.append(info.image_id)
        return PreparedImage(key=key, pixels=pixels_HWC, info=info, num_bytes=pixels_HWC.nbytes)


class World:
    """Leases with quotas of two images a caller and three in all, and a manual clock."""

    def __init__(self):
        self.clock = FakeClock()
        self.blobs = BlobStore(new_namespace())
        self.cache = ImageCache[ImageKey, PreparedImage](1000)
        self.frontend = PixelFrontend()
        self.outputs: list[Any] = []
        self.woken = threading.Event()
        self.quota = ByteQuota("images", per_caller=2 * PREPARED, total=3 * PREPARED)
        self.preprocessor = Preprocessor(
            cast(ModelFrontend, self.frontend),
            self.cache,
            blobs=BlobReader(self.blobs.namespace),
            max_pixels=1000,
            threads=1,
            memory=PixelMemory(host_slab(1 << 20)),
        )
        leases = ImageLeases(self.cache, self.quota, self.clock.now)
        self.leases = LeaseHandler(self.preprocessor, leases, send=self.outputs.append)
        self.requests = RequestTable(wake=self.woken.set)
        self._names = iter(range(1000))

    def begin(self, data, owner="me", ttl=10.0, sha256="", raw=None, quota_bytes=0):
        """Start to lease an image; return the command's id."""
        name = f"r{next(self._names)}"
        blob = self.blobs.put(data)
        image = raw(blob) if raw else EncodedImage(blob=blob, mime_type="image/png")
        command = HoldImage(
            request_id=RequestKey(name),
            image=image,
            owner=owner,
            ttl=ttl,
            sha256=sha256,
            quota_bytes=quota_bytes,
        )
        self.requests.add(self.leases.start(command))
        return name

    def answer(self, name):
        """Return the only output of a command."""
        while not any(output.request_id.caller_id == name for output in self.outputs):
            assert self.woken.wait(30)
            self.woken.clear()
            self.step()
        (output,) = [output for output in self.outputs if output.request_id.caller_id == name]
        return from_value(output.error) if isinstance(output, Failed) else output

    def hold(self, data, owner="me", **fields):
        """Lease an image; return the output."""
        return self.answer(self.begin(data, owner, **fields))

    def cached(self, image_id):
        """Return the cached image, if any."""
        return self.cache.get(ImageKey("", image_id))

    def drop(self, image_id, owner="me"):
        """Drop an image; return the output."""
        name = f"r{next(self._names)}"
        self.leases.drop(DropImage(request_id=RequestKey(name), image_id=image_id, owner=owner))
        return self.answer(name)

    def pass_time(self, seconds):
        """Advance the clock, and do what the engine's loop wakes for."""
        self.clock.advance(seconds)
        if self.leases.table.next_expiry <= self.clock.now():
            self.step()

    def step(self):
        """Do what a step of the engine does for leases."""
        self.leases.table.expire()
        for lease in self.requests.completed():
            assert isinstance(lease, PendingLease)
            self.requests.remove(lease.request_id)
            self.leases.finish(lease)

    def abort(self, name):
        """Abort a command as the engine does; return whether it was pending."""
        lease = self.requests.remove(RequestKey(name))
        if lease is not None:
            lease.cancel()
        return lease is not None


@pytest.fixture
def world():
    """A world that leaves no threads and blobs."""
    made = World()
    yield made
    made.frontend.gate.set()
    made.preprocessor.close()
    made.blobs.close()


def kind(outcome):
    """Return the type name of an output or error."""
    return type(outcome).__name__


def test_a_leased_image_is_sent_and_found(world):
    """The output has the image's id, size and expiry; the cache has the image."""
    held = world.hold(RED)
    key = hashlib.sha256(RED).hexdigest()
    assert held.image == ImageProperties(
        image_id=f"img_{key[:32]}", width=8, height=6, cache_hit=False
    )
    assert held.until == world.clock.now() + 10
    image = world.cached(held.image.image_id)
    assert image is not None
    assert (image.pixels == (255, 0, 0)).all()


def test_no_other_image_evicts_a_leased_one(world):
    """A leased image stays in the cache until its expiry, however many others pass."""
    held = world.hold(RED, ttl=10)
    for number in range(20):
        world.cache.put(ImageKey("", str(number)), held, 900)
    assert world.cached(held.image.image_id) is not None
    world.pass_time(9.9)
    assert world.cached(held.image.image_id) is not None
    world.pass_time(0.2)
    assert world.cached(held.image.image_id) is None
    assert world.quota.num_bytes == 0
    assert kind(world.drop(held.image.image_id)) == "ImageNotFound"


def test_the_same_image_twice_is_leased_once_and_longer(world):
    """A second upload is a hit, costs no quota, and never shortens the lease."""
    first = world.hold(RED, ttl=10)
    again = world.hold(RED, ttl=30)
    assert (again.image.cache_hit, again.until) == (True, first.until + 20)
    assert world.hold(RED, ttl=1).until == again.until
    assert world.quota.num_bytes == PREPARED
    assert len(world.frontend.prepared) == 1
    world.pass_time(29)
    assert world.cached(first.image.image_id) is not None
    world.pass_time(2)
    assert world.cached(first.image.image_id) is None


def test_each_owner_has_its_own_lease(world):
    """The end of one caller's lease does not end another's."""
    image_id = world.hold(RED, "a", ttl=10).image.image_id
    world.hold(RED, "b", ttl=20)
    world.hold(RED, "c", ttl=30)
    assert kind(world.drop(image_id, "a")) == "ImageDropped"
    assert kind(world.drop(image_id, "a")) == "ImageNotFound"
    assert world.cached(image_id) is not None
    world.pass_time(21)
    assert world.quota.reserved["b"] == 0
    assert world.cached(image_id) is not None
    assert kind(world.drop(image_id, "c")) == "ImageDropped"
    assert world.cached(image_id) is None


def test_a_cached_image_can_be_dropped_too(world):
    """A cached image without a lease can be dropped by its id."""
    held = world.hold(RED)
    image = world.cached(held.image.image_id)
    world.drop(held.image.image_id)
    world.cache.put(ImageKey("", held.image.image_id), image, PREPARED)
    assert kind(world.drop(held.image.image_id)) == "ImageDropped"
    assert len(world.cache) == 0


def test_quotas(world):
    """A caller has its own limit and all have one; dropped and expired bytes are free again."""
    first = world.hold(RED, "a")
    world.hold(GREEN, "a")
    refused = world.hold(BLUE, "a")
    assert kind(refused) == "BytesExceeded"
    assert refused.metadata["caller"] == "a"
    assert (refused.metadata["limit"], refused.metadata["actual"]) == ("288", "432")
    assert isinstance(world.hold(BLUE, "b"), ImageHeld)
    refused = world.hold(RED, "c")
    assert refused.metadata["quota"] == "images_bytes_total"
    world.drop(first.image.image_id, "a")
    assert isinstance(world.hold(RED, "c"), ImageHeld)
    world.pass_time(100)
    assert world.quota.num_bytes == 0
    assert len(world.cache) == 0


def test_a_refused_image_is_not_kept(world):
    """An image over the quota is not cached."""
    for data in (RED, GREEN, BLUE):
        world.hold(data)
    assert len(world.cache) == 2


@pytest.mark.parametrize(
    ("data", "error"), [(b"junk", "ImageUndecodable"), (RED[:50], "ImageUndecodable")]
)
def test_a_broken_image_fails_its_lease(world, data, error):
    """A broken image fails its lease, not the requests that would name it."""
    assert kind(world.hold(data)) == error
    assert world.quota.num_bytes == len(world.cache) == 0


def test_too_many_pixels(world):
    """The limit on pixels applies to leases."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40)).save(buffer, "PNG")
    assert kind(world.hold(buffer.getvalue())) == "ImageTooLarge"


@pytest.mark.parametrize("form", ["file", "pixels"])
def test_the_hash_is_that_of_the_bytes(world, form):
    """A wrong hash is refused; the hash of raw pixels excludes their layout."""
    pixels = np.arange(144, dtype=np.uint8).tobytes()

    def raw(blob):
        return RawImage(blob=blob, width=8, height=6, row_stride=24, format=PixelFormat.RGB8)

    data, shape = (RED, None) if form == "file" else (pixels, raw)
    digest = hashlib.sha256(data).hexdigest()
    assert isinstance(world.hold(data, sha256=digest, raw=shape), ImageHeld)
    refused = world.hold(data, sha256="0" * 64, raw=shape)
    assert (kind(refused), refused.metadata["field"]) == ("InvalidField", "sha256")


def test_an_aborted_lease_is_removed(world):
    """An aborted command leaves no lease and sends nothing."""
    world.frontend.gate.clear()
    names = [world.begin(RED), world.begin(GREEN)]
    assert len(world.requests.queued_tenants()) == 2
    assert all(world.abort(name) for name in names)
    assert not world.abort(names[0])
    assert not world.requests.queued_tenants()
    world.frontend.gate.set()
    assert isinstance(world.hold(BLUE), ImageHeld)
    assert [output.request_id.caller_id for output in world.outputs] == ["r2"]
    assert world.quota.num_bytes == PREPARED
    assert len(world.cache) == 1


def test_every_command_gets_one_output(world):
    """Each command gets one output with the command's id."""
    held = world.hold(RED)
    dropped = world.drop(held.image.image_id)
    assert isinstance(dropped, ImageDropped)
    assert [output.request_id.caller_id for output in world.outputs] == ["r0", "r1"]


def test_an_owner_may_have_a_quota_of_its_own(world):
    """It comes with the command; without one the common quota holds."""
    assert isinstance(world.hold(RED, owner="small", quota_bytes=PREPARED), ImageHeld)
    refused = world.hold(GREEN, owner="small", quota_bytes=PREPARED)
    assert kind(refused) == "BytesExceeded"
    assert isinstance(world.hold(GREEN, owner="usual"), ImageHeld)


# ---------------------------------------------------------------- quota


def test_a_caller_has_its_own_limit():
    """Another caller's bytes do not count; the error has limit and actual."""
    quota = ByteQuota("images", per_caller=10, total=100)
    quota.reserve("a", 10)
    quota.reserve("b", 3)
    with pytest.raises(BytesExceeded) as caught:
        quota.reserve("b", 8)
    assert caught.value.metadata == {
        "quota": "images_bytes_per_caller",
        "caller": "b",
        "limit": "10",
        "actual": "11",
    }
    assert quota.reserved["b"] == 3


def test_all_callers_have_a_limit_together():
    """Nothing over the total is reserved; released bytes can be reserved again."""
    quota = ByteQuota("images", per_caller=10, total=15)
    quota.reserve("a", 10)
    with pytest.raises(BytesExceeded) as caught:
        quota.reserve("b", 6)
    assert caught.value.metadata["quota"] == "images_bytes_total"
    quota.release("a", 1)
    quota.reserve("b", 6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9)), max_size=60))
def test_the_sum_is_what_callers_have(steps):
    """After any reservations and releases no limit is exceeded and the sum is right."""
    quota = ByteQuota("images", per_caller=10, total=15)
    has = dict.fromkeys("abc", 0)
    for caller, num_bytes in steps:
        if num_bytes < 0:
            back = min(-num_bytes, has[caller])
            quota.release(caller, back)
            has[caller] -= back
            continue
        try:
            quota.reserve(caller, num_bytes)
        except BytesExceeded:
            assert has[caller] + num_bytes > 10 or sum(has.values()) + num_bytes > 15
        else:
            has[caller] += num_bytes
        assert quota.reserved[caller] == has[caller] <= 10
        assert quota.num_bytes == sum(has.values()) <= 15


def test_a_caller_may_have_a_limit_of_its_own():
    """It replaces the common one, in both directions; the total stays."""
    quota = ByteQuota("images", per_caller=10, total=30)
    with pytest.raises(BytesExceeded) as caught:
        quota.reserve("small", 6, 5)
    assert caught.value.metadata["limit"] == "5"
    quota.reserve("large", 20, 20)
    quota.reserve("usual", 10)
    with pytest.raises(BytesExceeded):
        quota.reserve("large", 1, 100)


# ---------------------------------------------------------------- cache


def test_least_recently_used_goes_first():
    """The value used last stays longest."""
    cache = ImageCache[str, str](20)
    cache.put("a", "A", 10)
    cache.put("b", "B", 10)
    assert cache.get("a") == "A"
    cache.put("c", "C", 10)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("A", None, "C")


def test_too_large_a_value_is_not_kept():
    """A value over the capacity evicts no other."""
    cache = ImageCache[str, str](20)
    cache.put("a", "A", 10)
    cache.put("b", "B", 21)
    assert len(cache) == 1
    assert cache.get("b") is None


def test_pinned_values_stay():
    """A pinned value is never evicted; only `remove` frees it."""
    cache = ImageCache[str, str](20)
    cache.put("a", "A", 10)
    cache.pin("a", "A2")
    cache.pin("large", "L")
    for name in "bcd":
        cache.put(name, name, 20)
    cache.put("a", "A3", 10)
    assert (cache.get("a"), cache.get("large"), cache.num_bytes, len(cache)) == ("A2", "L", 20, 3)
    assert cache.remove("a")
    assert not cache.remove("a")
    assert cache.get("a") is None
    assert cache.remove("d")
    assert cache.num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=50))
def test_bytes_stay_within_capacity(puts):
    """The byte count is the sum of the values, and never over the capacity."""
    cache = ImageCache[str, int](40)
    sizes = {}
    for key, size in puts:
        cache.put(str(key), size, size)
        sizes[str(key)] = size
        held = [sizes[k] for k in sizes if cache.get(k) == sizes[k]]
        assert cache.num_bytes == sum(held) <= 40


# ---------------------------------------------------------------- pixel memory
# Pixels in a slab, freed with their last view.

SHAPE = (200, 300, 3)
SIZE = 200 * 300 * 3


def address(pixels_HWC):
    """Return where the pixels begin."""
    return pixels_HWC.__array_interface__["data"][0]


def test_memory_is_used_again():
    """The next array that fits takes the freed extent."""
    memory = PixelMemory(host_slab(1 << 20))
    first = memory.allocate(SHAPE)
    where = address(first)
    del first
    again = memory.allocate((100, 301, 3))
    assert address(again) == where
    assert (again.shape, again.dtype.name) == ((100, 301, 3), "uint8")
    again[:] = 7  # it may be written


@pytest.mark.parametrize(
    "view",
    [
        lambda pixels: pixels[5:, ::2],
        lambda pixels: pixels.reshape(-1)[10:20],
        lambda pixels: np.frombuffer(memoryview(pixels.reshape(-1)), np.uint8),
    ],
)
def test_a_view_holds_its_memory(view):
    """An extent is not reused while a view of it exists."""
    memory = PixelMemory(host_slab(1 << 20))
    pixels = memory.allocate(SHAPE)
    pixels[:] = 1
    seen = view(pixels)
    del pixels
    other = memory.allocate(SHAPE)
    other[:] = 2
    assert (seen == 1).all()


def test_a_full_slab_falls_back_to_other_memory():
    """Without a free extent other memory is used; at the end all of the slab is free."""
    memory = PixelMemory(host_slab(2 * SIZE))
    images = [memory.allocate(SHAPE) for _ in range(4)]
    for value, pixels in enumerate(images):
        pixels[:] = value
    assert all((pixels == value).all() for value, pixels in enumerate(images))
    large = memory.allocate((2000, 1000, 3))
    assert large.shape == (2000, 1000, 3)
    del images, pixels, large
    assert memory.free_bytes == 2 * SIZE


def test_free_extents_are_merged():
    """After arrays of many sizes in any order, one of almost the whole slab fits."""
    rng, slab = random.Random(0), host_slab(4 << 20)
    memory = PixelMemory(slab)
    held: list[tuple[int, Any]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            value, pixels = held.pop(rng.randrange(len(held)))
            assert (pixels == value).all()
            del pixels
        else:
            pixels = memory.allocate((rng.randint(1, 300), rng.randint(1, 300), 3))
            value = rng.randrange(256)
            pixels[:] = value
            held.append((value, pixels))
    del held, pixels
    whole = memory.allocate((1, (slab.size - PAGE) // 3, 3))
    assert address(whole) == address(slab)


def test_threads_never_get_the_same_memory():
    """Four threads read back what they wrote."""
    memory = PixelMemory(host_slab(3 * SIZE))

    def use(value):
        for _ in range(200):
            pixels = memory.allocate(SHAPE)
            pixels[:] = value
            if not (pixels == value).all():
                return False
        return True

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
