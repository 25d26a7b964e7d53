"""The sampler draws from the same distributions as transformers' logits processors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from npu_llm.errors import GenerationError
from npu_llm.options import GenerationOptions
from npu_llm.sampling import FloatArray, Sampler

VOCAB = 200


def make_sampler(prompt: Sequence[int] = (), vocab_size: int = VOCAB, **options: Any) -> Sampler:
    return Sampler(GenerationOptions(**options), vocab_size, prompt)


def random_logits(seed: int, vocab_size: int = VOCAB, scale: float = 3.0) -> FloatArray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(vocab_size) * scale).astype(np.float32)


def tied_logits(seed: int, vocab_size: int = VOCAB) -> FloatArray:
    return np.random.default_rng(seed).integers(-6, 7, vocab_size).astype(np.float32)


def transformers_probabilities(
    logits: FloatArray, prompt: Sequence[int], options: GenerationOptions
) -> FloatArray:
    warpers = LogitsProcessorList()
    if options.repetition_penalty != 1.0:
        warpers.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    # Which of equal tokens top-p drops is up to torch's sort: a stable one makes it comparable.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
        scores = warpers(ids, torch.from_numpy(logits.copy())[None])  # type: ignore[arg-type]
    probabilities: FloatArray = scores.softmax(-1)[0].numpy()
    return probabilities


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_k": VOCAB},
    {"temperature": 1.0, "top_k": VOCAB + 1},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.7, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.001},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.2, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 30, "repetition_penalty": 0.7},
]


@pytest.mark.parametrize("make_logits", [random_logits, tied_logits])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_is_that_of_transformers(
    filters: dict[str, Any], make_logits: Any
) -> None:
    options = GenerationOptions(**filters)
    for seed in range(30):
        logits = make_logits(seed)
        prompt = np.random.default_rng(seed).integers(0, VOCAB, 20).tolist()
        expected = transformers_probabilities(logits, prompt, options)
        actual = Sampler(options, VOCAB, prompt).probabilities(logits)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("vocab_size", [1, 2, 4, 10, 64, 100])
def test_top_p_of_equal_tokens_is_cut_where_transformers_cuts(
    top_p: float, vocab_size: int
) -> None:
    options = GenerationOptions(temperature=1.0, top_p=top_p)
    logits = np.zeros(vocab_size, np.float32)
    expected = transformers_probabilities(logits, [], options)
    actual = Sampler(options, vocab_size, []).probabilities(logits)
    np.testing.assert_array_equal(actual > 0, expected > 0)


def test_top_k_keeps_every_token_equal_to_the_last_one() -> None:
    logits = np.array([3, 1, 2, 2, 2, 0], np.float32)
    probabilities = make_sampler(vocab_size=6, temperature=1.0, top_k=2).probabilities(logits)
    assert np.flatnonzero(probabilities).tolist() == [0, 2, 3, 4]


def test_top_p_keeps_at_least_the_likeliest_token() -> None:
    logits = np.array([0, 9, 0], np.float32)
    probabilities = make_sampler(vocab_size=3, temperature=1.0, top_p=1e-9).probabilities(logits)
    assert probabilities.tolist() == [0, 1, 0]


def test_min_p_is_relative_to_the_likeliest_token_after_temperature() -> None:
    logits = np.log(np.array([0.5, 0.26, 0.24], np.float32))
    hot = make_sampler(vocab_size=3, temperature=1.0, min_p=0.5).probabilities(logits)
    cold = make_sampler(vocab_size=3, temperature=0.5, min_p=0.5).probabilities(logits)
    assert np.flatnonzero(hot).tolist() == [0, 1]
    assert np.flatnonzero(cold).tolist() == [0]


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[[3, 7]] = 1.0
    for filters in ({}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}):
        sampler = make_sampler(temperature=1.0, seed=0, **filters)
        assert {sampler.sample(logits) for _ in range(50)} == {3, 7}


# --- penalties -------------------------------------------------------------------------------


def naive_penalties(
    logits: FloatArray, prompt: Sequence[int], output: Sequence[int], options: GenerationOptions
) -> FloatArray:
    scores = logits.astype(np.float64)
    for token in {*prompt, *output}:
        factor = options.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    for token in set(output):
        scores[token] -= options.presence_penalty
        scores[token] -= options.frequency_penalty * list(output).count(token)
    weights = np.exp(scores / options.temperature - (scores / options.temperature).max())
    probabilities: FloatArray = (weights / weights.sum()).astype(np.float32)
    return probabilities


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -0.4, "presence_penalty": -2.0},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ],
    ids=str,
)
def test_penalties_follow_the_output_token_by_token(penalties: dict[str, Any]) -> None:
    options = GenerationOptions(temperature=1.5, seed=3, **penalties)
    prompt, output = [1, 1, 5, 9], list[int]()
    sampler = Sampler(options, 12, prompt)
    for seed in range(60):
        logits = random_logits(seed, 12, scale=1.0)
        expected = naive_penalties(logits, prompt, output, options)
        np.testing.assert_allclose(sampler.probabilities(logits), expected, rtol=1e-4)
        output.append(sampler.sample(logits))
    assert len(set(output)) < len(output)  # tokens did repeat


def test_repetition_penalty_sees_output_tokens_as_transformers_does() -> None:
    options = GenerationOptions(temperature=0.9, repetition_penalty=1.4, seed=0)
    sampler, tokens = Sampler(options, VOCAB, [4, 8]), [4, 8]
    for seed in range(20):
        logits = random_logits(seed)
        expected = transformers_probabilities(logits, tokens, options)
        np.testing.assert_allclose(sampler.probabilities(logits), expected, rtol=2e-5)
        tokens.append(sampler.sample(logits))


def test_presence_and_frequency_penalties_ignore_the_prompt() -> None:
    logits = random_logits(0)
    sampler = make_sampler([int(logits.argmax())], presence_penalty=2.0, frequency_penalty=2.0)
    assert sampler.sample(logits) == logits.argmax()


def test_penalties_change_a_greedy_choice() -> None:
    logits = np.array([1.0, 0.9, -1.0], np.float32)
    assert make_sampler([0], 3, repetition_penalty=1.5).sample(logits) == 1
    sampler = make_sampler([], 3, presence_penalty=0.5)
    assert [sampler.sample(logits) for _ in range(2)] == [0, 1]


def test_frequency_penalty_takes_greedy_turns() -> None:
    sampler = make_sampler([], 3, frequency_penalty=1.0)
    logits = np.array([2.0, 1.5, 0.0], np.float32)
    assert [sampler.sample(logits) for _ in range(6)] == [0, 1, 0, 1, 0, 2]


def test_looking_at_probabilities_is_not_remembered() -> None:
    logits = random_logits(1)
    sampler = make_sampler(temperature=1.0, seed=0, presence_penalty=2.0)
    first = sampler.probabilities(logits)
    np.testing.assert_array_equal(sampler.probabilities(logits), first)


# --- draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", [{}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_draws_have_the_frequencies_of_the_probabilities(filters: dict[str, Any]) -> None:
    logits = random_logits(5, 12, scale=1.0)
    sampler = make_sampler(vocab_size=12, temperature=1.0, seed=11, **filters)
    expected = sampler.probabilities(logits) * 10_000
    drawn = np.bincount([sampler.sample(logits) for _ in range(10_000)], minlength=12)
    allowed = expected > 0
    assert not drawn[~allowed].any()
    chi_square = (((drawn - expected) ** 2)[allowed] / expected[allowed]).sum()
    freedom = np.count_nonzero(allowed) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations


@pytest.mark.parametrize("random", [0.0, 1 - 2**-53])
def test_the_ends_of_the_random_range_draw_possible_tokens(random: float) -> None:
    logits = np.array([-np.inf, 1, -200, 1, -np.inf], np.float32)
    sampler = make_sampler(vocab_size=5, temperature=1.0)
    sampler._rng = SimpleNamespace(random=lambda: random)  # type: ignore[assignment]
    assert sampler.sample(logits) in (1, 3)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_same_seed_draws_the_same_tokens(filters: dict[str, Any]) -> None:
    def draw() -> list[int]:
        sampler = make_sampler([1, 2, 3], seed=42, **filters)
        return [sampler.sample(random_logits(seed)) for seed in range(20)]

    assert draw() == draw()


def test_without_a_seed_two_samplers_differ() -> None:
    flat = np.zeros(VOCAB, np.float32)
    first, second = (make_sampler(temperature=1.0) for _ in range(2))
    assert [first.sample(flat) for _ in range(20)] != [second.sample(flat) for _ in range(20)]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[17, 90, 150]] = 2.0
    assert make_sampler().sample(logits) == 17
    assert make_sampler([90], repetition_penalty=1.1).sample(logits) == 17
    assert make_sampler().probabilities(logits)[17] == 1.0


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(2, scale=1e4)
    assert make_sampler(temperature=temperature, seed=0).sample(logits) == logits.argmax()


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, *FILTERS], ids=str)
def test_the_logits_of_the_caller_stay_as_they_are(filters: dict[str, Any]) -> None:
    logits = random_logits(7)
    before = logits.copy()
    sampler = make_sampler([1, 2], seed=0, **{**filters, "presence_penalty": 1.0})
    sampler.sample(logits)
    make_sampler([1, 2], seed=0, **filters).sample(logits)
    np.testing.assert_array_equal(logits, before)
    logits.flags.writeable = False  # as the engine's output memory may be
    sampler.sample(logits)


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, *FILTERS[:2], FILTERS[-2]], ids=str)
def test_a_vocabulary_of_150k_tokens_works(filters: dict[str, Any]) -> None:
    vocab_size = 151_936
    logits = random_logits(0, vocab_size)
    sampler = make_sampler([0, vocab_size - 1], vocab_size, seed=0, **filters)
    assert abs(float(sampler.probabilities(logits).sum()) - 1.0) < 1e-4
    assert all(0 <= sampler.sample(logits) < vocab_size for _ in range(3))


# --- broken models ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(
    ("broken", "kind"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.nan, "NaN")]
)
def test_one_broken_logit_is_an_error_that_says_what_to_try(
    broken: float, kind: str, options: dict[str, Any]
) -> None:
    logits = random_logits(0)
    logits[150] = broken
    with pytest.raises(GenerationError, match=f"returned {kind} logits: try .*CPU") as error:
        make_sampler(seed=0, **options).sample(logits)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"repetition_penalty": 1.1}], ids=str
)
def test_only_broken_logits_are_an_error(value: float, options: dict[str, Any]) -> None:
    logits = np.full(VOCAB, value, np.float32)
    for choose in (Sampler.sample, Sampler.probabilities):
        with pytest.raises(GenerationError):
            choose(make_sampler([1], **options), logits)
