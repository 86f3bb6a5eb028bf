"""Ends every radixd call that raised with a status: servicers raise typed errors and know nothing of codes.

A handler must never end by raising CancelledError: grpc.aio then sends nothing, and a client without a deadline waits
for ever. So a cancelled handler ends with a status here, unless there is nobody left to send it to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from service.status import EXPECTED, end_with

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import structlog.typing

OURS = "/radixd."


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Translates what handlers raise.

    Args:
        log: Hears of errors that nobody raised on purpose.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        self._log = log

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handlers of radixd's own services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OURS):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._guard(method, handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._guard(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
        )

    def _guard(self, method: str, behavior: Callable[..., Any] | None) -> Callable[..., Any]:
        if behavior is None:
            raise TypeError(f"{method} streams requests, which no radixd service does")

        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await behavior(request, context)
            except asyncio.CancelledError:
                await _cancel(context)
            except grpc.aio.InternalError:
                # A write failed: its client is gone.
                raise asyncio.CancelledError from None
            except grpc.aio.AbortError:
                raise
            except EXPECTED as error:
                await end_with(context, error)
            except Exception as error:
                self._log.exception("handler_failed", method=method)
                await end_with(context, error)

        return guarded


async def _cancel(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Ends a call with CANCELLED; does not return."""
    try:
        await context.abort(grpc.StatusCode.CANCELLED, "the call was cancelled")
    except grpc.aio.InternalError:
        # The status could not be sent, so nobody waits for it: here, and only here, grpc.aio's own way is right.
        raise asyncio.CancelledError from None
