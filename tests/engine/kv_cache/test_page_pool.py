"""The page pool."""

import pytest
from legato_engine.kv_cache.pools import SCRATCH_PAGE, PagePool


def test_scratch_page_is_never_allocated() -> None:
    """All pages but the scratch page are allocated, each once."""
    pool = PagePool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert SCRATCH_PAGE == 0
    assert not pool.can_allocate(1)


def test_freed_pages_come_back() -> None:
    """Freed pages can be allocated again."""
    pool = PagePool(4)
    pages = pool.allocate(3)
    pool.free(pages[1:])
    assert pool.num_free == 2
    assert set(pool.allocate(2)) == set(pages[1:])


def test_double_free_asserts() -> None:
    """A page is freed once per allocation."""
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(AssertionError, match="double free of page"):
        pool.free(pages[:1])


def test_scratch_page_cannot_be_freed() -> None:
    """The scratch page never enters the pool."""
    with pytest.raises(AssertionError, match="page 0"):
        PagePool(4).free([SCRATCH_PAGE])


def test_allocating_too_many_asserts() -> None:
    """`allocate` requires that `can_allocate` is true."""
    pool = PagePool(4)
    assert not pool.can_allocate(4)
    with pytest.raises(AssertionError, match="4 pages requested, 3 are free"):
        pool.allocate(4)
