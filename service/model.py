"""The served model as its clients see it: names, limits, tokenizer and chat template."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixd.v1 import model_pb2 as pb
from radixd.v1 import model_pb2_grpc

from service.errors import UnknownModelError
from service.validation import Limits

if TYPE_CHECKING:
    import grpc

    from engine.base import ModelSpec
    from service.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What servicers need to know of the model.

    Attributes:
        spec: The engine's description.
        aliases: Names beside ``spec.name`` that requests may give.
        tokenizer: Text to ids and back.
        template: Renders conversations, if the model has a chat template.
        page_size: Tokens in a page of the cache.
        pool_tokens: Tokens in the whole page pool.
        generation: Identifies the loaded weights, whatever their name.
        eviction: What the cache evicts first, by the policy's name; empty where it keeps nothing.
    """

    spec: ModelSpec
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    page_size: int
    pool_tokens: int
    generation: str = ""
    eviction: str = ""

    @property
    def limits(self) -> Limits:
        """What requests are checked against."""
        spec = self.spec
        return Limits(
            spec.vocab_size,
            spec.context_length,
            self.tokenizer.eos_token_ids,
            default_temperature=spec.default_temperature,
            generation=self.generation,
        )

    def require(self, name: str) -> None:
        """Accepts the model's name, an alias, or nothing.

        Raises:
            UnknownModelError: It is another model's name.
        """
        if name and name != self.spec.name and name not in self.aliases:
            raise UnknownModelError(name, (self.spec.name, *self.aliases))


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Serves ModelService."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._version = importlib.metadata.version("radixd")

    async def GetModel(  # noqa: N802
        self,
        request: pb.GetModelRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetModelResponse:
        """See the proto."""
        self._model.require(request.model)
        model, spec, tokenizer = self._model, self._model.spec, self._model.tokenizer
        return pb.GetModelResponse(
            name=spec.name,
            aliases=model.aliases,
            architecture=spec.architecture,
            vocabulary_size=spec.vocab_size,
            context_length=spec.context_length,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            bos_token_id=tokenizer.bos_token_id,
            chat_template=tokenizer.chat_template or "",
            device=spec.device,
            dtype=spec.dtype,
            page_size=model.page_size,
            pool_tokens=model.pool_tokens,
            server_version=self._version,
            default_temperature=spec.default_temperature,
        )
