"""What the commands do to stdout and stderr: encodings, one-line notices, a reader that left."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator

_LOGGERS = ("npu_llm", "npu_llm_export")


def say(kind: str, message: str) -> None:
    """Write one line to stderr, whatever line breaks the message has."""
    sys.stderr.write(notice(kind, message) + "\n")
    sys.stderr.flush()


def notice(kind: str, message: str) -> str:
    prefix = f"npu-llm: {kind}: " if kind else "npu-llm: "
    return prefix + " ".join(message.split())


def prepare_stdout() -> None:
    """Make stdout take any text, in any locale.

    Into a pipe or a file goes UTF-8. A terminal knows its own encoding: there, what it cannot show
    becomes a question mark.
    """
    if sys.stdout is None:  # closed by the caller, as with `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = sys.stdout.encoding if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="replace")


def abandon_stdout() -> int:
    """Nobody reads stdout any more: drop the rest; the exit code is that of a SIGPIPE."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # stdout has no file descriptor
        pass
    return 141


@contextlib.contextmanager
def warnings_to(write: Callable[[str], object]) -> Iterator[None]:
    """Hand the log warnings of this package and the exporter to ``write``, a line each.

    The innermost block gets them. ``write`` must hold its stream: while the exporter runs, it
    replaces ``sys.stderr`` to keep its libraries quiet.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    handler = _Notices(write)
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate


class _Notices(logging.Handler):
    def __init__(self, write: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(notice(record.levelname.lower(), record.getMessage()) + "\n")
