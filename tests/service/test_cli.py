from __future__ import annotations

import dataclasses
import importlib.metadata
import socket
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from service.cli import cli, run
from service.errors import StartError
from service.server import check_port, join_address
from service.settings import Settings, read_file

if TYPE_CHECKING:
    from pathlib import Path


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail with one line; returns the line."""
    assert run([*arguments]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("radixd: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--port", "70000"), "--port"),
        (("--port", "many"), "--port"),
        (("--page-size", "0"), "--page-size"),
        (("--cache", "lru"), "--cache"),
        (("--grace", "-1"), "--grace"),
        (("--device", "cuda"), "not built yet"),
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


@pytest.mark.parametrize("name", ["RADIXD_PORT", "RADIXD_PAGE_SIZE", "RADIXD_GRACE", "RADIXD_NO_OVERLAP"])
def test_a_bad_variable_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "nonsense")
    assert "nonsense" in failure(capsys, "serve", "--device", "cuda")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("page-size = 0", "page-size"),
        ("pages = 3", "pages"),
        ("config = 'other.toml'", "config"),
        ("not toml", "radixd.toml"),
    ],
)
def test_a_bad_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, expected: str
) -> None:
    file = tmp_path / "radixd.toml"
    file.write_text(content)
    assert expected in failure(capsys, "serve", "--port", "0", "--config", str(file))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"not a model" * 100])
def test_a_broken_model_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    assert "broken.gguf" in failure(capsys, "serve", "--port", "0", "--model", str(broken))


@pytest.mark.parametrize("content", ["", "[]", '{"unknown": 1}', '{"requests": {"a": {"tokens": [999]}}}'])
def test_a_bad_script_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    script = tmp_path / "script.json"
    script.write_text(content)
    assert "script.json" in failure(capsys, "serve", "--port", "0", "--engine", f"scripted:{script}")


def test_a_bad_prompt_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-tokens" in failure(capsys, "generate", "--max-tokens", "0", "Hello")
    assert "PROMPT" in failure(capsys, "generate")


def test_the_file_takes_names_with_dashes_or_underscores(tmp_path: Path) -> None:
    file = tmp_path / "radixd.toml"
    file.write_text('page-size = 4\npool_tokens = 64\nhost = "::1"\n')
    known = {field.name for field in dataclasses.fields(Settings)}
    assert read_file(file, known) == {"page_size": 4, "pool_tokens": 64, "host": "::1"}


def test_the_defaults_of_the_flags_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def remember(settings: Settings) -> None:
        seen.append(settings)
        raise StartError("seen")

    monkeypatch.setattr("service.server.check_port", lambda host, port: None)
    monkeypatch.setattr("service.replica.build_replica", remember)
    assert run(["serve"]) == 1
    assert seen == [Settings()]


def test_help_documents_every_setting_with_its_default_and_its_variable() -> None:
    text = " ".join(CliRunner().invoke(cli, ["serve", "--help"]).output.split())
    for field in dataclasses.fields(Settings):
        name = "no_overlap" if field.name == "overlap" else field.name
        assert f"--{name.replace('_', '-')} " in text
        assert f"RADIXD_{name.upper()}" in text
        if field.default is not None and field.name != "overlap":
            assert f"default: {field.default}" in text


def test_only_commands_that_are_built_are_advertised() -> None:
    assert sorted(cli.commands) == ["chat", "generate", "serve"]


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
