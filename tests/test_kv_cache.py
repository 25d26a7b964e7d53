"""Ring and shift hold the same tokens as a plain list that drops its oldest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_llm.kv_cache import CACHES, EMPTY, KVCache, RingCache, ShiftCache

both = pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES.keys())

# (layers, kv_heads, head_dim) of each block: layers of one shape share a block.
SHAPES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)), min_size=1, max_size=3
)


@dataclass(frozen=True)
class Write:
    """``count`` tokens at the end of a chunk of ``count + padding``."""

    count: int
    padding: int


@dataclass(frozen=True)
class Story:
    """A cache and what is written to it; None is a reset."""

    capacity: int
    shapes: list[tuple[int, int, int]]
    steps: list[Write | None]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    capacity = draw(st.integers(1, 12))
    write = st.builds(Write, st.integers(1, capacity) | st.just(1), st.integers(0, 3))
    steps = draw(st.lists(write | st.none(), max_size=12))
    return Story(capacity, draw(SHAPES), steps)


@dataclass
class NaiveCache:
    """The last ``capacity`` positions, oldest first."""

    capacity: int
    positions: list[int] = field(default_factory=list)

    def write(self, count: int, first_position: int) -> None:
        new = range(first_position, first_position + count)
        self.positions = [*self.positions, *new][-self.capacity :]


def row(block: int, position: int, shape: tuple[int, int, int]) -> NDArray[np.float16]:
    """The K or V of one token, different for each block, layer, head, dimension and position."""
    layers, heads, dim = shape
    size = layers * heads * dim
    values = (np.arange(size) + 37 * position + 500 * block) % 2000
    return values.reshape(layers, heads, dim).astype(np.float16)


def fresh(story: Story, step: Write, first_position: int) -> list[NDArray[np.float16]]:
    """New blocks ``[layers, kv_heads, padding + count, head_dim]``; the padding is NaN."""
    blocks = []
    for index, (layers, heads, dim) in enumerate(story.shapes):
        block = np.full((layers, heads, step.padding + step.count, dim), np.nan, np.float16)
        for offset in range(step.count):
            content = row(index, first_position + offset, (layers, heads, dim))
            block[:, :, step.padding + offset] = content
        blocks.append(block)
    return blocks


def make(kind: type[KVCache], capacity: int, shapes: list[tuple[int, int, int]]) -> KVCache:
    return kind([np.zeros((n, heads, capacity, dim), np.float16) for n, heads, dim in shapes])


def held(cache: KVCache) -> dict[int, list[Any]]:
    """Position of each token in the cache, and its row in every block."""
    return {
        int(position): [block[:, :, slot].tolist() for block in cache.blocks]
        for slot, position in enumerate(cache.positions)
        if position != EMPTY
    }


def expected(story: Story, naive: NaiveCache) -> dict[int, list[Any]]:
    return {
        position: [row(i, position, shape).tolist() for i, shape in enumerate(story.shapes)]
        for position in naive.positions
    }


@given(stories())
def test_ring_and_shift_hold_the_last_tokens_with_their_keys_and_values(story: Story) -> None:
    ring, shift = (make(kind, story.capacity, story.shapes) for kind in (RingCache, ShiftCache))
    naive, position = NaiveCache(story.capacity), 0
    for step in story.steps:
        if step is None:
            ring.reset()
            shift.reset()
            naive, position = NaiveCache(story.capacity), 0
        else:
            new = fresh(story, step, position)
            ring.write(new, step.count, position)
            shift.write(new, step.count, position)
            naive.write(step.count, position)
            position += step.count
        assert held(ring) == held(shift) == expected(story, naive)


@given(stories())
def test_shift_keeps_the_tokens_in_order_with_the_newest_last(story: Story) -> None:
    shift, naive, position = make(ShiftCache, story.capacity, story.shapes), [], 0
    for step in filter(None, story.steps):
        shift.write(fresh(story, step, position), step.count, position)
        naive += range(position, position + step.count)
        position += step.count
        padded = [EMPTY] * story.capacity + naive
        assert shift.positions.tolist() == padded[-story.capacity :]


@given(stories())
def test_ring_moves_nothing_that_it_does_not_overwrite(story: Story) -> None:
    ring, position = make(RingCache, story.capacity, story.shapes), 0
    for step in filter(None, story.steps):
        before = ring.positions.copy()
        ring.write(fresh(story, step, position), step.count, position)
        position += step.count
        assert np.count_nonzero(ring.positions != before) == step.count


@both
@given(data=st.data())
def test_the_arrays_that_graphs_are_bound_to_stay_the_same(
    kind: type[KVCache], data: st.DataObject
) -> None:
    story = data.draw(stories())
    cache = make(kind, story.capacity, story.shapes)
    arrays = [cache.positions, *cache.blocks]
    position = 0
    for step in filter(None, story.steps):
        cache.write(fresh(story, step, position), step.count, position)
        position += step.count
    cache.reset()
    cache.clear()
    assert all(a is b for a, b in zip(arrays, [cache.positions, *cache.blocks], strict=True))


@both
def test_a_write_may_fill_the_whole_cache(kind: type[KVCache]) -> None:
    story = Story(4, [(2, 1, 3)], [])
    cache = make(kind, 4, story.shapes)
    cache.write(fresh(story, Write(3, 0), 0), 3, 0)
    cache.write(fresh(story, Write(4, 2), 3), 4, 3)
    assert held(cache) == expected(story, NaiveCache(4, [3, 4, 5, 6]))


@both
def test_after_a_reset_no_slot_holds_a_token(kind: type[KVCache]) -> None:
    story = Story(4, [(1, 1, 1)], [])
    cache = make(kind, 4, story.shapes)
    cache.write(fresh(story, Write(3, 0), 0), 3, 0)
    cache.reset()
    assert held(cache) == {}
    assert max(cache.positions) < -(1 << 32)  # older than any window reaches


@both
def test_after_a_reset_the_cache_is_as_a_new_one(kind: type[KVCache]) -> None:
    story = Story(5, [(1, 1, 1)], [])
    used, new = make(kind, 5, story.shapes), make(kind, 5, story.shapes)
    used.write(fresh(story, Write(3, 0), 0), 3, 0)
    used.reset()
    for cache in (used, new):
        cache.write(fresh(story, Write(4, 0), 0), 4, 0)
    assert used.positions.tolist() == new.positions.tolist()


@both
def test_clearing_also_removes_numbers_that_are_not_numbers(kind: type[KVCache]) -> None:
    cache = make(kind, 2, [(1, 1, 2), (1, 2, 1)])
    for block in cache.blocks:
        block.fill(np.nan)
    cache.clear()
    assert held(cache) == {}
    assert not any(block.any() for block in cache.blocks)
