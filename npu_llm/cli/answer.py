"""Running one generation in the foreground: text as it comes, and Ctrl-C that ends it cleanly."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_llm.generator import NPUGenerator
    from npu_llm.metrics import GenerationMetrics

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """What was generated, and whether the user cut it short."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    metrics: GenerationMetrics | None
    interrupted: bool


class Interruption:
    """Ctrl-C in two steps once there is text: the first sets ``cancel``, the second kills.

    Before :meth:`arm` it stays a KeyboardInterrupt. The second step is the system's own default,
    because a Python handler would wait for the inference call to return.
    """

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self._before = signal.getsignal(signal.SIGINT)
        self._armed = False

    def arm(self) -> None:
        if not self._armed and self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._first)
            self._armed = True

    def disarm(self) -> None:
        if self._armed:
            signal.signal(signal.SIGINT, self._before)
            self._armed = False

    def _first(self, _: int, __: FrameType | None) -> None:
        self.cancel.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    llm: NPUGenerator, prompt: Prompt, options: Mapping[str, Any], write: Callable[[str], None]
) -> Answer:
    """Generate, handing each piece of text to ``write`` as it comes."""
    interruption = Interruption()
    chunks = []
    try:
        for chunk in llm.stream(prompt, cancel=interruption.cancel, **options):
            interruption.arm()
            chunks.append(chunk)
            write(chunk.text)
    finally:
        interruption.disarm()
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[chunk.token_id for chunk in chunks],
        finish_reason=chunks[-1].finish_reason if chunks else None,
        metrics=chunks[-1].metrics if chunks else None,
        interrupted=interruption.cancel.is_set(),
    )


def write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
