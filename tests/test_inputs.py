"""Masks against a reference that asks every token about every other; ids and positions beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_llm.inputs import MASKED, StepInputs
from npu_llm.kv_cache import CACHES, EMPTY, KVCache

PAD = 99
PORTS = ("attention_mask", "sliding_attention_mask")


@dataclass(frozen=True)
class Case:
    """A graph ``(tokens, capacity)``, what the cache holds already, and the chunks to come."""

    tokens: int
    capacity: int
    window: int | None
    kv: str
    history: list[int]
    counts: list[int]


@st.composite
def cases(draw: st.DrawFn, tokens: int | None = None) -> Case:
    size = tokens or draw(st.integers(1, 6))
    capacity = draw(st.integers(size, 12))
    return Case(
        size,
        capacity,
        draw(st.none() | st.integers(1, 14)),
        draw(st.sampled_from(sorted(CACHES))),
        draw(st.lists(st.integers(1, capacity), max_size=5)),
        draw(st.lists(st.integers(1, size), min_size=1, max_size=6)),
    )


def make_inputs(case: Case, dtype: Any = np.float16) -> StepInputs:
    return StepInputs(
        case.tokens,
        case.capacity,
        context=case.capacity,
        sliding_window=case.window,
        mask_ports=PORTS,
        pad_id=PAD,
        mask_dtype=np.dtype(dtype),
    )


def make_cache(case: Case) -> KVCache:
    return CACHES[case.kv]([np.zeros((1, 1, case.capacity, 1), np.float16)])


def store(cache: KVCache, count: int, position: int) -> int:
    """Write ``count`` tokens; return the position after them."""
    cache.write([np.zeros((1, 1, count, 1), np.float16)], count, position)
    return position + count


def filled(case: Case) -> tuple[KVCache, int]:
    cache, position = make_cache(case), 0
    for count in case.history:
        position = store(cache, count, position)
    return cache, position


def reach_of(case: Case, port: str) -> int:
    window = case.window if port == "sliding_attention_mask" else None
    return min(window or case.capacity, case.capacity)


def naive_mask(
    tokens: int, pads: int, first_position: int, slots: list[int], reach: int
) -> NDArray[np.float64]:
    """Row by row and column by column, from the rule: a token sees itself and ``reach - 1`` before."""
    columns = [*slots, *(first_position + j - pads if j >= pads else EMPTY for j in range(tokens))]
    mask = np.full((tokens, len(columns)), MASKED)
    for i in range(tokens):
        if i < pads:
            mask[i, len(slots) + i] = 0
            continue
        own = first_position + i - pads
        for j, position in enumerate(columns):
            if position != EMPTY and own - reach < position <= own:
                mask[i, j] = 0
    return mask


@given(cases())
def test_masks_are_those_of_the_naive_rule_chunk_after_chunk(case: Case) -> None:
    inputs = make_inputs(case)
    cache, position = filled(case)
    for count in case.counts:
        inputs.fill(range(count), position, cache.positions)
        slots = cache.positions.tolist()
        for port in PORTS:
            pads = case.tokens - count
            rule = naive_mask(case.tokens, pads, position, slots, reach_of(case, port))
            np.testing.assert_array_equal(inputs.masks[port][0, 0], rule)
        position = store(cache, count, position)


@given(cases())
def test_a_token_sees_exactly_the_newest_tokens_within_its_reach(case: Case) -> None:
    inputs = make_inputs(case)
    cache, position = filled(case)
    for count in case.counts:
        inputs.fill(range(count), position, cache.positions)
        new = [*[EMPTY] * (case.tokens - count), *range(position, position + count)]
        columns = np.array([*cache.positions, *new])
        for port in PORTS:
            for offset in range(count):
                row = inputs.masks[port][0, 0, case.tokens - count + offset]
                own = position + offset
                seen = range(max(0, own - reach_of(case, port) + 1), own + 1)
                assert sorted(columns[row == 0].tolist()) == list(seen)
        position = store(cache, count, position)


@given(cases(), st.sampled_from([np.float16, np.float32]))
def test_no_row_is_masked_whole_and_all_values_are_finite(case: Case, dtype: Any) -> None:
    inputs = make_inputs(case, dtype)
    cache, position = filled(case)
    for count in case.counts:
        inputs.fill(range(count), position, cache.positions)
        for mask in inputs.masks.values():
            assert mask.dtype == dtype
            assert (mask == 0).any(axis=-1).all()
            assert np.isfinite(mask.astype(np.float16)).all()
            assert set(np.unique(mask)) <= {0, MASKED}
        position = store(cache, count, position)


@given(cases())
def test_a_padding_row_sees_itself_alone_and_nobody_sees_padding(case: Case) -> None:
    inputs = make_inputs(case)
    cache, position = filled(case)
    count = case.counts[0]
    inputs.fill(range(count), position, cache.positions)
    pads = case.tokens - count
    for mask in inputs.masks.values():
        padding = mask[0, 0, :, case.capacity : case.capacity + pads] == 0
        np.testing.assert_array_equal(padding, np.eye(case.tokens, pads, dtype=bool))
        assert (mask[0, 0, :pads] == 0).sum(axis=-1).tolist() == [1] * pads


@given(cases())
def test_what_was_filled_before_leaves_no_trace(case: Case) -> None:
    used = make_inputs(case)
    cache, position = filled(case)
    for count in case.counts:
        used.fill(range(count), position, cache.positions)
        new = make_inputs(case)
        new.fill(range(count), position, cache.positions)
        for port in PORTS:
            np.testing.assert_array_equal(used.masks[port], new.masks[port])
        np.testing.assert_array_equal(used.input_ids, new.input_ids)
        np.testing.assert_array_equal(used.position_ids, new.position_ids)
        position = store(cache, count, position)


@given(cases(tokens=1))
def test_filling_one_token_is_the_same_as_filling_a_chunk_of_one(case: Case) -> None:
    fast, slow = make_inputs(case), make_inputs(case)
    cache, position = filled(case)
    for step in range(len(case.counts) + 2):
        if step == 1:  # a prompt of one token is filled as a chunk, through the same graph
            fast.fill([7 + step], position, cache.positions)
        else:
            fast.fill_one(7 + step, position, cache.positions)
        slow.fill([7 + step], position, cache.positions)
        for port in PORTS:
            np.testing.assert_array_equal(fast.masks[port], slow.masks[port])
        np.testing.assert_array_equal(fast.input_ids, slow.input_ids)
        np.testing.assert_array_equal(fast.position_ids, slow.position_ids)
        position = store(cache, 1, position)


@given(st.integers(1, 9), st.data())
def test_a_graph_without_a_past_sees_only_its_own_tokens(tokens: int, data: st.DataObject) -> None:
    count, position = data.draw(st.integers(1, tokens)), data.draw(st.integers(0, 100))
    window = data.draw(st.none() | st.integers(1, 12))
    inputs = StepInputs(
        tokens,
        0,
        context=tokens,
        sliding_window=window,
        mask_ports=PORTS,
        pad_id=PAD,
        mask_dtype=np.dtype(np.float16),
    )
    inputs.fill(range(count), position, np.zeros(0, np.int64))
    for port, reach in zip(PORTS, (tokens, min(window or tokens, tokens)), strict=True):
        rule = naive_mask(tokens, tokens - count, position, [], reach)
        np.testing.assert_array_equal(inputs.masks[port][0, 0], rule)


@given(cases())
def test_tokens_are_right_aligned_with_true_positions_and_pads_have_position_0(case: Case) -> None:
    inputs = make_inputs(case)
    position, slots = 1000, np.full(case.capacity, EMPTY, np.int64)
    for count in case.counts:
        pads = case.tokens - count
        inputs.fill(range(1, count + 1), position, slots)
        assert inputs.input_ids.tolist() == [[PAD] * pads + list(range(1, count + 1))]
        positions = [0] * pads + list(range(position, position + count))
        assert inputs.position_ids.tolist() == [positions]
        position += count


@given(cases())
def test_the_arrays_that_a_graph_is_bound_to_stay_the_same(case: Case) -> None:
    inputs = make_inputs(case)
    arrays = [inputs.input_ids, inputs.position_ids, *inputs.masks.values()]
    cache, position = filled(case)
    inputs.fill(range(case.counts[0]), position, cache.positions)
    after = [inputs.input_ids, inputs.position_ids, *inputs.masks.values()]
    assert all(a is b for a, b in zip(arrays, after, strict=True))


@pytest.mark.parametrize("position", [2047, 2049, 40_000])
def test_positions_that_f16_cannot_hold_are_exact(position: int) -> None:
    case = Case(2, 4, 3, "ring", [], [2])
    inputs = make_inputs(case)
    cache = make_cache(case)
    store(cache, 4, position - 4)
    inputs.fill([1, 2], position, cache.positions)
    assert inputs.position_ids.tolist() == [[position, position + 1]]
    # Own position and two before: of the four slots the newest two, then the newest one.
    assert (inputs.masks["sliding_attention_mask"][0, 0] == 0).tolist() == [
        [False, False, True, True, True, False],
        [False, False, False, True, True, True],
    ]


def test_masked_is_far_from_the_limit_of_f16_and_exact_in_it() -> None:
    assert np.float16(MASKED) == MASKED
    assert np.isfinite(np.float16(MASKED) - np.float16(30_000))
