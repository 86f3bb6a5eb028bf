"""What a figure depends on: the machine, the versions, the command. Printed above every table."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def describe() -> str:
    """Three lines: processor and memory, versions, and the command that repeats the run."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "?")
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "").split()
    features = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("radixd", "torch", "grpcio", "numpy"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model} ({', '.join(features)}), {memory:.0f} GiB\n"
        f"Python {platform.python_version()}, {packages}, commit {commit.stdout.strip() or '?'}\n"
        f"repeat: python {' '.join(sys.argv)}"
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in plain text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
