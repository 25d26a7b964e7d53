"""What a caller may ask of one generation, checked before anything runs."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_llm.errors import OptionError

log = logging.getLogger("npu_llm")

_SAMPLING_ONLY = {"top_k", "top_p", "min_p"}
_MANAGED = {
    "position_ids": "they are computed from the prompt",
    "past_key_values": "the KV cache belongs to the generator",
    "attention_mask": "it is computed from the prompt",
    "cache_position": "it is computed from the prompt",
    "use_cache": 'an artifact exported with --no-kv-cache, or kv="none", runs without a cache',
}


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of one generation; every field is validated when the object is made.

    Attributes:
        max_new_tokens: most tokens to generate; at least 1.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``.
        min_p: drop tokens less likely than ``min_p`` times the likeliest one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in the
            prompt or the output (Keskar et al. 2019, as in transformers); 1 is off.
        presence_penalty: subtracted once from the logit of each token in the output.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        seed: makes sampling repeatable; None draws a new seed.
        stop: generation ends before the first of these strings.
        ignore_eos: generate on past the model's end-of-sequence tokens.

    Raises:
        OptionError: a value is of the wrong type or out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.max_new_tokens, minimum=1)
        _check_int("top_k", self.top_k, minimum=0)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, minimum=0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def resolve_options(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> GenerationOptions:
    """Lay the caller's options over the model's defaults.

    Raises:
        OptionError: a name is unknown, managed by the generator itself, or a value is out of range.
    """
    known = [field.name for field in dataclasses.fields(GenerationOptions)]
    for name in given:
        if name in _MANAGED:
            raise OptionError(f"{name} cannot be passed in: {_MANAGED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the options are {', '.join(known)}"
            raise OptionError(f"unknown generation option {name!r}: {hint}")
    options = GenerationOptions(**{**defaults, **given})
    if options.temperature == 0.0:
        for name in _SAMPLING_ONLY & set(given):
            if getattr(options, name) != getattr(GenerationOptions, name):
                log.warning("%s has no effect with temperature 0: give a temperature too", name)
    return options


def _check_int(name: str, value: object, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise OptionError(f"{name} must be a whole number of at least {minimum}, not {value!r}")


def _check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and low <= value <= high and not (above and value == low):  # type: ignore[arg-type, operator]
        return
    floor = f"above {low:g}" if above else f"at least {low:g}"
    ceiling = "" if math.isinf(high) else f" and at most {high:g}"
    raise OptionError(f"{name} must be {floor}{ceiling}, not {value!r}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise OptionError(f"stop must be one or more non-empty strings, not {stop!r}")
    return tuple(strings)
