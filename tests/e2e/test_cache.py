"""The cache as its operators see it: prefixes, counts, flushes, and ``radixd top``. Scripted tokens."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.e2e.process import radixd
from tests.e2e.screen import at_terminal
from tests.e2e.wire import Collected

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Server

SCRIPT = {"requests": {"*": {"tokens": list(b"ok")}}}
SHARED = "Be brief.\x1b[2J\nQ:"
SALT = "tenant\x1b[1m"


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start("--page-size", "4", "--pool-tokens", "256", "--context", "128", "--eviction", "slru", script=SCRIPT)


def say(server: Server, text: str, salt: str = "") -> Any:
    call = server.client.Generate(server.request(text=text, cache={"salt": salt}), timeout=30)
    return Collected(call).started


def listed(server: Server, **fields: Any) -> list[Any]:
    return list(server.client.ListPrefixes(server.contract.ListPrefixesRequest(**fields), timeout=10).prefixes)


def share_a_prefix(server: Server) -> None:
    assert len(SHARED) == 16
    for question in ("what is blue", "what is blue now?", "why"):
        say(server, SHARED + question)
    for text in ("A salted one", "A salted one, again"):
        say(server, text, SALT)


def test_two_requests_that_share_a_prefix_are_listed_under_it(server: Server) -> None:
    share_a_prefix(server)
    prefixes = listed(server)
    assert [prefix.hits for prefix in prefixes] == sorted((prefix.hits for prefix in prefixes), reverse=True)
    (shared,) = (index for index, prefix in enumerate(prefixes) if prefix.text == "Be brief.\\x1b[2J\\nQ:")
    assert (prefixes[shared].tokens, prefixes[shared].pages, prefixes[shared].hits) == (16, 4, 2)
    assert prefixes[shared].parent == -1
    (extended,) = (prefix for prefix in prefixes if prefix.parent == shared and prefix.hits)
    assert (extended.text, extended.tokens) == ("what is blue", 28)
    (salted,) = (prefix for prefix in prefixes if prefix.salt and prefix.parent == -1)
    assert (salted.salt, salted.text, salted.hits) == (SALT, "A salted one", 1)


def test_a_list_is_as_long_as_asked_and_its_texts_too(server: Server) -> None:
    assert listed(server) == []
    share_a_prefix(server)
    (first,) = listed(server, limit=1, text_bytes=5)
    assert first.text == "Be br\u2026"
    with pytest.raises(grpc.RpcError) as caught:
        listed(server, limit=1001, text_bytes=2**32 - 1)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "limit: must be at most 1000; text_bytes: must be at most 16384" in caught.value.details()


def test_flushing_one_salt_leaves_the_others(server: Server) -> None:
    share_a_prefix(server)
    before = server.stats()
    freed = server.client.Flush(server.contract.FlushRequest(salt=SALT), timeout=10).freed_pages
    after = server.stats()
    assert freed > 0
    assert (after.pages_free, after.namespaces) == (before.pages_free + freed, before.namespaces - 1)
    assert say(server, SHARED + "why").cached_tokens == 16
    assert say(server, "A salted one", SALT).cached_tokens == 0


def test_flushing_the_empty_salt_leaves_the_salted_and_flushing_without_one_leaves_nothing(server: Server) -> None:
    share_a_prefix(server)
    server.client.Flush(server.contract.FlushRequest(salt=""), timeout=10)
    assert {prefix.salt for prefix in listed(server)} == {SALT}
    server.client.Flush(server.contract.FlushRequest(), timeout=10)
    assert listed(server) == []
    assert server.stats().pages_free == server.stats().pages_total


def test_a_salt_that_no_request_can_have_is_refused(server: Server) -> None:
    with pytest.raises(grpc.RpcError, match="salt: must have at most 256 bytes"):
        server.client.Flush(server.contract.FlushRequest(salt="s" * 257), timeout=10)


def test_the_counts_tell_what_the_cache_did(server: Server) -> None:
    share_a_prefix(server)
    stats = server.stats()
    assert (stats.lookups, stats.namespaces, stats.eviction) == (5, 2, "slru")
    assert stats.inserted_tokens == 4 * stats.pages_evictable
    assert stats.metadata_bytes > 0
    assert list(stats.evicted_pages_by_class) == [0, 0]
    for number in range(12):
        say(server, f"{number:02} fills the pool, for it holds only 64 pages")
    stats = server.stats()
    assert stats.evicted_pages > 0
    assert sum(stats.evicted_pages_by_class) == stats.evicted_pages


def test_a_cache_that_keeps_nothing_has_no_policy_and_no_prefixes(start: Callable[..., Server]) -> None:
    server = start("--cache", "naive", script=SCRIPT)
    share_a_prefix(server)
    assert server.stats().eviction == ""
    assert listed(server) == []


def test_top_prints_one_plain_frame_where_the_output_is_no_terminal(server: Server) -> None:
    share_a_prefix(server)
    once = radixd("top", "--target", server.target, "--once")
    assert (once.returncode, once.stderr) == (0, "")
    coloured = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    assert once.stdout == radixd("top", "--target", server.target, env=coloured).stdout
    lines = once.stdout.splitlines()
    assert all(line.isprintable() for line in lines)
    assert re.fullmatch(r"scripted   2 namespaces, \d+ nodes, evicts by slru", lines[0])
    assert re.fullmatch(r"64 pages of 4 tokens:  protected 0  evictable \d+  private 0  free \d+", lines[2])
    (shared,) = (line for line in lines if line.endswith(r"2      4  Be brief.\x1b[2J\nQ:"))
    (extended,) = (line for line in lines if line.endswith("what is blue"))
    assert extended.index("what") == shared.index("Be") + 4
    assert any(line.endswith(r"[tenant\x1b[1m] A salted one") for line in lines)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("columns", [80, 3])
def test_top_at_a_terminal_redraws_until_it_is_interrupted(server: Server, columns: int) -> None:
    share_a_prefix(server)
    arguments = ("top", "--target", server.target, "--interval", "0.1")
    with at_terminal(*arguments, lines=20, columns=columns) as (process, screen):
        enter, leave, home = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[H"
        screen.until(enter)
        frames = [screen.until(home) for _ in range(4)]
        assert not any(b"\x1b[2J" in frame or b"\x1b[1mtenant" in frame for frame in frames)
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in screen.until(leave)
        assert process.wait(10) == 0


def test_top_ends_with_one_line_on_the_users_own_screen_when_the_server_goes_away(server: Server) -> None:
    with at_terminal("top", "--target", server.target, "--interval", "0.1", columns=120) as (process, screen):
        screen.until(b"nothing is cached")
        server.stop()
        screen.until(b"\x1b[?1049l")
        screen.until(b"radixd: no server at")
        assert process.wait(10) == 1
