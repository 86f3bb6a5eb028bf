"""The health service: the library's, which ends a call for an unknown service without a word, with that word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN_CHARACTERS = 80


class HealthServicer(health.aio.HealthServicer):
    """Serves grpc.health.v1.Health.

    Args:
        services: The names it knows; the empty one is the whole server.
    """

    def __init__(self, services: Sequence[str]) -> None:
        super().__init__()
        self._services = services

    async def begin(self) -> None:
        """Says SERVING for every service."""
        for name in self._services:
            await self.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """See grpc.health.v1; NOT_FOUND for a service that this server does not have."""
        if request.service not in self._services:
            known = ", ".join(name or "the empty name" for name in self._services)
            asked = request.service[:_SHOWN_CHARACTERS]
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {asked!r} here; there are {known}")
        return await super().Check(request, context)
