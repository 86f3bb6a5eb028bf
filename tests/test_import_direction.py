"""Imports point one way: service -> scheduler -> {kvcache, engine}; engine -> kvcache's pools."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"service", "scheduler", "kvcache", "engine", "radixd"}
MAY_IMPORT = {
    "service": {"service", "scheduler", "kvcache", "engine", "radixd"},
    "scheduler": {"scheduler", "kvcache", "engine"},
    "engine": {"engine", "kvcache"},
    "kvcache": {"kvcache"},
}
# The scheduler knows engines by their interface, and the engine knows the cache by its pools, alone.
ONLY = {("scheduler", "engine"): {"engine.base"}, ("engine", "kvcache"): {"kvcache.pool"}}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_lies_under_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imports(path):
            target = name.split(".")[0]
            assert target in MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {name}"
            allowed = ONLY.get((package, target))
            assert allowed is None or name in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("kvcache", {"torch", "asyncio", "grpc"}), ("scheduler.scheduler", {"torch", "grpc"}), ("service.cli", {"torch"})],
)
def test_importing_a_package_does_not_pull_in_what_it_must_not_know(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)


def test_the_service_knows_no_tensor() -> None:
    for path in (ROOT / "service").rglob("*.py"):
        text = path.read_text()
        assert "import torch" not in text, path


def test_the_scheduler_knows_no_protobuf() -> None:
    for path in (ROOT / "scheduler").rglob("*.py"):
        assert "_pb2" not in path.read_text(), path
