"""The KV cache: which slot holds which token, and how new tokens get in.

The graphs take slots in any order, because the mask alone says what each slot holds. So a cache is
a block of memory, the position of the token in each slot, and a rule for where the next token goes:
``ShiftCache`` moves everything one slot to the left, literally; ``RingCache`` moves the origin
instead and overwrites the oldest slot. Both must give the same tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Position of a slot that holds nothing: older than any token, so every mask hides it.
EMPTY = -(1 << 40)

# Keys or values of one or more layers: [layers, kv_heads, slots, head_dim].
Block = NDArray[Any]


class KVCache(ABC):
    """Keys and values of the last ``capacity`` tokens.

    Args:
        blocks: the memory the graphs read, ``[layers, kv_heads, capacity, head_dim]`` each. Layers
            of one shape share a block, so that a write is one NumPy call and not one per layer.

    Attributes:
        positions: int64 ``[capacity]``; position of the token in each slot, ``EMPTY`` where none is.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)
        self.capacity = int(self.blocks[0].shape[2])
        self.positions = np.full(self.capacity, EMPTY, dtype=np.int64)

    def reset(self) -> None:
        """Forget every token. The memory keeps its bytes; no mask shows them again."""
        self.positions.fill(EMPTY)

    def clear(self) -> None:
        """Forget every token and zero the memory: even a hidden NaN would reach the sums."""
        self.reset()
        for block in self.blocks:
            block.fill(0)

    @abstractmethod
    def write(self, new: Sequence[Block], count: int, first_position: int) -> None:
        """Store the last ``count`` tokens of ``new`` (blocks ``[layers, kv_heads, N, head_dim]``).

        Their positions are ``first_position`` and on. ``count`` is at most ``capacity``.
        """


class RingCache(KVCache):
    """The left shift done by moving the origin: new tokens overwrite the oldest, nothing else moves."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(blocks)
        self._next = 0

    def reset(self) -> None:
        super().reset()
        self._next = 0

    def write(self, new: Sequence[Block], count: int, first_position: int) -> None:
        if count == 1:  # every decode step: no slices, no second segment
            self._write_one(new, first_position)
            return
        offset = 0
        while offset < count:  # twice where the ring wraps around
            width = min(count - offset, self.capacity - self._next)
            self._write_run(new, count - offset, width, first_position + offset)
            offset += width

    def _write_one(self, new: Sequence[Block], position: int) -> None:
        slot = self._next
        for block, fresh in zip(self.blocks, new, strict=True):
            block[:, :, slot] = fresh[:, :, -1]
        self.positions[slot] = position
        self._next = slot + 1 if slot + 1 < self.capacity else 0

    def _write_run(self, new: Sequence[Block], remaining: int, width: int, position: int) -> None:
        slots = slice(self._next, self._next + width)
        for block, fresh in zip(self.blocks, new, strict=True):
            start = fresh.shape[2] - remaining
            block[:, :, slots] = fresh[:, :, start : start + width]
        self.positions[slots] = np.arange(position, position + width)
        self._next = (self._next + width) % self.capacity


class ShiftCache(KVCache):
    """The seed's algorithm: every write moves all slots to the left and puts the new tokens last."""

    def write(self, new: Sequence[Block], count: int, first_position: int) -> None:
        kept = self.capacity - count
        for block, fresh in zip(self.blocks, new, strict=True):
            block[:, :, :kept] = block[:, :, count:].copy()
            block[:, :, kept:] = fresh[:, :, fresh.shape[2] - count :]
        self.positions[:kept] = self.positions[count:].copy()
        self.positions[kept:] = np.arange(first_position, first_position + count)


CACHES: dict[str, type[KVCache]] = {"ring": RingCache, "shift": ShiftCache}
