"""The CPU as a device: what it can do, and the thread that runs a model on it.

A CPU has no stream to launch work on, so a thread plays that part: ``submit`` queues a function and returns, the thread
runs what was queued in order, and a future tells when it is done. Torch releases the GIL inside its ops, so the event
loop goes on building the next step while this thread computes.
"""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.base import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class ForwardThread:
    """Runs functions one after another on one thread of its own.

    Args:
        name: The thread's name.
        prepare: Run first, on the thread; for settings that belong to a thread, such as torch's number of threads.
    """

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        # A daemon, so that a launch that never returns cannot keep a process alive that wants to exit.
        self._thread = threading.Thread(target=self._run, args=(prepare,), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Queues ``function`` behind all that was queued before. Never waits.

        Returns:
            Resolves on the thread to what ``function`` returns or raises; to a sticky EngineError if the thread was
            closed before it got to it. It cannot be cancelled: later launches may depend on it.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._closed:
                self._queue.put((future, function))
                return future
        future.set_exception(_closed_error())
        return future

    def close(self, timeout: float | None = 30.0) -> None:
        """Lets the running function end, drops those behind it and ends the thread. May be called again.

        Args:
            timeout: Seconds to wait for the running function; one that hangs is left behind.
        """
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._drop_queued()
            self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _drop_queued(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[0].set_exception(_closed_error())

    def _run(self, prepare: Callable[[], None] | None) -> None:
        if prepare is not None:
            prepare()
        while (item := self._queue.get()) is not None:
            future, function = item
            try:
                result = function()
            except BaseException as error:  # whatever it is, the caller hears of it
                future.set_exception(error)
            else:
                future.set_result(result)
            # What a function closed over must not stay alive until the next one comes.
            del item, future, function


def _closed_error() -> EngineError:
    return EngineError("the engine was closed before it ran this step", sticky=True)


def supports_bfloat16() -> bool:
    """Whether bfloat16 matrix products run in hardware here: AVX-512 BF16 or AMX."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def usable_threads() -> int:
    """Logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that can still be used: what the kernel says is available, or less where a cgroup limits it.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    found = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]
    limit, used = (_lines(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit() and used[0].isdigit():
        found.append(max(0, int(limit[0]) - int(used[0])))
    return min(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
