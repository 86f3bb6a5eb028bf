"""Learns what the policy ``hazard`` starts from, and writes csrc/radix_hazard_start.h.

The first half of each Mooncake trace goes through a cache that never has to evict, and what happened to each kind of
page at each age is counted, by the formulas of the policy's oracle. The counts of each trace are scaled to the same
mass, 20,000 weighted runs of 512 tokens, added, and rounded to seven bits of mantissa. The second halves are not looked
at: they are what ``benchmarks/hit_rate.py`` may be believed by.

Run: ``python benchmarks/train_hazard.py [--trace FILE ...]``; see hit_rate.py for the traces.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
from hit_rate import BLOCK, PAGE, TRACES, Request, read

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kvcache.hazard_oracle import BUCKETS, KINDS, START_TABLE, Hazards, Past, kind_of, start_of

MASS = 20_000
UNUSED = Past()
MASSES = np.array([start_of(code) for code in range(1 << 12)])

HEAD = """\
// What the hazards of radix_hazard.h start from. Written by benchmarks/train_hazard.py; do not edit.
//
// Of each kind that occurred, for each bucket of age: the mass that reached it unused, and the mass used within it, as
// three hexadecimal digits each (radix_hazard.cpp, mass_of).
#pragma once

#include <cstdint>

namespace radixd {

struct HazardStart {
    uint16_t kind;
    const char *exposed;
    const char *reused;
};

inline constexpr HazardStart hazard_starts[] = {
"""
TAIL = """\
};

} // namespace radixd
"""


def learn(requests: list[Request]) -> Hazards:
    """What the policy learns from the requests if everything stays cached."""
    hazards = Hazards(learned=False)
    pasts: dict[int, Past] = {}
    for request in requests:
        blocks = [block for i, block in enumerate(request.blocks) if request.length - i * BLOCK >= PAGE]
        known = list(itertools.takewhile(pasts.__contains__, blocks))
        fresh = max(request.length - len(known) * BLOCK, 0)
        gap = hazards.now - pasts[known[-1]].last if known else None
        pages = {block: min(request.length - i * BLOCK, BLOCK) // PAGE for i, block in enumerate(blocks)}
        for before, run in itertools.groupby(reversed(blocks), lambda block: pasts.get(block, UNUSED)):
            alike = list(run)
            count = sum(pages[block] for block in alike)
            uses = min(before.uses + 1, 255)
            kind = kind_of(uses, fresh, request.output, gap)
            after = Past(hazards.now, kind, uses, min(max(count * PAGE // BLOCK, 1), 255))
            if before.uses:
                hazards.leave(before, count * PAGE / BLOCK / before.runs**0.5)
            hazards.enter(after, count * PAGE / BLOCK / after.runs**0.5)
            pasts.update(dict.fromkeys(alike, after))
        hazards.tick()
    return hazards


def code_of(mass: float) -> int:
    """The code of the nearest mass that the table can say."""
    return int(np.abs(MASSES - mass).argmin())


def main() -> None:
    """Reads the traces and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="a trace; may be given again")
    options = parser.parse_args()
    paths = options.trace or TRACES
    exposed, reused = np.zeros((BUCKETS, KINDS)), np.zeros((BUCKETS, KINDS))
    for path in paths:
        requests = read(path)
        hazards = learn(requests[: len(requests) // 2])
        scale = MASS / hazards.exposed[0].sum()
        exposed += scale * np.array(hazards.exposed)
        reused += scale * np.array(hazards.reused)
    with START_TABLE.open("w") as file:
        file.write(HEAD)
        for kind in range(KINDS):
            rows = [[code_of(mass) for mass in table[:, kind]] for table in (exposed, reused)]
            if any(any(row) for row in rows):
                digits = ('"' + "".join(f"{code:03x}" for code in row) + '"' for row in rows)
                file.write(f"{{{kind}, {', '.join(digits)}}},\n")
        file.write(TAIL)


if __name__ == "__main__":
    main()
