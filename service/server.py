"""The server's life: start, serve, drain, end.

``serve`` binds the port, says SERVING, and waits for one of two ends:

* A signal. Health says NOT_SERVING and new Generate calls get UNAVAILABLE at once, while the port stays open so that
  balancers can see it. Running streams have the grace to finish; what is left then ends with UNAVAILABLE. Once every
  handler has cleaned up and the scheduler is idle, the final counts are logged as ``idle`` and the exit code is 0. A
  second signal ends the process where it stands.
* The engine's death. Health says NOT_SERVING, streams end with UNAVAILABLE, and the exit code is 1: for a supervisor.

Either way ``stopped`` is the last line of the log.

Open Health.Watch streams never end by themselves, so the transport is closed without a grace, and only after the
calls that matter have ended: ``grpc.aio.Server.stop`` with a grace would wait for the watchers, and may return
before cancelled handlers have cleaned up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from radixd.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    text_pb2,
    text_pb2_grpc,
)

from engine.base import EngineError
from service.cache import CacheServicer
from service.errors import SettingError, StartError
from service.generate import GenerateServicer
from service.health import HealthServicer
from service.interceptor import StatusInterceptor
from service.model import ModelServicer
from service.prompts import Prompts
from service.tokens import TextServicer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import structlog.typing

    from service.replica import Replica
    from service.settings import Settings

SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (generate_pb2, "GenerateService"),
        (text_pb2, "TextService"),
        (model_pb2, "ModelService"),
        (cache_pb2, "CacheService"),
    )
)

_CLEANUP_SECONDS = 5.0
"""How long handlers, or a step in flight, may take to end once they were told to."""


def check_port(host: str, port: int) -> None:
    """Finds out at once, before the slow model load, whether the address can be listened on.

    Raises:
        SettingError: There is no such host.
        StartError: The port is taken, or may not be listened on.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError("host", host, f"cannot be resolved: {reason}") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            # As the server does, so that connections of an earlier run that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise StartError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from None


def join_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Server:
    """Serves one replica.

    Args:
        replica: What to serve; the server starts its scheduler and closes its engine.
        settings: Where and how.
        log: Hears of what happens.
    """

    def __init__(self, replica: Replica, settings: Settings, log: structlog.typing.FilteringBoundLogger) -> None:
        self._replica = replica
        self._settings = settings
        self._log = log
        self._prompts = Prompts(replica.model)
        self._generate = GenerateServicer(replica.scheduler, replica.model, self._prompts, settings.max_waiting, log)
        self._health = HealthServicer(("", *SERVICES))
        self._signalled = asyncio.Event()

    async def serve(self, ready: Callable[[int], None]) -> int:
        """Serves until a signal or the engine's death.

        Args:
            ready: Called with the port once calls are served.

        Returns:
            The exit code.

        Raises:
            StartError: The port cannot be listened on.
        """
        server = grpc.aio.server(
            interceptors=[StatusInterceptor(self._log)], options=_options(self._settings.max_message_mb)
        )
        await self._register(server)
        try:
            address = join_address(self._settings.host, self._settings.port)
            port = server.add_insecure_port(address)
        except RuntimeError:
            raise StartError(f"cannot listen on {address}") from None
        self._watch_signals()
        scheduling = asyncio.create_task(self._replica.scheduler.run())
        await server.start()
        ready(port)
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait({scheduling, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        await self._health.enter_graceful_shutdown()
        self._generate.close()
        try:
            code = await self._drain(scheduling)
        finally:
            await self._close(server)
        self._log.info("stopped", code=code)
        return code

    async def _register(self, server: grpc.aio.Server) -> None:
        replica = self._replica
        generate_pb2_grpc.add_GenerateServiceServicer_to_server(self._generate, server)
        text_pb2_grpc.add_TextServiceServicer_to_server(TextServicer(replica.model, self._prompts), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(replica.model), server)
        cache = CacheServicer(replica.scheduler, replica.model, self._prompts, self._log)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._health.begin()
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled.is_set():
            self._log.warning("killed", signal=number.name)
            os._exit(128 + number)
        self._log.info(
            "draining",
            signal=number.name,
            streams=self._generate.calls,
            grace=self._settings.grace,
            hint="a second signal ends at once",
        )
        self.drain()

    def drain(self) -> None:
        """Begins the end that a signal begins."""
        self._signalled.set()

    async def _drain(self, scheduling: asyncio.Task[None]) -> int:
        """Lets running streams finish, ends what is left after the grace, and says how the pages were left."""
        scheduler = self._replica.scheduler
        scheduler.close_admission()
        if not scheduling.done():
            await _within(self._settings.grace, self._generate.wait_closed(), scheduling)
            scheduler.stop()
            await asyncio.wait({scheduling}, timeout=_CLEANUP_SECONDS)
        if not scheduling.done():
            self._log.error("engine_hangs", seconds=_CLEANUP_SECONDS)
            scheduling.cancel()
        await _within(_CLEANUP_SECONDS, self._generate.wait_closed())
        try:
            await scheduling
        except EngineError as error:
            self._log.error("engine_failed", error=str(error))
            return 1
        except asyncio.CancelledError:
            return 1
        except Exception:
            self._log.exception("scheduler_failed")
            return 1
        stats = scheduler.stats()
        report = self._log.info if stats.idle else self._log.error
        report("idle" if stats.idle else "not_idle", **dataclasses.asdict(stats))
        return 0

    async def _close(self, server: grpc.aio.Server) -> None:
        """Ends whatever is still open, watchers of the health among them; nothing here may take long."""
        await server.stop(None)
        await _within(_CLEANUP_SECONDS, self._generate.wait_closed())
        self._prompts.close()
        # Closing waits for the running step; on a daemon thread, one that hangs cannot keep the process.
        closing = threading.Thread(target=self._replica.engine.close, daemon=True)
        closing.start()
        closing.join(1)


async def _within(seconds: float, work: Awaitable[Any], *others: asyncio.Task[None]) -> None:
    """Waits for ``work``, or for one of ``others``, but no longer than ``seconds``."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()


def _options(max_message_mb: int) -> list[tuple[str, int]]:
    """Channel options; the reasons are measurements of what goes wrong without them."""
    return [
        # On, two servers share a port in silence, and each gets half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.max_send_message_length", max_message_mb << 20),
        # A long prefill is silent. Clients that ping through it must not be sent away for pinging too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # And a client that is gone without a word is found out, and its stream ended.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
