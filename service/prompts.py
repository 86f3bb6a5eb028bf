"""Turns prompts into token ids, away from the event loop.

Rendering a template and tokenizing take time that grows with the prompt. On the event loop that time would be a gap in
every stream and in every health check; so it is spent on a few threads of its own, and waits its turn there.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from service.errors import InvalidRequestError
from service.text import NoChatTemplateError, TemplateError, UnencodableTextError
from service.validation import check_chat, check_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixd.v1 import generate_pb2 as pb

    from kvcache.base import Int32Array
    from service.model import ServedModel

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 2


class Prompts:
    """The served model's tokenizer and chat template, on threads of their own.

    Args:
        model: Whose.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prompts")

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Starts ``work`` on a thread; cancelling the future drops it if it has not begun."""
        return asyncio.wrap_future(self._threads.submit(work, *args, **kwargs))

    def close(self) -> None:
        """Ends the threads, without waiting for work that no call waits for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ids_of(self, request: pb.GenerateRequest) -> Int32Array:
        """The prompt's ids, int32[n].

        Raises:
            InvalidRequestError: An id is outside the vocabulary, a role is empty, or the template refused.
            NoChatTemplateError: There is no template for a conversation.
        """
        match request.WhichOneof("prompt"):
            case "token_ids":
                return check_ids("token_ids.ids", request.token_ids.ids, self._model.spec.vocab_size)
            case "chat":
                rendered = self.render(request.chat)
                self._refuse_hopeless("chat.messages", rendered)
                return self.chat_ids(rendered)
            case _:
                self._refuse_hopeless("text", request.text)
                return self.text_ids("text", request.text)

    def text_ids(self, field: str, text: str, *, add_special: bool = True, parse_special: bool = False) -> Int32Array:
        """The ids of a text, int32[n]; may be empty.

        Raises:
            InvalidRequestError: The vocabulary cannot express the text; ``field`` is where it came from.
        """
        try:
            ids = self._model.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        except UnencodableTextError as error:
            raise InvalidRequestError.of(field, str(error)) from error
        return np.asarray(ids, dtype=np.int32)

    def chat_ids(self, rendered: str) -> Int32Array:
        """The ids of a rendered conversation, int32[n]; control tokens that the template spelled are read as such."""
        return self.text_ids("chat.messages", rendered, parse_special=True)

    def render(self, chat: pb.Chat) -> str:
        """The text that a conversation becomes.

        Raises:
            InvalidRequestError: No messages, an empty role, or the template refused.
            NoChatTemplateError: The model has none.
        """
        if self._model.template is None:
            raise NoChatTemplateError
        check_chat(chat)
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        try:
            return self._model.template.render(messages, add_generation_prompt=add_prompt)
        except TemplateError as error:
            raise InvalidRequestError.of("chat.messages", str(error)) from error

    def _refuse_hopeless(self, field: str, text: str) -> None:
        """Spares a text that cannot fit the context the seconds and the memory of its tokenizing."""
        least, context = self._model.tokenizer.fewest_tokens(text), self._model.spec.context_length
        if least >= context:
            raise InvalidRequestError.of(
                field, f"the prompt has at least {least} tokens, at most {context - 1} fit the context of {context}"
            )
