"""Turn chat messages into a prompt with the model's own Jinja template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from npu_llm.errors import ChatTemplateError, PromptError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_MESSAGE_LIMIT = 300  # characters quoted of what a template said


class ChatTemplate:
    """A compiled chat template, with what transformers' ``apply_chat_template`` gives templates.

    Templates come with the model, so they are not trusted: they run in Jinja's sandbox.

    Args:
        source: the Jinja text, such as the content of ``chat_template.jinja``.
        special_tokens: variables of the template: ``bos_token``, ``eos_token`` and so on.

    Raises:
        ChatTemplateError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        # Not only Jinja's own errors: deep nesting ends in RecursionError or SyntaxError.
        except Exception as error:
            raise ChatTemplateError(f"the chat template is damaged: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: each with a ``role`` and a ``content``, a string or a list of parts; a
                message with ``tool_calls`` needs no content.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: more variables for the template, such as ``tools``; they win over the
                special tokens.

        Raises:
            PromptError: the messages are not a conversation.
            ChatTemplateError: the template refuses them, or fails.
        """
        _check_messages(messages)
        # Templates ask `if tools`, but also `tools is defined`: transformers always passes both.
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context.update(messages=messages, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(context)
        except ChatTemplateError:
            raise
        # A template is a program of its own and may fail in any way a program can.
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed: {_one_line(error)}") from error


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    # Jinja is imported here, when a template is used, to keep `import npu_llm` quick.
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """``{% generation %}`` marks assistant text for training; here it only has to pass."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # In transformers what is set inside the tag does not leave it.
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which the model would then read.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: object) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {_shorten(str(message))}")


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("a conversation must be a non-empty list of messages")
    for index, message in enumerate(messages):
        problem = _problem_of(message)
        if problem:
            raise PromptError(f"message {index} of the conversation {problem}")


def _problem_of(message: object) -> str | None:
    if not isinstance(message, Mapping):
        return f'must be a dict with "role" and "content", not {type(message).__name__}'
    if not isinstance(message.get("role"), str):
        return 'has no "role": it must be a string such as "user"'
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return None  # as other chat APIs write an answer that only calls tools
    if not isinstance(content, str | list):
        return 'has no "content": it must be a string or a list of parts'
    return None


def _one_line(error: Exception) -> str:
    import jinja2

    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    said = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    return _shorten(f"{kind}{said or type(error).__name__}") + line


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_LIMIT else line[: _MESSAGE_LIMIT - 1] + "…"
