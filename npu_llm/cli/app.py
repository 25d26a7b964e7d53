"""The command group, and how each way a command can end becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from npu_llm.cli import terminal
from npu_llm.errors import NPULLMError

_COMMANDS = ("export", "generate", "info")

# What the machine refuses, as opposed to a bug of ours, which keeps its traceback.
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG}

_EXAMPLES = """\b
Examples:
  npu-llm export HuggingFaceTB/SmolLM2-135M-Instruct smollm2-npu
  npu-llm info smollm2-npu
  npu-llm generate smollm2-npu "What is the capital of France?" --chat
"""


class Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"npu_llm.cli.{name}"), name)
        return command


def _show_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from npu_llm import __version__

        click.echo(f"npu-llm {__version__}")
        ctx.exit()


@click.group(
    cls=Commands,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def commands() -> None:
    """LLM text generation on Intel NPUs with fixed shapes.

    Export a Hugging Face model once, then generate text from the folder it wrote, on NPU, CPU or
    GPU.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; see :func:`npu_llm.cli.main`."""
    terminal.prepare_stdout()
    with _sigterm_unwinds(), terminal.warnings_to(sys.stderr.write):
        try:
            return _invoke(argv or ["--help"])
        except (KeyboardInterrupt, click.Abort):
            return 130
        except BrokenPipeError:
            return terminal.abandon_stdout()
        except click.ClickException as error:
            terminal.say("error", _usage(error))
            return error.exit_code
        except NPULLMError as error:
            terminal.say("error", str(error))
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            terminal.say("error", str(error))
        return 1


def _invoke(argv: Sequence[str]) -> int:
    # Not click's own main(): it would turn an EOFError into a silent "Aborted", and a closed pipe
    # into exit code 1.
    code = 0
    try:
        with commands.make_context("npu-llm", list(argv)) as context:
            commands.invoke(context)
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    sys.stdout.flush()
    return code


def _usage(error: click.ClickException) -> str:
    """One line instead of click's four."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{message}: see `{context.command_path} --help`" if context else message


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM raise, so that ``finally`` blocks run: a killed export leaves nothing behind."""

    def exit_143(_: int, __: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, exit_143)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
