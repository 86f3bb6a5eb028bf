from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import socket
import subprocess
import sys
import textwrap
import tomllib
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvcache import POLICIES
from service.cli import MAX_STOPS, cli, run
from service.errors import StartError
from service.options import Number, Text
from service.server import check_port, join_address
from service.settings import Settings
from service.suggestion import suggestion
from service.validation import FLOAT_RANGES, MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS
from tests.service.commands import failure

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--port", "70000"), "--port 70000: must be between 0 and 65535"),
        (("--port", "many"), "--port many: is not an integer"),
        (("--page-size", "0"), "--page-size"),
        (("--cache", "lru"), "--cache"),
        (("--eviction", "fifo"), f"--eviction fifo: must be {' or '.join(POLICIES)}"),
        (("--grace", "-1"), "--grace"),
        (("--device", "cuda"), "--device cuda: not built yet; use auto or cpu"),
        (("--device", "tpu"), "--device tpu: must be auto or cpu"),
        (("--deterministic",), "--deterministic: not built yet"),
        (("--no-overlap", "maybe"), "--no-overlap takes no value: 'maybe' is too much"),
        (("now",), "unexpected argument 'now'; serve takes only flags"),
        (("--engine", "scripted:"), "--engine 'scripted:': names no file; give the script's, as in scripted:FILE"),
        (("--engine", "scripted:s.json", "--model", "smollm2"), "--model smollm2: no model is loaded with --engine"),
        (("--host", ""), "--host '': must not be empty"),
        (("--engine", "magic"), "--engine magic"),
        (("--pool-tokens", "8"), "--pool-tokens 8"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--config", "/no/such/file.toml"), "/no/such/file.toml"),
        (("--model", "/no/such/model.gguf"), "/no/such/model.gguf"),
        (("--model", "."), "."),
        (("--engine", "scripted:/no/such/script.json"), "/no/such/script.json"),
    ],
)
def test_a_value_that_cannot_be_served_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in failure(capsys, "serve", "--port", "0", *arguments)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model" * 100])
def test_a_broken_model_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    assert "broken.gguf" in failure(capsys, "serve", "--port", "0", "--model", str(broken))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("generate", "--max-tokens", "0", "Hello"), "--max-tokens 0: must be between 1 and"),
        (("generate", "--max-tokens", "ten", "Hello"), "--max-tokens ten: is not an integer"),
        (("generate", "--temperature", "200", "Hello"), "--temperature 200: must be between 0 and 100"),
        (("generate", "--temperature", "nan", "Hello"), "--temperature nan: must be between 0 and 100"),
        (("generate", "--stop", "", "Hello"), "--stop '': must not be empty"),
        (("generate", "--stop", "s" * 1025, "Hello"), "must have at most 1024 bytes"),
        (("generate", *(("--stop", "s") * 33), "Hello"), "--stop: may be given 32 times at most, not 33"),
        (("generate",), "PROMPT"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "Hello", "world"), "unexpected argument 'world'; put the prompt in quotes"),
        (("generate", "--raw", "--seed", "-1", "Hello"), "--seed -1: must be between 0 and"),
        (("generate", "--target", "http://localhost:50051", "Hello"), "give host:port, without http://"),
        (("generate", "--target", "", "Hello"), "--target '': give host:port"),
        (("generate", "--target", "localhost", "Hello"), "--target localhost: give host:port"),
        (("generate", "--target", "localhost:99999", "Hello"), "give host:port"),
        (("chat", "--temperature", "200"), "--temperature 200: must be between 0 and 100"),
        (("chat", "--target", "no spaces:1"), "give host:port"),
        (("top", "--interval", "0"), "--interval 0: must be between 0.1 and 3600"),
        (("top", "now"), "unexpected argument 'now'; top takes only flags"),
        (("chat", "now"), "unexpected argument 'now'; chat takes only flags"),
        (("generate", "\udcff"), "PROMPT '\\udcff': is not UTF-8 text"),
        (("generate", "--stop", "\udcff", "Hello"), "--stop '\\udcff': is not UTF-8 text"),
        (("generate", "--target", "\udcff:1", "Hello"), "is not UTF-8 text"),
        (("chat", "--system", "\udcff"), "--system '\\udcff': is not UTF-8 text"),
        (("serve", "--model", "\udcff"), "--model '\\udcff': is not UTF-8 text"),
        (("serve", "--model", "two\nlines"), "two\\nlines: is no file"),
        (("\udcff",), "No such command"),
    ],
)
def test_what_cannot_be_sent_is_refused_in_one_line_that_names_what_the_user_wrote(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in failure(capsys, *arguments)


def test_what_a_flag_allows_is_what_the_server_allows() -> None:
    kinds = {parameter.name: parameter.type for parameter in cli.commands["generate"].params}
    temperature, stop = kinds["temperature"], kinds["stop"]
    assert isinstance(temperature, Number)
    assert isinstance(stop, Text)
    allowed = FLOAT_RANGES["sampling.temperature"]
    assert (temperature.low, temperature.high) == (allowed.low, allowed.high)
    assert (stop.low, stop.high, MAX_STOPS) == (1, MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS)


@pytest.mark.parametrize(("content", "expected"), [(b"\xff", "not UTF-8 text (byte 0)"), (b"", "is empty")])
def test_standard_input_that_is_no_prompt_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes, expected: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert expected in failure(capsys, "generate", "-")
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in failure(capsys, "generate", "-")


def test_even_a_fault_of_the_program_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(_: object) -> None:
        raise KeyError("oops\nand more")

    monkeypatch.setattr("service.client.Client", faulty)
    assert "KeyError" in failure(capsys, "generate", "Hello")
    monkeypatch.setenv("RADIXD_DEBUG", "1")
    with pytest.raises(KeyError):
        run(["generate", "Hello"])


def test_the_defaults_of_the_flags_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def remember(settings: Settings) -> None:
        seen.append(settings)
        raise StartError("seen")

    monkeypatch.setattr("service.server.check_port", lambda host, port: None)
    monkeypatch.setattr("service.replica.build_replica", remember)
    assert run(["serve"]) == 1
    assert seen == [Settings()]


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "--target 127.0.0.1:7"),
        ("0.0.0.0", "--target 127.0.0.1:7"),
        ("::", "--target '[::1]:7'"),
        ("::1", "--target '[::1]:7'"),
        ("example.org", "--target example.org:7"),
    ],
)
def test_the_command_to_try_next_names_an_address_that_can_be_called(host: str, shown: str) -> None:
    suggested = suggestion(Settings(host=host), 7)
    assert shown in suggested
    assert "--max-tokens" not in suggested


