"""Which graphs a prompt runs through, and how much of the work is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_llm.artifact import GraphInfo


@dataclass(frozen=True)
class Chunk:
    """One run of a graph: its last ``count`` tokens are real, the ones before them are padding."""

    graph: GraphInfo
    count: int

    @property
    def padding(self) -> int:
        return self.graph.tokens - self.count


def plan_prefill(
    length: int, graphs: Sequence[GraphInfo], one_shot: GraphInfo | None = None
) -> list[Chunk]:
    """Split a prompt of ``length`` tokens into chunks.

    The largest graph runs full chunks; what is left over goes first, left-padded, through the
    smallest graph that holds it. ``one_shot`` (a graph without a past) takes the whole prompt where
    it is no more work than the chunks.

    Args:
        length: tokens of the prompt, at least 1.
        graphs: cached graphs to choose from, the decode graph included.
        one_shot: a graph for a whole prompt; usable up to its ``tokens``.
    """
    by_size = sorted(graphs, key=lambda graph: graph.tokens)
    largest = by_size[-1]
    full, rest = divmod(length, largest.tokens)
    chunks = [Chunk(largest, largest.tokens)] * full
    if rest:
        smallest = next(graph for graph in by_size if graph.tokens >= rest)
        chunks = [Chunk(smallest, rest), *chunks]
    fits = one_shot is not None and length <= one_shot.tokens
    if one_shot and fits and one_shot.tokens <= sum(chunk.graph.tokens for chunk in chunks):
        return [Chunk(one_shot, length)]
    return chunks


def padding_share(chunks: Sequence[Chunk]) -> float:
    """Share of the computed tokens that are padding, 0 to 1."""
    computed = sum(chunk.graph.tokens for chunk in chunks)
    return sum(chunk.padding for chunk in chunks) / computed if computed else 0.0
