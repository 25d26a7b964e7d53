"""Rotary position embeddings as tables: computed in f32 at export, looked up by ``position_ids``.

An NPU compiler turns integer positions into f16, which cannot tell positions above 2048 apart, and
computes sine and cosine coarsely. A table row is exact, however long the text.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from npu_llm.errors import UnsupportedModelError


class RotaryTable(torch.nn.Module):
    """Takes the place of a model's rotary embedding; the first call with new arguments makes a table.

    Args:
        original: the model's module, ``forward(x, position_ids, …) -> (cos, sin)``, ``[1, N, D]`` each.
        positions: rows of the table.
    """

    def __init__(self, original: torch.nn.Module, positions: int) -> None:
        super().__init__()
        self._original = [original]  # in a list: not a submodule, so not a part of the traced graph
        self._positions = positions
        self._names: dict[str, str] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = repr((args, sorted(kwargs.items())))
        if key not in self._names:
            self._make_tables(key, x, args, kwargs)
        name = self._names[key]
        cos = torch.nn.functional.embedding(position_ids, self.get_buffer(f"cos_{name}"))
        sin = torch.nn.functional.embedding(position_ids, self.get_buffer(f"sin_{name}"))
        return cos, sin

    def _make_tables(self, key: str, x: torch.Tensor, args: Any, kwargs: Any) -> None:
        every = torch.arange(self._positions)[None]
        found = self._original[0](x.float(), every, *args, **kwargs)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].is_complex():
            raise UnsupportedModelError(
                f"{type(self._original[0]).__name__} does not give cosines and sines"
            )
        name = str(len(self._names))
        self._names[key] = name
        self.register_buffer(f"cos_{name}", found[0][0].float().contiguous())
        self.register_buffer(f"sin_{name}", found[1][0].float().contiguous())


def use_tables(model: torch.nn.Module, positions: int) -> None:
    """Put a :class:`RotaryTable` in the place of every rotary embedding of the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_rotary(child):
                setattr(parent, name, RotaryTable(child, positions))


def _is_rotary(module: torch.nn.Module) -> bool:
    takes = inspect.signature(module.forward).parameters
    return "RotaryEmbedding" in type(module).__name__ and "position_ids" in takes


def table_limit(config: Any, max_length: int, wanted: int) -> int:
    """Return how many positions may go into one table, at most ``wanted``.

    LongRoPE has one set of factors up to the original context and another beyond it. One table holds
    one set, and the short one is right for every text that fits in the original context.

    Raises:
        UnsupportedModelError: the table would need factors that depend on the text's length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = parameters.values() if _is_nested(parameters) else [parameters]
    for kind in kinds:
        rope_type = kind.get("rope_type", "default")
        if rope_type == "longrope":
            wanted = min(wanted, _longrope_limit(config, kind, max_length))
        if rope_type == "dynamic" and wanted > config.max_position_embeddings:
            raise UnsupportedModelError(
                "dynamic NTK scaling changes with the text's length: "
                f"use --max-positions {config.max_position_embeddings} or less"
            )
    return wanted


def _longrope_limit(config: Any, parameters: Any, max_length: int) -> int:
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", config.max_position_embeddings
    )
    if max_length > original:
        raise UnsupportedModelError(
            f"LongRoPE beyond the model's original context is not supported: "
            f"use --max-length {original} or less"
        )
    return int(original)


def _is_nested(parameters: Any) -> bool:
    return bool(parameters) and all(isinstance(value, dict) for value in parameters.values())
