from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import IntegrityError, OutOfPagesError, PageAllocator


def test_a_new_allocator_has_all_pages_free():
    allocator = PageAllocator(5)
    assert (allocator.num_pages, allocator.free_count) == (5, 5)
    assert sorted(allocator.free_pages().tolist()) == [0, 1, 2, 3, 4]
    assert allocator.is_free([0, 4]).tolist() == [True, True]
    allocator.check_integrity()


def test_a_pool_has_at_least_one_page():
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)


def test_each_page_is_given_out_once():
    allocator = PageAllocator(6)
    pages = np.concatenate([allocator.allocate(n) for n in (1, 0, 3, 2)])
    assert pages.dtype == np.int32
    assert sorted(pages.tolist()) == [0, 1, 2, 3, 4, 5]
    assert allocator.free_count == 0
    assert not allocator.is_free(pages).any()
    allocator.check_integrity()


def test_the_last_page_freed_is_the_first_given_out():
    allocator = PageAllocator(6)
    allocator.allocate(6)
    allocator.free([4, 1])
    allocator.free(np.array([3], np.int32))
    assert allocator.allocate(2).tolist() == [3, 1]
    assert allocator.allocate(1).tolist() == [4]
    allocator.check_integrity()


def test_the_pages_given_out_are_the_callers_copy():
    allocator = PageAllocator(4)
    allocator.allocate(4)[:] = 0
    allocator.free([0, 1, 2, 3])
    allocator.free_pages()[:] = 0
    allocator.check_integrity()


def test_more_pages_than_are_free_is_an_error_that_changes_nothing():
    allocator = PageAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(OutOfPagesError) as caught:
        allocator.allocate(2)
    assert (caught.value.requested, caught.value.free) == (2, 1)
    assert allocator.free_count == 1
    assert not allocator.is_free(held).any()
    allocator.check_integrity()


def test_a_negative_number_of_pages_is_refused():
    with pytest.raises(ValueError, match="negative"):
        PageAllocator(4).allocate(-1)


@pytest.mark.parametrize(
    ("pages", "fault"),
    [([0, 3], r"free already: \[3\]"), ([0, 1, 0], r"twice in one call: \[0\]"), ([0, 4], "pool"), ([-1, 0], "pool")],
)
def test_freeing_what_is_not_held_is_noticed_and_changes_nothing(pages: list[int], fault: str):
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(IntegrityError, match=fault):
        allocator.free(pages)
    assert allocator.free_pages().tolist() == [3]
    assert allocator.is_free([0, 1, 2, 3]).tolist() == [False, False, False, True]
    allocator.check_integrity()


def test_asking_about_a_page_outside_the_pool_is_noticed():
    with pytest.raises(IntegrityError, match="pool"):
        PageAllocator(4).is_free([4])


def test_freeing_no_pages_changes_nothing():
    allocator = PageAllocator(2)
    allocator.free([])
    assert allocator.free_count == 2
    allocator.check_integrity()


@pytest.mark.parametrize("stack", [[0, 0], [0, 9], [1, 2]])
def test_damage_to_the_stack_is_noticed(stack: list[int]):
    allocator = PageAllocator(4)
    allocator.allocate(4)
    allocator.free([0, 1])
    allocator.check_integrity()
    allocator._stack[:2] = stack
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


def test_a_wrong_count_is_noticed():
    allocator = PageAllocator(4)
    allocator._free_count = 3
    with pytest.raises(IntegrityError):
        allocator.check_integrity()
    allocator._free_count = 5
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_every_page_is_always_either_free_or_held_once(data: st.DataObject):
    total = data.draw(st.integers(1, 20))
    allocator = PageAllocator(total)
    held: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        if data.draw(st.booleans()):
            n = data.draw(st.integers(0, total))
            if n > total - len(held):
                with pytest.raises(OutOfPagesError):
                    allocator.allocate(n)
            else:
                held += allocator.allocate(n).tolist()
        elif held:
            back = data.draw(st.lists(st.sampled_from(held), unique=True))
            allocator.free(back)
            held = [page for page in held if page not in back]
        allocator.check_integrity()
        assert sorted(held + allocator.free_pages().tolist()) == list(range(total))
        assert allocator.free_count == total - len(held)
