"""Where the prompt of ``generate`` comes from: the command line or stdin."""

from __future__ import annotations

import sys

import click

from npu_llm.errors import PromptError

_BOM = "\ufeff"


def read_prompt(argument: str | None) -> str:
    """Return the prompt; stdin is read for ``-``, or when there is no argument and it is piped.

    Raises:
        click.UsageError: no argument, and stdin is a terminal.
        PromptError: the prompt is empty or not UTF-8.
    """
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("no prompt: give one as an argument, or pipe it in")
    prompt = _read_stdin() if argument in (None, "-") else argument
    assert prompt is not None
    if not prompt:
        raise PromptError("the prompt is empty: give one as an argument, or pipe it in")
    return check_text("the prompt", prompt)


def check_text(name: str, text: str) -> str:
    """Refuse what the shell passed in another encoding: Python keeps such bytes as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 at character {error.start}: convert it, or pipe the prompt in "
            "through `iconv -f WINDOWS-1252 -t UTF-8`"
        ) from None
    return text


def _read_stdin() -> str:
    if sys.stdin is None:
        raise PromptError("stdin is closed: give the prompt as an argument")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"the prompt on stdin is not UTF-8 (byte 0x{data[error.start]:02x} at offset "
            f"{error.start}): convert it first, e.g. with `iconv -f WINDOWS-1252 -t UTF-8`"
        ) from None
    # The newline that ends the last line of a file or of `echo` is not part of the prompt.
    return text.removeprefix(_BOM).removesuffix("\n").removesuffix("\r")
