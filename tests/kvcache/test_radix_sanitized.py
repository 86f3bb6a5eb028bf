"""The tree's C++ under AddressSanitizer and UndefinedBehaviorSanitizer: random operations, and damage to be noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FUZZ_SECONDS = 5


def run(*command: str | Path) -> str:
    """What the command prints; with all of that it fails if the command does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sanitized programs are."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    probe = tmp_path_factory.mktemp("probe") / "probe"
    flags = ["-fsanitize=address,undefined", "-x", "c++", "-", "-o", str(probe)]
    if not compiler or subprocess.run([compiler, *flags], input=b"int main() {}", check=False).returncode:
        pytest.skip("the C++ compiler has no AddressSanitizer: the tree's memory safety is NOT tested here")
    build = ROOT / "build" / "sanitized"
    run("cmake", "-S", ROOT / "tests" / "csrc", "-B", build)
    run("cmake", "--build", build, "--parallel", "2")
    return build


def test_random_operations_break_no_rule_of_memory_and_no_invariant(sanitized: Path):
    assert "runs without a fault" in run(sanitized / "radix_fuzz", str(FUZZ_SECONDS))


def test_every_kind_of_damage_to_the_tree_is_noticed(sanitized: Path):
    assert "kinds of damage" in run(sanitized / "radix_damage")
