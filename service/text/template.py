"""A model's chat template: a conversation to the text the model was trained on.

Templates are Jinja programs that come with model files, written for Hugging Face's renderer, so the same names and
settings are offered here. They are not trusted: the sandbox keeps them from Python's objects and from changing what
they are given, and the length of the text is bounded. Run time and what they compute on the way are not: a template is
part of the model, and only messages come from clients.

The text is meant for ``Tokenizer.encode(text, parse_special=True)``, which adds no second BOS to it.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.text.errors import NoChatTemplateError, TemplateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser
    from jinja2.runtime import Context

    from service.text.tokenizer import Tokenizer

MAX_RENDERED_CHARACTERS = 1 << 24


class ChatTemplate:
    """A compiled template. Immutable; ``render`` may run in any thread.

    Args:
        source: Jinja source.
        bos_token: What the template calls bos_token.
        eos_token: What the template calls eos_token.
        clock: The local time, for templates that print the date.
        max_characters: The longest text that is rendered.

    Raises:
        TemplateError: The source is not a Jinja template.
    """

    __slots__ = ("_clock", "_max_characters", "_template", "_variables")

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], datetime] = datetime.now,
        max_characters: int = MAX_RENDERED_CHARACTERS,
    ) -> None:
        self._clock = clock
        self._max_characters = max_characters
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = self._format_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is broken: {error}") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, clock: Callable[[], datetime] = datetime.now) -> ChatTemplate:
        """The template of a tokenizer's model.

        Raises:
            NoChatTemplateError: The model has none.
            TemplateError: It is not a Jinja template.
        """
        if tokenizer.chat_template is None:
            raise NoChatTemplateError

        def spelled(token_id: int | None) -> str:
            return "" if token_id is None else tokenizer.token_bytes(token_id).decode(errors="replace")

        bos_token, eos_token = spelled(tokenizer.bos_token_id), spelled(tokenizer.eos_token_id)
        return cls(tokenizer.chat_template, bos_token=bos_token, eos_token=eos_token, clock=clock)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Renders a conversation.

        Args:
            messages: Turns in order, each with "role" and "content".
            add_generation_prompt: Ends where the assistant's reply begins.

        Raises:
            TemplateError: The template refused the conversation, failed, or made too long a text.
        """
        variables = {
            **self._variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        room = self._max_characters
        try:
            for part in self._template.generate(variables):
                room -= len(part)
                if room < 0:
                    raise TemplateError(f"the rendered chat exceeds {self._max_characters} characters")
                parts.append(part)
        except TemplateError:
            raise
        except _RefusedError as error:
            raise TemplateError(f"the chat template refused the conversation: {error.message}") from error
        except Exception as error:  # a template is a program: it may raise whatever Python's operators raise
            raise TemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)

    def _format_now(self, layout: str) -> str:
        return self._clock().strftime(layout)


class _RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses the two operators that make huge values out of small ones."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and len(sequence) * times > MAX_RENDERED_CHARACTERS:
                raise SecurityError("a repeated sequence is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant says, for training; when serving it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
