"""What an export tells about itself while it runs, and how it keeps its libraries quiet."""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

log = logging.getLogger("npu_llm_export")


@dataclass(frozen=True)
class StageEvent:
    """A stage begins (``seconds`` is None), gets on (``fraction``, 0 to 1), or is done (``seconds``)."""

    stage: str
    seconds: float | None = None
    fraction: float | None = None
    detail: str = ""


ProgressCallback = Callable[[StageEvent], None]


class Progress:
    """Reports stages to a callback."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback or (lambda event: None)
        self._stage = ""

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Details]:
        """Report a stage with the time it takes; whatever its libraries print is swallowed."""
        begin = time.perf_counter()
        self._callback(StageEvent(name))
        details = Details(name, self._callback)
        with quiet_libraries():
            yield details
        seconds = time.perf_counter() - begin
        self._callback(StageEvent(name, seconds=seconds, fraction=1.0, detail=details.text))


class Details:
    """What a stage found out, for the line that reports it."""

    def __init__(self, name: str, callback: ProgressCallback) -> None:
        self.text = ""
        self._name = name
        self._callback = callback

    def advance(self, done: int, total: int) -> None:
        self._callback(StageEvent(self._name, fraction=done / total))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep torch's tracer, transformers' loader and NNCF from writing to the user's terminal."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    swallowed = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(swallowed),
            contextlib.redirect_stderr(swallowed),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


_NOISY = ("nncf", "transformers", "huggingface_hub", "torch", "gguf")
