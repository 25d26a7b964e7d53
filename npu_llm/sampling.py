"""Choose the next token from a model's logits, as transformers and vLLM define the options."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from npu_llm.errors import GenerationError
from npu_llm.options import GenerationOptions

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.intp]

# Below this, logits / temperature overflows float32 and the softmax is one token anyway.
_GREEDY_BELOW = 1e-5


class Sampler:
    """Draws the tokens of one generation.

    The steps and their order are those of transformers: repetition penalty (prompt and output
    tokens), presence and frequency penalties (output tokens, as in vLLM), temperature, top-k,
    top-p, min-p, then a draw. With ``temperature=0`` the likeliest token is taken after the
    penalties, the lowest id of equals. The work buffers are made once, here.

    Args:
        options: the options of the generation.
        vocab_size: ``V``, the length of the logits.
        prompt_ids: the prompt's tokens, each in ``[0, V)``.
    """

    def __init__(
        self, options: GenerationOptions, vocab_size: int, prompt_ids: Sequence[int]
    ) -> None:
        self._options = options
        self._greedy = options.temperature < _GREEDY_BELOW
        self._rng = np.random.default_rng(options.seed)
        self._scores = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)
        self._cumulative = np.empty(vocab_size, np.float64)
        self._all_ids = np.arange(vocab_size)
        self._seen = _TokenCounts(vocab_size)
        self._output = _TokenCounts(vocab_size)
        self._repeats_cost = options.repetition_penalty != 1.0
        self._output_costs = bool(options.presence_penalty or options.frequency_penalty)
        if self._repeats_cost:
            for token in prompt_ids:
                self._seen.add(token)

    def sample(self, logits: FloatArray) -> int:
        """Choose one token, and remember it for the penalties.

        Args:
            logits: ``[V]`` float32; left unchanged.

        Raises:
            GenerationError: the logits hold NaN or +inf, or are all -inf.
        """
        if logits.size != self._scores.size:
            raise GenerationError(
                f"the model gives {logits.size:,} logits, its manifest says {self._scores.size:,}: "
                "the artifact is damaged, export it again"
            )
        scores = self._penalised(logits)
        token = _likeliest(scores)
        if not self._greedy:
            ids, weights = self._filtered(scores)
            token = int(ids[self._draw(weights)])
        self._record(token)
        return token

    def probabilities(self, logits: FloatArray) -> FloatArray:
        """Return the ``[V]`` float32 probabilities that :meth:`sample` would draw from now.

        Nothing is drawn or remembered.

        Raises:
            GenerationError: the logits hold NaN or +inf, or are all -inf.
        """
        scores = self._penalised(logits)
        token = _likeliest(scores)
        probabilities = np.zeros_like(self._scores)
        if self._greedy:
            probabilities[token] = 1.0
        else:
            ids, weights = self._filtered(scores)
            probabilities[ids] = weights / weights.sum()
        return probabilities

    def _penalised(self, logits: FloatArray) -> FloatArray:
        assert logits.shape == self._scores.shape, (logits.shape, self._scores.shape)
        if not (self._repeats_cost or self._output_costs):
            return logits  # no copy: greedy decoding is then one argmax
        np.copyto(self._scores, logits)
        if self._repeats_cost:
            self._penalise_repeats(self._scores)
        if self._output_costs:
            self._penalise_output(self._scores)
        return self._scores

    def _penalise_repeats(self, scores: FloatArray) -> None:
        ids = self._seen.ids
        penalty = np.float32(self._options.repetition_penalty)
        seen = scores[ids]
        scores[ids] = np.where(seen < 0, seen * penalty, seen / penalty)

    def _penalise_output(self, scores: FloatArray) -> None:
        ids = self._output.ids
        counts = self._output.counts[ids]
        cost = self._options.presence_penalty + self._options.frequency_penalty * counts
        scores[ids] -= cost

    def _filtered(self, scores: FloatArray) -> tuple[IdArray, FloatArray]:
        """Return the ids that may be drawn, and their weights; the weights need not sum to 1."""
        options = self._options
        temperature = np.float32(options.temperature)
        scores = np.divide(scores, temperature, out=self._scores)
        ids = self._all_ids
        if 0 < options.top_k < len(ids):
            ids = self._top_k(scores, options.top_k)
            scores = scores[ids]
        weights = _softmax(scores, out=self._weights[: len(ids)])
        if options.top_p < 1.0:
            kept = _top_p(scores, weights, options.top_p)
            ids, weights = ids[kept], weights[kept]
        if options.min_p > 0.0:
            likely = weights >= weights.max() * np.float32(options.min_p)
            ids, weights = ids[likely], weights[likely]
        return ids, weights

    def _top_k(self, scores: FloatArray, k: int) -> IdArray:
        # A selection, not a sort; and every token equal to the k-th stays, as in transformers.
        np.copyto(self._weights, scores)
        self._weights.partition(len(scores) - k)
        return np.flatnonzero(scores >= self._weights[len(scores) - k])

    def _draw(self, weights: FloatArray) -> int:
        cumulative = self._cumulative[: len(weights)]
        # In float64: a float32 running sum over 150k tokens would skip the smallest.
        np.cumsum(weights, dtype=np.float64, out=cumulative)
        total = cumulative[-1]
        # The product can round up to the total, which would land on a token of weight 0.
        target = min(self._rng.random() * total, np.nextafter(total, 0.0))
        return int(np.searchsorted(cumulative, target, side="right"))

    def _record(self, token: int) -> None:
        if self._repeats_cost:
            self._seen.add(token)
        if self._output_costs:
            self._output.add(token)


class _TokenCounts:
    """How often each token occurred, and which did, without a scan of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.float32)
        self._ids = np.empty(vocab_size, np.intp)
        self._distinct = 0

    @property
    def ids(self) -> IdArray:
        return self._ids[: self._distinct]

    def add(self, token: int) -> None:
        if not self.counts[token]:
            self._ids[self._distinct] = token
            self._distinct += 1
        self.counts[token] += 1


def _likeliest(scores: FloatArray) -> int:
    token = int(scores.argmax())
    # argmax stops at the first NaN, so looking at the winner checks the whole array.
    if not np.isfinite(scores[token]):
        kind = "NaN" if np.isnan(scores[token]) else "infinite"
        raise GenerationError(
            f'the model returned {kind} logits: try another device, such as device="CPU", '
            "or export the model again with another weights format"
        )
    return token


def _softmax(scores: FloatArray, out: FloatArray) -> FloatArray:
    np.subtract(scores, scores.max(), out=out)
    np.exp(out, out=out)
    out /= out.sum()
    return out


def _top_p(scores: FloatArray, probabilities: FloatArray, top_p: float) -> IdArray:
    """Return the positions that transformers' ``TopPLogitsWarper`` keeps.

    It sorts ascending and drops the tokens whose cumulative probability is at most
    ``1 - top_p``, but never the last one. Of equal tokens the lower ids are dropped first; in
    transformers that is left to torch's sort.
    """
    budget = np.float32(1.0 - top_p)
    # All tokens below the budget's V-th part together stay below it: dropped without sorting.
    may_stay = probabilities >= budget / np.float32(len(probabilities))
    candidates = np.flatnonzero(may_stay)
    dropped = np.where(may_stay, 0, probabilities).sum(dtype=np.float64)
    order = candidates[np.argsort(scores[candidates], kind="stable")]
    cumulative = dropped + np.cumsum(probabilities[order], dtype=np.float64)
    kept = cumulative.astype(np.float32) > budget
    kept[-1] = True
    positions: IdArray = order[kept]
    return positions