def test_the_command_to_try_next_ends_even_where_the_script_does_not() -> None:
    assert suggestion(Settings(engine="scripted:s.json"), 50051).endswith('radixd generate --max-tokens 32 "Hello"')


def test_help_tells_the_order_of_the_sources_shows_a_file_and_hides_what_is_not_built() -> None:
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert "flag wins over its RADIXD_* variable, a variable over the --config file" in " ".join(text.split())
    example = textwrap.dedent(text[text.index("    port = ") : text.index("Options:")])
    assert tomllib.loads(example)["port"] == 50052
    assert "0<=" not in text
    assert "From 0 to 65535." in " ".join(text.split())
    assert "cuda" not in text
    assert "deterministic" not in text


def test_the_short_help_of_each_command_is_whole() -> None:
    assert "..." not in CliRunner().invoke(cli, ["--help"]).output.partition("Commands:")[2]


def test_help_documents_every_setting_with_its_default_and_its_variable() -> None:
    text = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).output.split())
    for field in dataclasses.fields(Settings):
        name = "no_overlap" if field.name == "overlap" else field.name
        assert f"--{name.replace('_', '-')} " in text
        assert f"RADIXD_{name.upper()}" in text
        if field.default is not None and field.name != "overlap":
            assert f"default: {field.default}" in text


def test_only_commands_that_are_built_are_advertised() -> None:
    assert sorted(cli.commands) == ["chat", "generate", "serve", "top"]


def test_the_default_eviction_policy_is_the_caches_own_and_help_lists_them_all() -> None:
    assert Settings().eviction == POLICIES[0]
    assert f"--eviction [{'|'.join(POLICIES)}]" in CliRunner().invoke(cli, ["serve", "--help"]).output


def test_commands_that_serve_nothing_load_neither_torch_nor_the_engine() -> None:
    code = "import sys, service.cli, service.client, service.top; print({'torch', 'engine'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_version_is_the_packages() -> None:
    output = CliRunner().invoke(cli, ["--version"]).output
    assert output.strip().endswith(importlib.metadata.version("radixd"))


def test_a_port_is_free_once_nobody_listens_on_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"127.0.0.1:{port}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_an_ipv6_address_is_bracketed() -> None:
    assert join_address("::1", 1) == "[::1]:1"
    assert join_address("localhost", 1) == "localhost:1"
