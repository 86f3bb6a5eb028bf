"""The prefix cache as its operators see it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from radixd.v1 import cache_pb2 as pb
from radixd.v1 import cache_pb2_grpc

from service.errors import InvalidRequestError, Violation
from service.namespace import Namespace
from service.prefixes import describe
from service.validation import check_salt

if TYPE_CHECKING:
    import grpc
    import structlog.typing

    from scheduler.scheduler import Scheduler
    from service.model import ServedModel
    from service.prompts import Prompts

DEFAULT_PREFIXES = 20
MAX_PREFIXES = 1000
DEFAULT_TEXT_BYTES = 80
MAX_TEXT_BYTES = 16384


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Serves CacheService.

    Args:
        scheduler: Whose cache it is.
        model: Whose tokens it holds.
        prompts: Their threads turn tokens into text.
        log: Hears of flushes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: ServedModel,
        prompts: Prompts,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._prompts = prompts
        self._log = log

    async def GetStats(  # noqa: N802
        self,
        request: pb.GetStatsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetStatsResponse:
        """See the proto."""
        stats, cache = self._scheduler.stats(), self._scheduler.cache_stats()
        return pb.GetStatsResponse(
            **dataclasses.asdict(stats),
            lookups=cache.lookups,
            inserted_tokens=cache.inserted_tokens,
            metadata_bytes=cache.metadata_bytes,
            namespaces=cache.namespaces,
            eviction=self._model.eviction,
            evicted_pages_by_class=cache.evicted_pages,
        )

    async def ListPrefixes(  # noqa: N802
        self,
        request: pb.ListPrefixesRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ListPrefixesResponse:
        """See the proto."""
        _check_list(request)
        prefixes = self._scheduler.top_prefixes(request.limit or DEFAULT_PREFIXES)
        text_bytes = request.text_bytes or DEFAULT_TEXT_BYTES
        described = await self._prompts.run(describe, prefixes, self._model.tokenizer, text_bytes)
        return pb.ListPrefixesResponse(prefixes=described)

    async def Flush(  # noqa: N802
        self,
        request: pb.FlushRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.FlushResponse:
        """See the proto."""
        namespace = None
        if request.HasField("salt"):
            check_salt("salt", request.salt)
            namespace = Namespace(self._model.generation, request.salt).encode()
        freed = self._scheduler.flush(namespace)
        self._log.info("flushed", one_salt=namespace is not None, freed_pages=freed)
        return pb.FlushResponse(freed_pages=freed)


def _check_list(request: pb.ListPrefixesRequest) -> None:
    violations = [
        Violation(field, f"must be at most {high}")
        for field, value, high in (
            ("limit", request.limit, MAX_PREFIXES),
            ("text_bytes", request.text_bytes, MAX_TEXT_BYTES),
        )
        if value > high
    ]
    if violations:
        raise InvalidRequestError(violations)
