"""``npu-llm generate``: text from an artifact, streamed to stdout."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from npu_llm.cli import answer, prompt_source, stats, terminal
from npu_llm.options import resolve_options

if TYPE_CHECKING:
    from npu_llm.generator import NPUGenerator

_EXAMPLES = """\b
Examples:
  npu-llm generate smollm2-npu "What is the capital of France?" --chat
  npu-llm generate smollm2-npu "Once upon a time" --max-new-tokens 50 --temperature 0.8 --seed 1
  cat question.txt | npu-llm generate smollm2-npu --chat --system "Answer in one sentence."
  npu-llm generate smollm2-npu "Hello" --device NPU --stats --json | jq .finish_reason
"""

# Sampling flags, under the names they have in Python (npu_llm.GenerationOptions).
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max-new-tokens", int, "Most tokens to generate.  [default: 256]"),
    ("temperature", float, "Divides the logits; 0 is greedy."),
    ("top-k", int, "Keep the K likeliest tokens; 0 keeps all."),
    ("top-p", float, "Keep the likeliest tokens up to probability P."),
    ("min-p", float, "Drop tokens less likely than P times the likeliest."),
    ("repetition-penalty", float, "Above 1: against tokens of prompt and answer."),
    ("presence-penalty", float, "Against tokens that are in the answer."),
    ("frequency-penalty", float, "The same, for each time they are."),
    ("seed", int, "Makes sampling repeatable."),
)
_OPTIONS = (*(name.replace("-", "_") for name, _, _ in _SAMPLING), "stop", "ignore_eos")
_LOADING = ("device", "kv", "on_full", "properties")


def _device(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"AUTO|(NPU|CPU|GPU)(\.\d+)*", value.upper()):
        raise click.BadParameter(f"{value!r} is not AUTO, NPU, CPU, GPU or one like GPU.1")
    return value and value.upper()


def _properties(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    for value in values:
        if not re.match("[^=]+=", value):
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE")
    return dict(value.split("=", 1) for value in values)


def _sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    for name, kind, text in reversed(_SAMPLING):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


@click.command(epilog=_EXAMPLES)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Wrap the prompt in the model's chat template.")
@click.option("--system", metavar="TEXT", help="System message for --chat.")
@click.option(
    "--device",
    callback=_device,
    metavar="AUTO|NPU|CPU|GPU",
    help="AUTO, the default: NPU if there is one, else CPU.",
)
@click.option(
    "--kv",
    type=click.Choice(["ring", "shift", "none"]),
    help="How the KV cache moves; all three give the same tokens.  [default: ring]",
)
@click.option(
    "--on-full",
    type=click.Choice(["stop", "slide"]),
    help="When the context is full: stop, or drop the oldest tokens.  [default: stop]",
)
@_sampling_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past end-of-sequence tokens.")
@click.option(
    "--property",
    "properties",
    callback=_properties,
    multiple=True,
    metavar="NAME=VALUE",
    help="OpenVINO property for the device; repeatable.",
)
@click.option("--stats", "show_stats", is_flag=True, help="Show times and counts on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.pass_context
def generate(
    ctx: click.Context,
    /,
    artifact: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    show_stats: bool,
    as_json: bool,
    **_: object,
) -> None:
    """Generate text from an exported model.

    PROMPT is the text; `-`, or no PROMPT and a pipe, reads it from stdin as UTF-8, without its
    final newline. Sampling flags that are not given keep the model's own defaults.

    The text is streamed to stdout, and nothing else is; it always ends with a newline. Ctrl-C ends
    the text where it is (exit code 130), a second one aborts.
    """
    options = _given(ctx, _OPTIONS)
    resolve_options({}, options)  # a bad value is said before the model is loaded
    request = _request(ctx, prompt, chat, system)
    llm, load_s = _load(artifact, _given(ctx, _LOADING))
    result = answer.run(llm, request, options, _ignore if as_json else answer.write_stdout)
    _finish(result, llm, as_json)
    if show_stats and result.metrics:
        _show_stats(result, llm, load_s)
    if result.interrupted:
        ctx.exit(130)


def _given(ctx: click.Context, names: tuple[str, ...]) -> dict[str, Any]:
    """Only what the user typed, so that defaults stay where they belong: with the model."""
    typed = ParameterSource.COMMANDLINE
    return {name: ctx.params[name] for name in names if ctx.get_parameter_source(name) is typed}


def _request(
    ctx: click.Context, prompt: str | None, chat: bool, system: str | None
) -> answer.Prompt:
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat", ctx)
    text = prompt_source.read_prompt(prompt)
    if not chat:
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        content = prompt_source.check_text("the text of --system", system)
        messages.insert(0, {"role": "system", "content": content})
    return messages


def _load(artifact: Path, loading: dict[str, Any]) -> tuple[NPUGenerator, float]:
    from npu_llm.generator import NPUGenerator

    started = time.perf_counter()
    # One prompt: its graphs are not needed again, and their memory is.
    llm = NPUGenerator.from_pretrained(artifact, **loading, keep_prefill=False)
    if llm.device_note:
        terminal.say("", llm.device_note)
    return llm, time.perf_counter() - started


def _finish(result: answer.Answer, llm: NPUGenerator, as_json: bool) -> None:
    if as_json:
        answer.write_stdout(_json(result, llm) + "\n")
    elif not result.text.endswith("\n"):
        answer.write_stdout("\n")


def _json(result: answer.Answer, llm: NPUGenerator) -> str:
    return json.dumps(
        {
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "metrics": stats.metrics_dict(result.metrics) if result.metrics else None,
            "device": llm.device,
        },
        ensure_ascii=False,
    )


def _show_stats(result: answer.Answer, llm: NPUGenerator, load_s: float) -> None:
    assert result.metrics
    lines = stats.stats_lines(
        result.metrics, finish_reason=result.finish_reason, device=llm.device, load_s=load_s
    )
    gap = "\n" if sys.stdout.isatty() else ""  # between the text and the figures
    sys.stderr.write(gap + "\n".join(lines) + "\n")


def _ignore(_: str) -> None:
    pass
