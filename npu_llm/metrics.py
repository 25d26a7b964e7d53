"""What one generation cost: counted and timed while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GenerationMetrics:
    """Counts and times of one generation.

    Attributes:
        prompt_tokens: real tokens of the prompt.
        generated_tokens: tokens generated, an end-of-sequence token included.
        chunks: sizes ``N`` of the graphs the prompt ran through, in order.
        padding_share: share of the prompt's computed tokens that were padding, 0 to 1.
        ttft_s: seconds from the call to the first token, tokenizing and sampling included. Graphs
            that had to be compiled for this call are in it; see ``compile_s``.
        tpot_s: mean seconds per token after the first; None with fewer than two tokens.
        inference_s: seconds inside the device's inference calls while decoding.
        host_s: seconds per decoded token spent outside them: masks, cache, sampling, text.
        compile_s: seconds spent reading and compiling graphs during this call.
    """

    prompt_tokens: int
    generated_tokens: int
    chunks: tuple[int, ...]
    padding_share: float
    ttft_s: float
    tpot_s: float | None
    inference_s: float
    host_s: float | None
    compile_s: float

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second, the first one excluded."""
        return 1.0 / self.tpot_s if self.tpot_s else None
