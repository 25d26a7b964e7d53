"""The figures of one generation, as ``--stats`` and ``--json`` show them."""

from __future__ import annotations

import dataclasses
from typing import Any

from npu_llm.metrics import GenerationMetrics


def stats_lines(
    metrics: GenerationMetrics, *, finish_reason: str | None, device: str, load_s: float
) -> list[str]:
    """Aligned ``label  value`` lines."""
    rows = {
        "finish reason": str(finish_reason),
        "device": device,
        "prompt tokens": str(metrics.prompt_tokens),
        "generated tokens": str(metrics.generated_tokens),
        "chunks": _chunks(metrics),
        "load time": f"{load_s:.2f} s",
        "compile time": f"{metrics.compile_s:.2f} s",
        "TTFT": f"{metrics.ttft_s * 1e3:.0f} ms",
        "TPOT": _milliseconds(metrics.tpot_s),
        "tokens/s": _number(metrics.tokens_per_second),
        "host time": f"{_milliseconds(metrics.host_s)} per token",
    }
    return [f"{label:<17} {value}" for label, value in rows.items()]


def metrics_dict(metrics: GenerationMetrics) -> dict[str, Any]:
    return {**dataclasses.asdict(metrics), "tokens_per_second": metrics.tokens_per_second}


def _chunks(metrics: GenerationMetrics) -> str:
    sizes = " + ".join(str(size) for size in metrics.chunks)
    return f"{sizes} ({metrics.padding_share:.1%} padding)"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
