"""``radixd chat``, with input from a pipe and at a terminal, as a subprocess."""

from __future__ import annotations

import re
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.process import RADIXD, radixd
from tests.e2e.screen import Screen, at_terminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.e2e.process import Server

SCRIPT = {
    "name": "talker",
    "vocabulary": [*({"hex": f"{byte:02x}"} for byte in range(256)), {"special": "<eos>"}],
    "eos": [256],
    "step_ms": 2,
    "context": 400,
    "chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:",
}
TURN = re.compile(r"\[(\d+) of (\d+) prompt tokens cached; ")


@pytest.fixture(scope="module")
def server(start_shared: Callable[..., Server]) -> Server:
    return start_shared("--page-size", "4", script=SCRIPT)


def chat(server: Server, typed: str | bytes, *flags: str) -> subprocess.CompletedProcess[bytes]:
    """A conversation whose lines come from a pipe."""
    return subprocess.run(
        [RADIXD, "chat", "--target", server.target, "--max-tokens", "16", "--seed", "1", *flags],
        input=typed.encode() if isinstance(typed, str) else typed, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def turns(done: subprocess.CompletedProcess[bytes]) -> list[tuple[int, int]]:
    """Cached and all prompt tokens of each turn that was answered."""
    assert b"Traceback" not in done.stderr, done.stderr
    return [(int(cached), int(prompt)) for cached, prompt in TURN.findall(done.stderr.decode())]


def test_the_history_is_kept_and_what_was_reused_is_shown(server: Server) -> None:
    done = chat(server, "First question\n\n   \nSecond one\n")
    assert done.returncode == 0
    (_, first), (cached, second) = turns(done)
    assert second == first + 16 + len("\nuser:Second one\nassistant:")
    assert cached >= first // 4 * 4


def test_the_first_line_names_the_model_and_the_commands_and_a_pipe_gets_no_prompt(server: Server) -> None:
    done = chat(server, "Hello\n")
    banner = done.stderr.decode().splitlines()[0]
    assert all(part in banner for part in ("talker", "/reset", "/help", "/exit", "Ctrl-D"))
    assert b"> " not in done.stdout[:2]
    assert len(done.stdout) == 17


def test_a_reset_begins_again_with_the_system_message(server: Server) -> None:
    done = chat(server, "One\nTwo\n/reset\nOne\n", "--system", "Be brief.")
    first, _, again = turns(done)
    assert again[1] == first[1] == len("system:Be brief.\nuser:One\nassistant:")


def test_exit_leaves_help_lists_the_commands_and_an_unknown_one_is_not_sent(server: Server) -> None:
    done = chat(server, "/help\n/bye\n/exit\nnever sent\n")
    assert done.returncode == 0
    assert turns(done) == []
    assert "/reset  forgets the conversation" in done.stderr.decode()
    assert "no command /bye" in done.stderr.decode()


def test_a_line_that_only_begins_like_a_command_is_sent(server: Server) -> None:
    assert len(turns(chat(server, "/etc/hosts is what?\n /bye\n"))) == 2


def test_a_line_that_is_not_utf_8_is_refused_and_the_conversation_goes_on(server: Server) -> None:
    done = chat(server, b"First question\n\xff\xfe\nSecond one\n")
    (_, first), (_, second) = turns(done)
    assert second == first + 16 + len("\nuser:Second one\nassistant:")
    assert "radixd: the line is not UTF-8 text and was not sent" in done.stderr.decode()
    assert done.returncode == 1


def test_a_turn_that_the_server_refuses_is_forgotten(server: Server) -> None:
    done = chat(server, f"First question\n{'x' * 1000}\nSecond one\n")
    (_, first), (_, second) = turns(done)
    assert second == first + 16 + len("\nuser:Second one\nassistant:")
    (line,) = [line for line in done.stderr.decode().splitlines() if line.startswith("radixd: ")]
    assert "INVALID_ARGUMENT" in line
    assert "the conversation is full: /reset starts over" in line
    assert done.returncode == 1


def test_a_first_message_that_does_not_fit_is_to_be_shortened(server: Server) -> None:
    assert "; send a shorter message" in chat(server, "x" * 1000).stderr.decode()


def test_a_reply_that_fills_the_context_says_what_to_do(server: Server) -> None:
    done = chat(server, "Go on\n/reset\nGo on\n", "--max-tokens", "1000")
    assert done.stderr.decode().count("The context of 400 tokens is full: /reset starts over.") == 2
    assert len(turns(done)) == 2


def test_a_server_that_goes_away_costs_the_turn_and_not_the_conversation(start: Callable[..., Server]) -> None:
    server = start(script=SCRIPT)
    with terminal(server) as (process, screen):
        screen.until(b"> ")
        server.stop()
        screen.type(b"Hello\n")
        screen.until(b"radixd: no server at")
        screen.until(b"> ")
        screen.type(b"/exit\n")
        assert process.wait(10) == 0


def terminal(server: Server) -> AbstractContextManager[tuple[subprocess.Popen[bytes], Screen]]:
    """A conversation at a terminal."""
    return at_terminal("chat", "--target", server.target, "--max-tokens", "4")


@pytest.mark.timeout(60)
def test_at_a_terminal_there_is_a_prompt_and_a_line_that_is_not_utf_8_brings_it_back(server: Server) -> None:
    with terminal(server) as (process, screen):
        screen.until(b"> ")
        screen.type(b"\xff\n")
        screen.until(b"not UTF-8")
        screen.until(b"> ")
        screen.type(b"Hello\n")
        assert b"Traceback" not in screen.until(b"ended by length]")
        screen.until(b"> ")
        screen.type(b"\x04")
        assert process.wait(10) == 0


def test_interrupting_a_reply_goes_back_to_the_prompt_and_the_end_of_input_leaves(server: Server) -> None:
    with subprocess.Popen(
        [RADIXD, "chat", "--target", server.target],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Hello\n")
        process.stdin.flush()
        assert process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        error = process.stderr.read().decode()
        assert process.wait(10) == 0
    assert re.search(r"interrupted after \d+ tokens, TTFT", error)
    assert "Traceback" not in error


def test_parameters_are_refused_before_the_conversation_starts(server: Server) -> None:
    result = radixd("chat", "--target", server.target, "--temperature", "200", input="Hello\n")
    assert result.returncode == 2
    assert result.stderr == "radixd: --temperature 200: must be between 0 and 100\n"
