"""Where a setting comes from, and that a wrong one is told in terms of that."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from service.cli import run
from service.errors import StartError
from tests.service.commands import failure

if TYPE_CHECKING:
    from pathlib import Path

    from service.settings import Settings


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What serve would have served with."""
    settings: list[Settings] = []

    def remember(given: Settings) -> None:
        settings.append(given)
        raise StartError("seen")

    monkeypatch.setattr("service.replica.build_replica", remember)
    return settings


def config(folder: Path, content: str) -> str:
    file = folder / "radixd.toml"
    file.write_text(content)
    return str(file)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RADIXD_PORT", "many", "RADIXD_PORT=many: is not an integer"),
        ("RADIXD_PAGE_SIZE", "0", "RADIXD_PAGE_SIZE=0: must be between 1 and 1024"),
        ("RADIXD_GRACE", "long", "RADIXD_GRACE=long: is not a number"),
        ("RADIXD_GRACE", "inf", "RADIXD_GRACE=inf: must be between 0 and 86400"),
        ("RADIXD_NO_OVERLAP", "maybe", "RADIXD_NO_OVERLAP=maybe: is not true or false"),
        ("RADIXD_DETERMINISTIC", "1", "RADIXD_DETERMINISTIC: not built yet"),
        ("RADIXD_DEVICE", "cuda", "RADIXD_DEVICE=cuda: not built yet"),
        ("RADIXD_POOL_TOKENS", "3", "RADIXD_POOL_TOKENS=3: must be at least one page (16)"),
        ("RADIXD_HOST", "no.such.host.invalid", "RADIXD_HOST=no.such.host.invalid: cannot be resolved"),
        ("RADIXD_CONFIG", "/no/such/file.toml", "/no/such/file.toml: No such file"),
    ],
)
def test_a_wrong_variable_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(name, value)
    assert expected in failure(capsys, "serve")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("port = [1]", "port = [1]: is not an integer"),
        ("port = true", "port = true: is not an integer"),
        ("port = 1.5", "port = 1.5: is not an integer"),
        ('port = "1"', 'port = "1": is not an integer'),
        ("port = 1979-05-27", "port = 1979-05-27: is not an integer"),
        ("[port]", "port = {}: is not an integer"),
        ("port = 70000", "port = 70000: must be between 0 and 65535"),
        ("page-size = 0", "page-size = 0: must be between 1 and 1024"),
        ("host = 1", "host = 1: is not a string"),
        ('host = ""', 'host = "": must not be empty'),
        ('host = "a\\u0000b"', "cannot be resolved"),
        ("grace = true", "grace = true: is not a number"),
        ("grace = nan", "grace = nan: must be between 0 and 86400"),
        ("no-overlap = 1", "no-overlap = 1: is not true or false"),
        ('no_overlap = "yes"', 'no_overlap = "yes": is not true or false'),
        ("deterministic = true", "deterministic = true: not built yet"),
        ('device = "cuda"', 'device = "cuda": not built yet'),
        ('cache = "lru"', 'cache = "lru": must be radix or naive'),
        ('eviction = "radix"', 'eviction = "radix": must be hazard or'),
        ('engine = "scripted:s"\nmodel = "smollm2"', 'model = "smollm2": no model is loaded with --engine scripted:s'),
        ("pool_tokens = 3", "pool_tokens = 3: must be at least one page (16)"),
        ("page-size = 4\npage_size = 4", "page-size and page_size are the same setting"),
        ("pages = 3", "unknown setting 'pages'"),
        ("config = 'other.toml'", "unknown setting 'config'"),
        ("not toml", "is not TOML"),
        ("a = " + "[" * 5000, "is nested too deeply"),
    ],
)
def test_a_wrong_value_of_the_file_is_named_with_the_file_and_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, expected: str
) -> None:
    file = config(tmp_path, content)
    line = failure(capsys, "serve", "--config", file)
    assert line.startswith(f"radixd: {file}: ")
    assert expected in line


def test_a_file_that_is_not_utf_8_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "radixd.toml"
    file.write_bytes(b"host = '\xff'")
    assert f"{file}: is not UTF-8 text" in failure(capsys, "serve", "--config", str(file))
    assert str(tmp_path) in failure(capsys, "serve", "--config", str(tmp_path))


def test_a_value_that_a_stronger_source_replaces_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[Settings]
) -> None:
    file = config(tmp_path, 'page-size = 4\npool_tokens = 64\nmodel = "left.gguf"\nport = 0\n')
    monkeypatch.setenv("RADIXD_PORT", "many")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", "--config", file, "--port", str(port), "--engine", "scripted:s.json"]
    assert run(arguments) == 1
    (settings,) = seen
    assert (settings.page_size, settings.pool_tokens, settings.port) == (4, 64, port)
    assert settings.script == "s.json"


def test_a_model_that_was_asked_for_more_strongly_than_the_script_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXD_ENGINE", "scripted:s.json")
    assert "--model smollm2: no model is loaded" in failure(capsys, "serve", "--model", "smollm2")
