"""Traces a torch model once, with dynamic shapes, into one OpenVINO model with explicit KV ports."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import openvino as ov
import torch

from npu_llm.artifact import LayerCache
from npu_llm.errors import ExportError, NPULLMError, UnsupportedModelError
from npu_llm_export.attention import ATTENTION_NAME, TracingCache
from npu_llm_export.rope import use_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Which tokens get logits: an input while dynamic, so that one trace serves graphs with logits for
# the last token and for all. Specialising a graph replaces it.
LOGIT_ROWS = "logit_rows"
FULL_MASK = "attention_mask"
SLIDING_MASK = "sliding_attention_mask"
PAST = "past_key_values"
PRESENT = "present"


@dataclass(frozen=True)
class TracedModel:
    """A dynamic OpenVINO model with the ports of the graph contract, its cache in f32.

    ``sliding_window`` is None where no window is smaller than the context.
    """

    model: ov.Model
    layers: tuple[LayerCache, ...]
    sliding_window: int | None


class FlatModel(torch.nn.Module):
    """A causal language model as a function from tensors to tensors, in the order of ``port_names``."""

    def __init__(self, model: PreTrainedModel, masks: tuple[str, ...], window: int | None) -> None:
        super().__init__()
        self.model = model
        self._masks = masks
        self._window = window

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        masks, past = rest[: len(self._masks)], rest[len(self._masks) :]
        sliding = masks[-1] if SLIDING_MASK in self._masks else None
        cache = TracingCache(past, masks[0], sliding, self._window)
        logits = run_model(self.model, cache, input_ids, position_ids, logit_rows)
        cache.check_complete(len(past) // 2)
        return (logits, *cache.present())


def run_model(
    model: PreTrainedModel,
    cache: TracingCache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logit_rows: torch.Tensor,
) -> torch.Tensor:
    """Run the model over ``cache``; return logits of the rows asked for, ``[1, K, V]``."""
    with cache, logits_only_for(model, logit_rows):
        output = model(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
        )
    logits: torch.Tensor = output.logits.float()
    return logits


class logits_only_for:
    """While active, the model's head sees only these rows of its input: ``rows`` is int64 ``[K]``."""

    def __init__(self, model: PreTrainedModel, rows: torch.Tensor) -> None:
        self._head = model.get_output_embeddings()
        self._rows = rows
        if self._head is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no language-model head")

    def __enter__(self) -> None:
        self._hook = self._head.register_forward_pre_hook(self._select)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _select(self, _: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (args[0].index_select(1, self._rows),)


def trace_model(model: PreTrainedModel, positions: int, max_length: int) -> TracedModel:
    """Trace the model; its attention and rotary embeddings are replaced for good.

    Args:
        model: computes in f32 (see ``precision.compute_in_f32``), in eval mode.
        positions: rows of the RoPE tables.
        max_length: longest context; a sliding window that is not smaller is none.

    Raises:
        UnsupportedModelError: the model cannot be traced faithfully; says why.
    """
    config = model.config.get_text_config(decoder=True)
    layers = config.num_hidden_layers
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModelError(f"{type(model).__name__} takes no position_ids")
    use_tables(model, positions)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        with torch.no_grad():
            shapes, windows = _explore(model, layers, max_length)
            return _trace(model, shapes, windows)
    except NPULLMError:
        raise
    except Exception as error:
        _raise_swallowed_signal(error)
        raise ExportError(
            f"tracing {type(model).__name__} failed: {type(error).__name__}: {error}"
        ) from error


def _raise_swallowed_signal(error: Exception) -> None:
    """OpenVINO's converter calls back into Python, and turns a Ctrl-C there into its own error."""
    text = str(error)
    if "KeyboardInterrupt" in text:
        raise KeyboardInterrupt from error
    if "SystemExit" in text:  # what the command line makes of SIGTERM
        raise SystemExit(143) from error


def _explore(
    model: PreTrainedModel, layers: int, max_length: int
) -> tuple[tuple[LayerCache, ...], set[int | None]]:
    """Run the model once without a past: what its keys and values look like, which masks it wants."""
    tokens = 3
    causal = torch.full((tokens, tokens), -1e9).triu(1)[None, None]
    cache = TracingCache(None, causal)
    positions = torch.arange(tokens)[None]
    run_model(model, cache, torch.zeros_like(positions), positions, torch.tensor([tokens - 1]))
    cache.check_complete(layers)
    shapes = tuple(
        LayerCache(key.shape[1], key.shape[3], value.shape[3])
        for key, value in (cache.new[layer] for layer in range(layers))
    )
    windows = {None if w is None or w >= max_length else w for w in cache.windows}
    if len(windows - {None}) > 1:
        raise UnsupportedModelError(
            f"sliding windows of several sizes: {sorted(filter(None, windows))}"
        )
    return shapes, windows


def _trace(
    model: PreTrainedModel, layers: tuple[LayerCache, ...], windows: set[int | None]
) -> TracedModel:
    window = next((w for w in windows if w is not None), None)
    masks = (FULL_MASK,) * (None in windows) + (SLIDING_MASK,) * (window is not None)
    example = _example(layers, masks)
    scripted = torch.jit.trace(
        FlatModel(model, masks, window), example, strict=False, check_trace=False
    )
    traced = ov.convert_model(scripted, example_input=example)
    _name_ports(traced, masks, layers)
    return TracedModel(traced, layers, window)


def _example(layers: Sequence[LayerCache], masks: Sequence[str]) -> tuple[torch.Tensor, ...]:
    tokens, capacity = 3, 5
    mask = torch.full((tokens, capacity + tokens), 0.0)
    mask[:, capacity:] = torch.full((tokens, tokens), -1e9).triu(1)
    past = []
    for layer in layers:
        past.append(torch.zeros(1, layer.kv_heads, capacity, layer.key_dim))
        past.append(torch.zeros(1, layer.kv_heads, capacity, layer.value_dim))
    positions = torch.arange(capacity, capacity + tokens)[None]
    rows = torch.arange(tokens)
    return (torch.zeros_like(positions), positions, rows, *[mask[None, None]] * len(masks), *past)


def _name_ports(model: ov.Model, masks: Sequence[str], layers: Sequence[LayerCache]) -> None:
    """Give every port its contract name and every dimension that is known its size."""
    inputs = ["input_ids", "position_ids", LOGIT_ROWS, *masks, *cache_ports(PAST, len(layers))]
    outputs = ["logits", *cache_ports(PRESENT, len(layers))]
    if len(model.inputs) != len(inputs) or len(model.outputs) != len(outputs):
        raise UnsupportedModelError(
            f"the traced graph has {len(model.inputs)} inputs and {len(model.outputs)} outputs, "
            f"{len(inputs)} and {len(outputs)} were expected"
        )
    for port, name in zip([*model.inputs, *model.outputs], [*inputs, *outputs], strict=True):
        port.get_tensor().set_names({name})
    for parameter, name in zip(model.get_parameters(), inputs, strict=True):
        parameter.set_friendly_name(name)


def cache_ports(prefix: str, layers: int) -> list[str]:
    """Port names of all layers' keys and values, in order."""
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
