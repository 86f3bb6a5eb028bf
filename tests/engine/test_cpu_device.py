from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from engine.base import EngineError
from engine.device.cpu import ForwardThread, available_memory, supports_bfloat16, usable_threads

if TYPE_CHECKING:
    from pathlib import Path


def test_launches_run_in_order_on_one_thread_of_their_own() -> None:
    thread = ForwardThread("t")
    ran: list[tuple[int, int]] = []
    futures = [thread.submit(lambda i=i: ran.append((i, threading.get_ident())) or i) for i in range(100)]
    assert [future.result(10) for future in futures] == list(range(100))
    assert [i for i, _ in ran] == list(range(100))
    assert len({ident for _, ident in ran}) == 1
    assert ran[0][1] != threading.get_ident()
    thread.close()


def test_submitting_does_not_wait_for_what_runs() -> None:
    thread, gate = ForwardThread("t"), threading.Event()
    first = thread.submit(lambda: gate.wait(10))
    second = thread.submit(lambda: "second")
    assert not first.done()
    assert not second.done()
    gate.set()
    assert second.result(10) == "second"
    thread.close()


def test_what_a_launch_raises_is_its_futures_and_the_next_still_runs() -> None:
    def fail() -> None:
        raise KeyError("broken")

    thread = ForwardThread("t")
    failed, after = thread.submit(fail), thread.submit(lambda: 1)
    with pytest.raises(KeyError, match="broken"):
        failed.result(10)
    assert after.result(10) == 1
    thread.close()


def test_a_launch_cannot_be_cancelled() -> None:
    thread, gate = ForwardThread("t"), threading.Event()
    thread.submit(lambda: gate.wait(10))
    waiting = thread.submit(lambda: 2)
    assert not waiting.cancel()
    gate.set()
    assert waiting.result(10) == 2
    thread.close()


def test_closing_lets_the_running_launch_end_and_fails_those_behind_it() -> None:
    thread, started, gate = ForwardThread("t"), threading.Event(), threading.Event()

    def run() -> str:
        started.set()
        gate.wait(10)
        return "done"

    running = thread.submit(run)
    queued = [thread.submit(lambda: None) for _ in range(3)]
    assert started.wait(10)
    closer = threading.Thread(target=thread.close)
    closer.start()
    for future in queued:
        with pytest.raises(EngineError) as caught:
            future.result(10)
        assert caught.value.sticky
    assert closer.is_alive()
    gate.set()
    closer.join(10)
    assert running.result(10) == "done"
    late = thread.submit(lambda: None)
    with pytest.raises(EngineError) as caught:
        late.result(0)
    assert caught.value.sticky
    thread.close()


def test_closing_does_not_wait_longer_than_told_for_a_launch_that_hangs() -> None:
    thread, started, gate = ForwardThread("t"), threading.Event(), threading.Event()
    hanging = thread.submit(lambda: started.set() or gate.wait(60))
    assert started.wait(10)
    thread.close(timeout=0.01)
    assert not hanging.done()
    gate.set()
    assert hanging.result(10)


def test_a_launch_may_close_the_thread_it_runs_on() -> None:
    thread = ForwardThread("t")
    assert thread.submit(thread.close).result(10) is None


def test_what_prepares_the_thread_runs_first_and_on_it() -> None:
    ran: list[str] = []
    thread = ForwardThread("forward", lambda: ran.append(threading.current_thread().name))
    assert thread.submit(lambda: list(ran)).result(10) == ["forward"]
    thread.close()


def test_what_the_cpu_offers_agrees_with_torch() -> None:
    capabilities = torch.cpu.get_capabilities()
    assert supports_bfloat16() == any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    assert usable_threads() >= 1


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    _write(tmp_path / "proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    assert available_memory(tmp_path) == 3000 * 1024


@pytest.mark.parametrize(("limit", "used", "left"), [("1000000", "400000", 600000), ("1000", "2000", 0)])
def test_a_cgroup_limits_the_available_memory(tmp_path: Path, limit: str, used: str, left: int) -> None:
    _write(tmp_path / "proc/meminfo", "MemAvailable: 3000 kB\n")
    _write(tmp_path / "sys/fs/cgroup/memory.max", limit + "\n")
    _write(tmp_path / "sys/fs/cgroup/memory.current", used + "\n")
    assert available_memory(tmp_path) == left


def test_a_cgroup_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "proc/meminfo", "MemAvailable: 3000 kB\n")
    _write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    _write(tmp_path / "sys/fs/cgroup/memory.current", "5\n")
    assert available_memory(tmp_path) == 3000 * 1024


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
