"""Compares the graphs with the torch model they came from, over one text, run as the runtime runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from npu_llm.artifact import GraphInfo, WeightsInfo
from npu_llm.engine import (
    CachedEngine,
    CacheFreeEngine,
    CompileGraph,
    ModelShape,
    decode_graph,
)
from npu_llm.errors import VerificationError
from npu_llm.planner import Chunk
from npu_llm_export.trace import logits_only_for

# Exact arithmetic: without these the CPU plugin may use bf16, or quantise activations on the fly.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
TRACED_TOLERANCE = 1e-3
# Relative errors beyond what the format can explain.
_LOST = {"fp16": 0.05, "int8": 0.5, "int4": 1.0}
_DECODE_STEPS = 24
_VERIFY_RUNS = 2
_LONGEST_TEXT = 1024

SAMPLE_TEXT = (
    "The lighthouse keeper wrote in his log every evening. On the third of March the wind turned to "
    "the north, and 42 ships waited in the bay for the fog to lift. He counted them twice, trimmed "
    "the lamp, and read the letter from his daughter again: she had found work in the city, in a "
    'shop that sells maps. "Maps of what?" he had asked. "Of everywhere that people go," she '
    'wrote, "and of a few places where nobody has been." What does a map show that the sea does '
    "not? First, the names; second, the depths; third, the way home.\n"
)


@dataclass(frozen=True)
class Reference:
    """Tokens of a text and the torch model's logits after each of them.

    Attributes:
        token_ids: the text, ``[T]``.
        rows: positions whose logits were kept, in order.
        logits: float32 ``[len(rows), V]``.
        prompt: how many of the tokens are prefilled; the others are decoded one by one.
    """

    token_ids: tuple[int, ...]
    rows: tuple[int, ...]
    logits: NDArray[np.float32]
    prompt: int

    def at(self, position: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self.logits[self.rows.index(position)]
        return row


@dataclass(frozen=True)
class Comparison:
    """How far a set of graphs is from the reference: see :class:`npu_llm.artifact.Verification`.

    ``relative_error`` is the spread of the differences over that of the reference's logits: 0 is equal,
    1 is no better than knowing nothing, unrelated logits give 1.4.
    """

    tokens: int
    max_abs_diff: float
    top1_agreement: float
    relative_error: float


def text_length(graphs: Sequence[GraphInfo], max_length: int, sliding_window: int | None) -> int:
    """Tokens to compare over: several chunks, and past the sliding window where that is affordable."""
    largest = max(graph.tokens for graph in graphs)
    tail = _DECODE_STEPS + _VERIFY_RUNS * _verify_tokens(graphs)
    wanted = 2 * largest + largest // 3 + tail
    if sliding_window:
        wanted = max(wanted, min(sliding_window + largest, _LONGEST_TEXT) + tail)
    return min(wanted, max_length)


def make_reference(
    model: PreTrainedModel, token_ids: Sequence[int], graphs: Sequence[GraphInfo]
) -> Reference:
    """Run the torch model, its own attention and rotary embeddings, over the text.

    Call it before tracing, which replaces both.
    """
    length = len(token_ids)
    tail = _DECODE_STEPS + _VERIFY_RUNS * _verify_tokens(graphs)
    prompt = max(length - tail, min(length, 1 + length // 2))
    sizes = [graph.tokens for graph in graphs if graph.tokens > 1 and not graph.all_logits]
    chunk_ends = {end - 1 for size in sizes or [1] for end in _chunk_ends(prompt, size)}
    rows = sorted(chunk_ends | set(range(prompt - 1, length)))
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad(), logits_only_for(model, torch.tensor(rows)):
        logits = model(input_ids=ids, use_cache=False).logits[0].float().numpy()
    return Reference(tuple(token_ids), tuple(rows), logits, prompt)


def _chunk_ends(prompt: int, size: int) -> list[int]:
    return list(range(prompt, 0, -size))[::-1]


def compare(
    reference: Reference, shape: ModelShape, compile_graph: CompileGraph, pad_id: int
) -> Comparison:
    """Replay the text through every graph and compare the logits wherever a graph gives some.

    Raises:
        VerificationError: a graph gives NaN, or two graphs contradict each other.
    """
    diffs: list[float] = []
    squares: list[float] = []
    agreements: list[bool] = []
    seen: dict[int, NDArray[np.float32]] = {}
    for position, logits, graph in _replay(reference, shape, compile_graph, pad_id):
        if not np.isfinite(logits).all():
            raise VerificationError(f"graph {graph.file} gives NaN or infinite logits")
        _check_contradiction(seen.setdefault(position, logits.copy()), logits, graph, position)
        expected = reference.at(position)
        diffs.append(float(np.abs(logits - expected).max()))
        # The variance, since an offset that all logits share changes no probability.
        squares.append(float((logits - expected).var() / expected.var()))
        agreements.append(bool(logits.argmax() == expected.argmax()))
    agreement = sum(agreements) / len(agreements)
    error = float(np.sqrt(np.mean(squares)))
    return Comparison(len(diffs), max(diffs), agreement, error)


def check_traced(comparison: Comparison) -> None:
    """Raise VerificationError unless the uncompressed graphs compute what the torch model does."""
    if not comparison.max_abs_diff <= TRACED_TOLERANCE:
        raise VerificationError(
            f"the traced graphs differ from the torch model by {comparison.max_abs_diff:.3g} in a "
            f"logit, at most {TRACED_TOLERANCE:g} is rounding: this architecture cannot be exported "
            "faithfully; please report it"
        )


def check_saved(comparison: Comparison, weights: WeightsInfo) -> None:
    """Raise VerificationError if the compressed graphs have lost the model altogether."""
    if not comparison.relative_error <= _LOST[weights.format]:
        raise VerificationError(
            f"the graphs with {weights.format} weights no longer follow the torch model (relative "
            f"error {comparison.relative_error:.2f}, top-1 agreement "
            f"{comparison.top1_agreement:.0%}): use a finer --weights or a smaller --group-size"
        )


def _check_contradiction(
    first: NDArray[np.float32], second: NDArray[np.float32], graph: GraphInfo, position: int
) -> None:
    """Graphs of one model differ by the order of sums and by f16 in the cache, and by no more."""
    scale = max(1.0, float(np.abs(first).max()))
    difference = float(np.abs(first - second).max())
    if difference > 0.05 * scale:
        raise VerificationError(
            f"graph {graph.file} contradicts the other graphs by {difference:.3g} in a logit after "
            f"token {position}: the export is not usable; please report it"
        )


Comparable = tuple[int, NDArray[np.float32], GraphInfo]


def _replay(
    reference: Reference, shape: ModelShape, compile_graph: CompileGraph, pad_id: int
) -> Iterator[Comparable]:
    """Yield position, logits and graph of everything that the graphs compute about the text."""
    if not any(graph.capacity for graph in shape.graphs):
        yield from _replay_cache_free(reference, shape, compile_graph, pad_id)
        return
    prefill = [graph for graph in shape.graphs if graph.tokens > 1 and not graph.all_logits]
    for graph in prefill or [decode_graph(shape.graphs)]:
        engine = CachedEngine(shape, compile_graph, pad_id, "ring")
        yield from _replay_prefill(engine, reference, graph)
    # The last cache goes on: one is enough, since each prefill graph has read what it wrote.
    yield from _replay_decode(engine, reference, shape)


def _replay_prefill(
    engine: CachedEngine, reference: Reference, graph: GraphInfo
) -> Iterator[Comparable]:
    """Run the prompt in chunks of one graph; its memory is freed after that."""
    ends = [0, *_chunk_ends(reference.prompt, graph.tokens)]
    for start, end in pairwise(ends):
        logits = engine.prefill_chunk(Chunk(graph, end - start), reference.token_ids[start:end])
        yield end - 1, logits, graph
    engine.release_prefill()


def _replay_decode(
    engine: CachedEngine, reference: Reference, shape: ModelShape
) -> Iterator[Comparable]:
    """Decode some tokens one by one, and the others through the verify graph where there is one."""
    tokens, length = reference.token_ids, len(reference.token_ids)
    decode = decode_graph(shape.graphs)
    verify = [graph for graph in shape.graphs if graph.all_logits]
    decoded = min(length, reference.prompt + _DECODE_STEPS) if verify else length
    for position in range(reference.prompt, decoded):
        yield position, engine.decode(tokens[position]), decode
    engine.release()
    for graph in verify:
        while engine.position < length:
            start = engine.position
            window = tokens[start : start + graph.tokens]
            rows = engine.run_chunk(graph, window)[-len(window) :]
            for offset, logits in enumerate(rows):
                yield start + offset, logits, graph


def _replay_cache_free(
    reference: Reference, shape: ModelShape, compile_graph: CompileGraph, pad_id: int
) -> Iterator[Comparable]:
    engine = CacheFreeEngine(shape, compile_graph, pad_id)
    graph = shape.graphs[0]
    prompt = reference.token_ids[: reference.prompt]
    yield len(prompt) - 1, engine.prefill_chunk(Chunk(graph, len(prompt)), prompt), graph
    for position in range(len(prompt), min(len(prompt) + 4, len(reference.token_ids))):
        yield position, engine.decode(reference.token_ids[position]), graph


def _verify_tokens(graphs: Sequence[GraphInfo]) -> int:
    return max((graph.tokens for graph in graphs if graph.all_logits), default=0)
