"""The prefix cache as its operators see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixd.v1 import cache_pb2 as pb
from radixd.v1 import cache_pb2_grpc

if TYPE_CHECKING:
    import grpc
    import structlog.typing

    from scheduler.scheduler import Scheduler


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Serves CacheService."""

    def __init__(self, scheduler: Scheduler, log: structlog.typing.FilteringBoundLogger) -> None:
        self._scheduler = scheduler
        self._log = log

    async def GetStats(  # noqa: N802
        self,
        request: pb.GetStatsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.GetStatsResponse:
        """See the proto."""
        stats = self._scheduler.stats()
        return pb.GetStatsResponse(
            **{name: getattr(stats, name) for name in pb.GetStatsResponse.DESCRIPTOR.fields_by_name}
        )

    async def Flush(  # noqa: N802
        self,
        request: pb.FlushRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.FlushResponse:
        """See the proto."""
        freed = self._scheduler.flush()
        self._log.info("flushed", freed_pages=freed)
        return pb.FlushResponse(freed_pages=freed)
