"""How attention is written into the graphs: the one place that knows the formulation.

transformers lets a model run any attention function (``AttentionInterface``) over any mask
(``AttentionMaskInterface``) and any ``Cache``. The three here belong together: the cache hands out
past keys and values as graph inputs, the mask function hands out the graph's mask inputs, and the
attention function combines them. A model that calls all three as expected needs no code of its own;
one that does not is refused (see :class:`TracingCache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface

from npu_llm.errors import UnsupportedModelError

ATTENTION_NAME = "npu_llm_split"

# The cache whose model is running now. transformers passes the attention function the model's
# tensors only, so the past has to reach it by another way.
_active: list[TracingCache] = []


class TracingCache(Cache):
    """A ``Cache`` that records the new keys and values and never concatenates anything.

    ``update`` returns the new tensors untouched; the attention function fetches the past of the
    same layer by the identity of those tensors. A model that changes them in between, runs its own
    attention code, or shares keys and values between layers is found by :meth:`check_complete`.

    Args:
        past: keys and values of each layer in turn, ``[1, Hkv, C, D]`` each; None for an exploratory
            run without a past.
        full_mask: additive mask ``[1, 1, N, C+N]`` for layers that see the whole context.
        sliding_mask: the same for layers with a sliding window of ``sliding_window`` tokens; None
            where no window is smaller than the context, so that the full mask serves them too.
    """

    def __init__(
        self,
        past: Sequence[torch.Tensor] | None,
        full_mask: torch.Tensor,
        sliding_mask: torch.Tensor | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._past = None if past is None else list(zip(past[0::2], past[1::2], strict=True))
        self.full_mask = full_mask
        self.sliding_mask = sliding_mask
        self.sliding_window = sliding_window
        self.windows: set[int | None] = set()
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.attended: list[int] = []

    def __enter__(self) -> TracingCache:
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.pop()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.new[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def layer_of(self, key: torch.Tensor, value: torch.Tensor) -> int:
        for layer, (new_key, new_value) in self.new.items():
            if new_key is key and new_value is value:
                return layer
        raise UnsupportedModelError(
            "this model's attention does not use the keys and values of its cache as they are "
            "(shared between layers, or changed after the cache)"
        )

    def past_of(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._past is None:
            return key[:, :, :0], value[:, :, :0]
        return self._past[layer]

    def check_complete(self, layers: int) -> None:
        """Raise UnsupportedModelError unless every layer went through the attention function once."""
        if sorted(self.attended) != list(range(layers)) or sorted(self.new) != list(range(layers)):
            raise UnsupportedModelError(
                f"this model has its own attention code: {len(self.attended)} of {layers} layers "
                "went through transformers' attention interface, so its graph would be wrong"
            )

    def present(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for layer in sorted(self.new) for tensor in self.new[layer])

    # What transformers asks of a cache while it builds masks. Positions come as position_ids, so
    # a length of zero is right for everything that is derived from it.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def is_sliding(self) -> list[bool]:
        return []


def split_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to past and new keys apart; only the scores are concatenated, never the cache.

    Query heads that share a key head are folded into the query's rows, so keys and values are not
    repeated either. Shapes: query ``[1, H, N, D]``, key ``[1, Hkv, N, D]``, value ``[1, Hkv, N, Dv]``;
    returns ``[1, N, H, Dv]``.
    """
    cache = _active[-1]
    layer = cache.layer_of(key, value)
    cache.attended.append(layer)
    past_key, past_value = cache.past_of(layer, key, value)
    if attention_mask is None:
        raise UnsupportedModelError("this model runs attention without a causal mask")

    heads, kv_heads = query.shape[1], key.shape[1]
    tokens, capacity = key.shape[2], past_key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    folded = (query * scale).reshape(1, kv_heads, -1, query.shape[-1])  # [1, Hkv, gN, D]
    scores = torch.cat(
        [folded @ past_key.transpose(2, 3), folded @ key.transpose(2, 3)], dim=-1
    )  # [1, Hkv, gN, C+N]
    scores = scores.reshape(1, heads, -1, capacity + tokens)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + attention_mask
    if (
        s_aux is not None
    ):  # a learned sink: one more column that takes probability and gives nothing
        sink = s_aux.reshape(1, heads, 1, 1).expand(1, heads, tokens, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)  # [1, H, N, C+N(+1)]
    weights = weights.reshape(1, kv_heads, folded.shape[2], -1)
    mixed = (
        weights[..., :capacity] @ past_value + weights[..., capacity : capacity + tokens] @ value
    )
    return mixed.reshape(1, heads, tokens, -1).transpose(1, 2), None


def host_mask(
    batch_size: int, *_: Any, mask_function: Any = None, local_size: int | None = None, **__: Any
) -> torch.Tensor:
    """Answer transformers' request for a mask with the graph input that the host will fill.

    The rule asked for (``mask_function``) is evaluated on a few index pairs: it has to be the causal
    one or a sliding window, because those are the two masks the runtime knows how to make.
    """
    cache = _active[-1]
    window = _window_of(mask_function, local_size)
    cache.windows.add(window)
    if cache.sliding_mask is not None and window == cache.sliding_window:
        return cache.sliding_mask
    return cache.full_mask


def _window_of(mask_function: Any, local_size: int | None) -> int | None:
    """Return the sliding window of a mask rule in tokens, None for plain causal attention."""
    reach = local_size or 64
    rows = torch.tensor([0, 1, reach - 1, reach, reach + 1, 2 * reach + 3])[:, None]
    columns = torch.arange(2 * reach + 4)[None, :]
    allowed = mask_function(0, 0, rows, columns)
    causal = columns <= rows
    if torch.equal(allowed.expand_as(causal), causal):
        return None
    if local_size and torch.equal(allowed, causal & (columns > rows - local_size)):
        return local_size
    raise UnsupportedModelError(
        "this model's attention mask is neither causal nor a sliding window "
        "(chunked or bidirectional attention is not supported)"
    )


AttentionInterface.register(ATTENTION_NAME, split_attention)
AttentionMaskInterface.register(ATTENTION_NAME, host_mask)
