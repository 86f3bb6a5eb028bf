"""``radixd generate`` at a terminal, as a subprocess."""

from __future__ import annotations

import os
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
    result = radixd("generate", "--target", server.target, "--raw", "p" * 9000)
    assert result.returncode == 1
    assert_one_line(result.stderr, "INVALID_ARGUMENT", "8191 fit the context")


def test_an_argument_that_is_not_utf_8_is_one_line(server: Server) -> None:
    done = subprocess.run(
        [RADIXD, "generate", "--target", server.target, b"\xff"], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert_one_line(done.stderr.decode(), "PROMPT", "is not UTF-8 text")


def test_a_terminal_that_cannot_show_a_character_shows_a_question_mark(start: Callable[..., Server]) -> None:
    server = start(script={"requests": {"*": {"tokens": [0xE4, 0xB8, 0xAD]}}})
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = radixd("generate", "--target", server.target, "--raw", "中", env=environment)
    assert (result.returncode, result.stdout) == (0, "?\n"), result.stderr


def test_a_full_disk_is_one_line(server: Server) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [RADIXD, "generate", "--target", server.target, "--max-tokens", "2", "Hello"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert_one_line(done.stderr, "No space left")


def test_a_model_without_a_template_continues_the_prompt_and_says_so(start: Callable[..., Server]) -> None:
    server = start(script={})
    arguments = ("generate", "--target", server.target, "--max-tokens", "2", "Hello")
    said = radixd(*arguments).stderr.splitlines()
    assert "no chat template" in said[0]
    assert "0 of 5 prompt tokens cached" in said[1]
    assert len(radixd(*arguments, "--raw").stderr.splitlines()) == 1
    assert_one_line(radixd("chat", "--target", server.target, input="Hello\n").stderr, "no chat template", "--raw")


@pytest.mark.parametrize("command", [("generate", "Hello"), ("chat",), ("top",), ("top", "--once")])
def test_without_a_server_the_way_to_start_one_is_told(command: tuple[str, ...]) -> None:
    result = radixd(*command, "--target", "127.0.0.1:1", stdin=subprocess.DEVNULL)
    assert result.returncode == 1
    assert_one_line(result.stderr, "no server at 127.0.0.1:1", "RADIXD_TARGET", "radixd serve", "make serve")


def test_a_host_that_has_no_address_is_one_line() -> None:
    result = radixd("generate", "--target", "no.such.host.invalid:1", "Hello")
    assert result.returncode == 1
    assert_one_line(result.stderr, "no server at no.such.host.invalid:1", "not known")


def test_interrupting_generate_cancels_the_stream_and_exits_130(server: Server) -> None:
    with subprocess.Popen(
        [RADIXD, "generate", "--target", server.target, "Hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        error = process.stderr.read().decode()
        text = process.stdout.read().decode().rstrip("\n")
        assert process.wait(10) == 130
    # A character is a token of this script's.
    assert_one_line(f"radixd: {error}", f"interrupted after {3 + len(text)} tokens, ", "TTFT")
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


def test_terminal_commands_import_no_torch() -> None:
    program = "import sys, service.cli, service.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
