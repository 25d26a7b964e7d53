"""A prompt is split into chunks: all of it, in order, with as little padding as the graphs allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_llm.artifact import GraphInfo
from npu_llm.planner import Chunk, padding_share, plan_prefill

LENGTHS = st.integers(1, 3000)
# The decode graph is always among them, so that any rest has a graph.
SIZES = st.sets(st.integers(2, 600), max_size=4).map(lambda sizes: sorted({1, *sizes}))


def graphs(sizes: list[int], capacity: int = 4096) -> list[GraphInfo]:
    return [GraphInfo(f"q{size}.xml", size, capacity) for size in sizes]


def one_shot(tokens: int) -> GraphInfo:
    return GraphInfo(f"q{tokens}_c0.xml", tokens, 0)


def sizes_of(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.graph.tokens, chunk.count) for chunk in chunks]


@given(LENGTHS, SIZES)
def test_the_chunks_hold_every_token_once(length: int, sizes: list[int]) -> None:
    chunks = plan_prefill(length, graphs(sizes))
    assert sum(chunk.count for chunk in chunks) == length
    assert all(1 <= chunk.count <= chunk.graph.tokens for chunk in chunks)


@given(LENGTHS, SIZES)
def test_only_the_first_chunk_is_padded(length: int, sizes: list[int]) -> None:
    _, *others = plan_prefill(length, graphs(sizes))
    assert all(chunk.padding == 0 for chunk in others)


@given(LENGTHS, SIZES)
def test_full_chunks_run_through_the_largest_graph(length: int, sizes: list[int]) -> None:
    chunks = plan_prefill(length, graphs(sizes))
    assert len(chunks) == math.ceil(length / sizes[-1])
    assert all(chunk.graph.tokens == sizes[-1] for chunk in chunks[1:])


@given(LENGTHS, SIZES)
def test_what_is_left_over_takes_the_smallest_graph_that_holds_it(
    length: int, sizes: list[int]
) -> None:
    first = plan_prefill(length, graphs(sizes))[0]
    assert not [size for size in sizes if first.count <= size < first.graph.tokens]


@given(LENGTHS, SIZES, st.randoms(use_true_random=False))
def test_the_order_in_which_graphs_are_listed_does_not_matter(
    length: int, sizes: list[int], random: object
) -> None:
    shuffled = graphs(sizes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_prefill(length, shuffled) == plan_prefill(length, graphs(sizes))


@given(LENGTHS, SIZES, st.integers(1, 3000))
def test_the_one_shot_graph_is_taken_where_the_prompt_fits_and_it_is_no_more_work(
    length: int, sizes: list[int], tokens: int
) -> None:
    chunked = plan_prefill(length, graphs(sizes))
    planned = plan_prefill(length, graphs(sizes), one_shot(tokens))
    worth_it = length <= tokens <= sum(chunk.graph.tokens for chunk in chunked)
    assert planned == ([Chunk(one_shot(tokens), length)] if worth_it else chunked)


@given(LENGTHS, SIZES)
def test_the_padding_share_is_that_of_the_computed_tokens(length: int, sizes: list[int]) -> None:
    chunks = plan_prefill(length, graphs(sizes))
    computed = sum(chunk.graph.tokens for chunk in chunks)
    assert padding_share(chunks) == pytest.approx((computed - length) / computed)
    assert 0 <= padding_share(chunks) < 1


def test_nothing_planned_is_no_padding() -> None:
    assert padding_share([]) == 0


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(1, 1)]),
        (2, [(128, 2)]),
        (127, [(128, 127)]),
        (128, [(128, 128)]),
        (129, [(1, 1), (128, 128)]),
        (130, [(128, 2), (128, 128)]),
        (384, [(128, 128)] * 3),
    ],
)
def test_with_one_chunk_size_the_plan_is_the_documented_one(
    length: int, expected: list[tuple[int, int]]
) -> None:
    assert sizes_of(plan_prefill(length, graphs([1, 128]))) == expected


def test_a_rest_takes_the_small_chunk_before_the_large_ones() -> None:
    assert sizes_of(plan_prefill(600, graphs([1, 64, 256]))) == [(256, 88), (256, 256), (256, 256)]
    assert sizes_of(plan_prefill(570, graphs([1, 64, 256]))) == [(64, 58), (256, 256), (256, 256)]
