"""Facts of an artifact as the terminal shows them, for ``info`` and for the end of ``export``."""

from __future__ import annotations

import re

from npu_llm.artifact import WEIGHTS_FILE, GraphInfo, Manifest, Verification, WeightsInfo


def size_text(size: int) -> str:
    """Bytes, in the decimal unit that suits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def shape_text(graph: GraphInfo) -> str:
    return f"({graph.tokens}, {graph.capacity})"


def weights_text(weights: WeightsInfo) -> str:
    if weights.format == "fp16":
        return weights.format
    grouped = f"groups of {weights.group_size}" if weights.group_size > 0 else "channel-wise"
    return f"{weights.format} {grouped}"


def verification_text(verification: Verification) -> str:
    return (
        f"{verification.tokens} positions: max logit difference "
        f"{verification.traced_max_abs_diff:.1e} as traced, "
        f"{verification.saved_max_abs_diff:.2g} as saved; "
        f"top-1 agreement {verification.saved_top1_agreement:.1%}"
    )


def capacity(manifest: Manifest) -> int:
    """KV slots of the largest graph with a cache; 0 without one."""
    return max((graph.capacity for graph in manifest.graphs), default=0)


def kv_cache_bytes(manifest: Manifest) -> int:
    """Memory of the whole KV cache at the largest capacity."""
    bits = re.search(r"\d+", manifest.cache_dtype)
    slot = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in manifest.layers)
    return capacity(manifest) * slot * (int(bits.group()) if bits else 16) // 8


def total_bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def weights_bytes(manifest: Manifest) -> int:
    return manifest.files[WEIGHTS_FILE].size
