"""The host-made inputs of one graph: token ids, positions and masks, filled in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Added to the score of what a token may not see. Finite, because a row of -inf turns into NaN;
# exact in f16, and far enough from its limit that adding a score cannot overflow.
MASKED = -32768.0


class StepInputs:
    """Inputs of a graph ``(N, C)``; the arrays are bound to the graph once and refilled every run.

    Args:
        tokens: ``N``.
        capacity: ``C``; 0 for a graph without a past.
        context: tokens a token may attend to, itself included.
        sliding_window: the same for sliding-window layers; None where a model has none.
        pad_id: token id that fills the left of a short chunk.
        mask_dtype: element type of the masks.

    Attributes:
        input_ids, position_ids: int64 ``[1, N]``.
        masks: port name to additive mask ``[1, 1, N, C+N]``.
    """

    def __init__(
        self,
        tokens: int,
        capacity: int,
        *,
        context: int,
        sliding_window: int | None,
        mask_ports: Sequence[str],
        pad_id: int,
        mask_dtype: np.dtype[Any],
    ) -> None:
        self.tokens = tokens
        self.pad_id = pad_id
        self.input_ids = np.full((1, tokens), pad_id, dtype=np.int64)
        self.position_ids = np.zeros((1, tokens), dtype=np.int64)
        reaches = {"attention_mask": context, "sliding_attention_mask": sliding_window or context}
        self._masks = {
            port: AttentionMask(tokens, capacity, min(reaches[port], context), mask_dtype)
            for port in mask_ports
        }
        self.masks = {port: mask.array for port, mask in self._masks.items()}

    def fill(self, token_ids: Sequence[int], first_position: int, slots: NDArray[np.int64]) -> None:
        """Right-align ``token_ids`` (1 to ``N`` of them) and set positions and masks.

        Args:
            token_ids: the real tokens.
            first_position: position of the first of them.
            slots: position of the token in each slot of the cache, ``[C]``.
        """
        pads = self.tokens - len(token_ids)
        self.input_ids[0, :pads] = self.pad_id
        self.input_ids[0, pads:] = token_ids
        self.position_ids[0, :pads] = 0
        self.position_ids[0, pads:] = np.arange(first_position, first_position + len(token_ids))
        for mask in self._masks.values():
            mask.fill(pads, first_position, slots)

    def fill_one(self, token_id: int, position: int, slots: NDArray[np.int64]) -> None:
        """:meth:`fill` for a decode graph (``N`` = 1), without allocating."""
        self.input_ids[0, 0] = token_id
        self.position_ids[0, 0] = position
        for mask in self._masks.values():
            mask.fill_past(position, slots)


class AttentionMask:
    """One additive mask ``[1, 1, N, C+N]``: a token sees itself and the ``reach - 1`` before it.

    A padding row sees itself alone, because no row may be masked whole; nobody sees a padding column.
    """

    def __init__(self, tokens: int, capacity: int, reach: int, dtype: np.dtype[Any]) -> None:
        self.array = np.zeros((1, 1, tokens, capacity + tokens), dtype=dtype)
        self._reach = reach
        self._past = self.array[0, 0, :, :capacity]  # [N, C]
        self._new = self.array[0, 0, :, capacity:]  # [N, N]
        self._hidden = np.zeros((tokens, capacity), dtype=np.bool_)
        self._rows = np.arange(tokens, dtype=np.int64)[:, None]
        age = self._rows - self._rows.T  # how far column j lies behind row i
        self._unpadded = np.where((age < 0) | (age >= reach), dtype.type(MASKED), dtype.type(0))
        self._pads = -1

    def fill(self, pads: int, first_position: int, slots: NDArray[np.int64]) -> None:
        if pads != self._pads:
            self._fill_new(pads)
        # The oldest position that row i may not see; a padding row may see none.
        bounds = self._rows + (first_position - pads - self._reach)
        bounds[:pads] = np.iinfo(np.int64).max
        np.less_equal(slots, bounds, out=self._hidden)
        self._write_past()

    def fill_past(self, position: int, slots: NDArray[np.int64]) -> None:
        np.less_equal(slots, position - self._reach, out=self._hidden)
        self._write_past()

    def _write_past(self) -> None:
        self._past.fill(0)
        np.copyto(self._past, MASKED, where=self._hidden, casting="unsafe")

    def _fill_new(self, pads: int) -> None:
        self._new[...] = self._unpadded
        self._new[:, :pads] = MASKED
        self._new[:pads] = MASKED
        diagonal = np.arange(pads)
        self._new[diagonal, diagonal] = 0
        self._pads = pads
