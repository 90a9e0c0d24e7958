"""The cache of prepared images."""

from hypothesis import given
from hypothesis import strategies as st
from legato_engine.images.cache import ImageCache


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
