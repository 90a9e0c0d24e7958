"""Byte quotas by caller."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from legato_engine.errors import BytesExceeded
from legato_engine.images.memory import ByteQuota


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
