"""Generates the typed Python stubs of protos/ into protos/gen; --check says whether the committed ones drifted."""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
COMMITTED = PROTOS / "gen"


def generate(out: Path) -> None:
    """Runs protoc over every proto file, writing messages, services and their type stubs under ``out``."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "radixd").rglob("*.proto"))
    outputs = [f"--{plugin}_out={out}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The mypy plugins are console scripts of the environment that runs this file, which need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    protoc = subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTOS), *outputs, *sources],
        check=False,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    if protoc.returncode:
        sys.exit(protoc.stderr)
    (out / "radixd" / "__init__.py").write_text('"""Generated from protos/: the wire contract."""\n')
    (out / "radixd" / "v1" / "__init__.py").write_text('"""Generated from protos/radixd/v1."""\n')
    (out / "radixd" / "py.typed").touch()


def drifted(fresh: Path) -> list[str]:
    """Names the files that differ between ``fresh`` and the committed stubs."""
    names = {
        path.relative_to(root).as_posix()
        for root in (fresh, COMMITTED)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    _, mismatched, missing = filecmp.cmpfiles(fresh, COMMITTED, sorted(names), shallow=False)
    return sorted(mismatched + missing)


def main() -> int:
    """Returns 0, or 1 where --check found a drift."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed stubs drifted")
    if not parser.parse_args().check:
        COMMITTED.mkdir(exist_ok=True)
        generate(COMMITTED)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differing = drifted(Path(folder))
    for name in differing:
        print(f"protos/gen/{name} does not match its proto: run `make stubs`", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
