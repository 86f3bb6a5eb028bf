"""``radixd generate`` and ``radixd chat`` at a terminal, as subprocesses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.process import RADIXD, assert_one_line, radixd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Server

SCRIPT = {
    "vocabulary": [*({"hex": f"{byte:02x}"} for byte in range(256)), {"special": "<eos>"}],
    "eos": [256],
    "step_ms": 2,
    "chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:",
}


@pytest.fixture(scope="module")
def server(start_shared: Callable[..., Server]) -> Server:
    return start_shared("--page-size", "4", script=SCRIPT)


def test_generate_streams_the_text_and_then_says_what_it_cost(server: Server) -> None:
    arguments = ("generate", "--target", server.target, "--max-tokens", "12", "--temperature", "0", "Hello there")
    first, second = radixd(*arguments), radixd(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert len(first.stdout.rstrip("\n")) == 12
    assert len("user:Hello there\nassistant:") == 27
    assert re.fullmatch(
        r"12 tokens, 0 of 27 prompt tokens cached, TTFT \d+ ms, [\d.]+ tok/s, ended by length", first.stderr.strip()
    )
    assert "24 of 27 prompt tokens cached" in second.stderr


def test_raw_sends_the_text_as_it_is_and_a_dash_reads_it_from_stdin(server: Server) -> None:
    result = radixd("generate", "--target", server.target, "--max-tokens", "1", "--raw", "-", input="Hello there")
    assert result.returncode == 0, result.stderr
    assert "of 11 prompt tokens" in result.stderr


def test_a_bad_value_is_one_line(server: Server) -> None:
    result = radixd("generate", "--target", server.target, "--temperature", "-1", "Hello")
    assert result.returncode == 1
    assert_one_line(result.stderr, "INVALID_ARGUMENT", "sampling.temperature")


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",)])
def test_without_a_server_the_way_to_start_one_is_told(command: tuple[str, ...]) -> None:
    result = radixd(*command, "--target", "127.0.0.1:1", stdin=subprocess.DEVNULL)
    assert result.returncode == 1
    assert_one_line(result.stderr, "no server at 127.0.0.1:1", "radixd serve", "make serve")


def test_chat_keeps_the_history_and_shows_what_was_reused(server: Server) -> None:
    result = radixd(
        *("chat", "--target", server.target, "--max-tokens", "16", "--seed", "1"), input="First question\nSecond one\n"
    )
    assert result.returncode == 0, result.stderr
    turns = re.findall(r"\[(\d+) of (\d+) prompt tokens cached; TTFT", result.stderr)
    (_, first), (cached, second) = (tuple(map(int, turn)) for turn in turns)
    assert second == first + 16 + len("\nuser:Second one\nassistant:")
    assert cached >= first // 4 * 4


def test_interrupting_generate_cancels_the_stream_and_exits_130(server: Server) -> None:
    with subprocess.Popen(
        [RADIXD, "generate", "--target", server.target, "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        error = process.stderr.read().decode()
        assert process.wait(10) == 130
    assert "interrupted" in error
    assert "Traceback" not in error
    while server.stats().running:
        pass


def test_a_reader_that_leaves_ends_generate_without_a_traceback(server: Server) -> None:
    with subprocess.Popen(
        [RADIXD, "generate", "--target", server.target, "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 1


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
    assert "interrupted" in error
    assert "Traceback" not in error


def test_terminal_commands_import_no_torch() -> None:
    program = "import sys, service.cli, service.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
