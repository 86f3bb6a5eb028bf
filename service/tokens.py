"""The served model's tokenizer and chat template as a service, without generating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from radixd.v1 import text_pb2 as pb
from radixd.v1 import text_pb2_grpc

from service.errors import InvalidRequestError
from service.validation import check_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from service.model import ServedModel
    from service.prompts import Prompts

P = ParamSpec("P")
T = TypeVar("T")

MAX_CHARACTERS = 8 << 20
"""Of a text to tokenize: each token costs hundreds of bytes on the way, and no context is this long."""


class TextServicer(text_pb2_grpc.TextServiceServicer):
    """Serves TextService. Everything runs on the prompts' threads: inputs may be long."""

    def __init__(self, model: ServedModel, prompts: Prompts) -> None:
        self._model = model
        self._prompts = prompts

    async def Tokenize(  # noqa: N802
        self,
        request: pb.TokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.TokenizeResponse:
        """See the proto."""
        return await self._answer(request.model, self._tokenize, request)

    async def Detokenize(  # noqa: N802
        self,
        request: pb.DetokenizeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.DetokenizeResponse:
        """See the proto."""
        return await self._answer(request.model, self._detokenize, request)

    async def RenderChat(  # noqa: N802
        self,
        request: pb.RenderChatRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.RenderChatResponse:
        """See the proto."""
        return await self._answer(request.model, self._render, request)

    async def _answer(self, model: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._model.require(model)
        return await self._prompts.run(work, *args, **kwargs)

    def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        if len(request.text) > MAX_CHARACTERS:
            raise InvalidRequestError.of("text", f"must have at most {MAX_CHARACTERS} characters")
        ids = self._prompts.text_ids(
            "text",
            request.text,
            add_special=not request.omit_special_tokens,
            parse_special=request.parse_special_tokens,
        )
        return pb.TokenizeResponse(token_ids=ids.tolist())

    def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        ids = check_ids("token_ids", request.token_ids, self._model.spec.vocab_size)
        text = self._model.tokenizer.decode(ids.tolist(), keep_special=request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)

    def _render(self, request: pb.RenderChatRequest) -> pb.RenderChatResponse:
        rendered = self._prompts.render(request.chat)
        return pb.RenderChatResponse(text=rendered, token_ids=self._prompts.chat_ids(rendered).tolist())
