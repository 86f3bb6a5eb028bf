"""What a client sees of a whole server: speed, waiting times, and what the prefix cache is worth.

Starts the real server once with ``--cache radix`` and once with ``--cache naive``, runs the same scenarios on both
through gRPC on loopback, and prints them side by side. Prompts are random tokens, decoding is greedy with fixed
lengths; the single-stream figures are medians of ``--repeats`` runs. A last, separate server measures how late its
event loop is while it prefills a long prompt.

``--json FILE`` writes a flat object, the same figures with ``radix_`` or ``naive_`` in front:

* ``single_tok_s``: output tokens per second of one stream, 128 tokens in, 128 out, after the first token;
* ``ttft_1024_ms``: from the call to the first token of a fresh 1,024-token prompt;
* ``conc8_tok_s``, ``conc32_tok_s``: output tokens per second of 8 and 32 clients, 128 in, 64 out, over the whole run;
* ``prefix_tok_s``, ``prefix_s``, ``prefix_hit``: 64 requests of 768 common and 64 own tokens in, 32 out, 16 at once:
  output tokens per second, seconds in all, share of prompt tokens that came from the cache;

and, with nothing in front, ``loop_lag_p50_ms``, ``loop_lag_p99_ms``, ``loop_lag_max_ms``: lateness of a 1 ms timer on
the server's event loop during a 4,000-token prefill with a second stream decoding beside it.

Run: ``python benchmarks/serve.py`` (about five minutes on two cores).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from machine import describe, table
from radixd.v1 import generate_pb2 as pb
from radixd.v1 import generate_pb2_grpc, model_pb2, model_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

LAG_PROMPT = 4_000


@dataclass(frozen=True)
class Call:
    """One finished Generate call: times in seconds, by the monotonic clock."""

    start: float
    first: float
    last: float
    prompt: int
    cached: int
    output: int


class Bench:
    """Runs scenarios against one server."""

    def __init__(self, channel: grpc.aio.Channel, vocabulary: int, seed: int) -> None:
        self._stub = generate_pb2_grpc.GenerateServiceStub(channel)
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def tokens(self, count: int) -> list[int]:
        """Random ids, none of them special in the models that are measured here."""
        return [self._random.randrange(100, self._vocabulary) for _ in range(count)]

    async def call(self, ids: list[int], max_tokens: int) -> Call:
        """One request, read to its end."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.SamplingParams(temperature=0),
            stop=pb.StopCriteria(max_tokens=max_tokens, ignore_eos=True),
            output=pb.OutputOptions(token_ids=True),
        )
        start, first, cached, output = time.monotonic(), 0.0, 0, 0
        async for response in self._stub.Generate(request):
            match response.WhichOneof("event"):
                case "started":
                    cached = response.started.cached_tokens
                case "delta":
                    output += len(response.delta.token_ids)
                    first = first or time.monotonic()
        if output != max_tokens:
            raise RuntimeError(f"{output} tokens instead of {max_tokens}")
        return Call(start, first, time.monotonic(), len(ids), cached, output)

    async def single(self, repeats: int) -> float:
        """Output tokens per second of one stream after its first token."""
        calls = [await self.call(self.tokens(128), 128) for _ in range(repeats)]
        return statistics.median((call.output - 1) / (call.last - call.first) for call in calls)

    async def ttft(self, repeats: int) -> float:
        """Milliseconds to the first token of a fresh 1,024-token prompt."""
        calls = [await self.call(self.tokens(1024), 1) for _ in range(repeats)]
        return statistics.median(1000 * (call.first - call.start) for call in calls)

    async def clients(self, count: int, requests: int) -> float:
        """Output tokens per second over a run of ``requests`` calls, ``count`` at a time, 128 in, 64 out."""
        calls = await self._at_once([self.tokens(128) for _ in range(requests)], 64, count)
        return sum(call.output for call in calls) / _span(calls)

    async def prefix(self) -> tuple[float, float, float]:
        """The shared-prefix run: output tokens per second, seconds, share of prompt tokens from the cache."""
        common = self.tokens(768)
        calls = await self._at_once([common + self.tokens(64) for _ in range(64)], 32, 16)
        hit = sum(call.cached for call in calls) / sum(call.prompt for call in calls)
        return sum(call.output for call in calls) / _span(calls), _span(calls), hit

    async def _at_once(self, prompts: list[list[int]], max_tokens: int, count: int) -> list[Call]:
        gate = asyncio.Semaphore(count)

        async def one(ids: list[int]) -> Call:
            async with gate:
                return await self.call(ids, max_tokens)

        return await asyncio.gather(*(one(ids) for ids in prompts))


def _span(calls: list[Call]) -> float:
    return max(call.last for call in calls) - min(call.start for call in calls)


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a server that prints ``... on HOST:PORT; ...`` once it serves; yields it and its address; drains it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if process.stdout is None:
        raise RuntimeError("the server has no output")
    line = process.stdout.readline()
    if " on " not in line:
        raise RuntimeError(f"the server did not start: {' '.join(command)}")
    try:
        yield process, line.split(" on ", 1)[1].split(";")[0].strip()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def measure(address: str, options: argparse.Namespace) -> dict[str, float]:
    """Every scenario on the server at ``address``."""
    async with grpc.aio.insecure_channel(address) as channel:
        model = await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
        bench = Bench(channel, model.vocabulary_size, options.seed)
        await bench.call(bench.tokens(256), 16)  # the first step sets libraries up
        single = await bench.single(options.repeats)
        ttft = await bench.ttft(options.repeats)
        conc8 = await bench.clients(8, 16)
        conc32 = await bench.clients(32, 64)
        rate, seconds, hit = await bench.prefix()
    return {
        "single_tok_s": single,
        "ttft_1024_ms": ttft,
        "conc8_tok_s": conc8,
        "conc32_tok_s": conc32,
        "prefix_tok_s": rate,
        "prefix_s": seconds,
        "prefix_hit": hit,
    }


async def _prefill_beside_a_stream(address: str, seed: int) -> tuple[float, float]:
    """Returns when the long prefill began and ended."""
    async with grpc.aio.insecure_channel(address) as channel:
        model = await model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest())
        bench = Bench(channel, model.vocabulary_size, seed)
        await bench.call(bench.tokens(600), 4)
        stream = asyncio.create_task(bench.call(bench.tokens(32), 64))
        await asyncio.sleep(0.3)
        long = await bench.call(bench.tokens(LAG_PROMPT), 1)
        await stream
        return long.start, long.first


def loop_lag(options: argparse.Namespace) -> dict[str, float]:
    """Lateness of the event loop's timer during a long prefill, in milliseconds."""
    command = [sys.executable, str(Path(__file__).with_name("probed_server.py")), options.model]
    with serving(command) as (process, address):
        start, end = asyncio.run(_prefill_beside_a_stream(address, options.seed))
        process.send_signal(signal.SIGTERM)
        samples = json.loads(process.communicate(timeout=60)[0].splitlines()[-1])
    late = sorted(1000 * late for now, late in samples if start <= now <= end)
    if len(late) < 100:
        raise RuntimeError(f"only {len(late)} samples in {end - start:.2f} s")
    return {
        "loop_lag_p50_ms": late[len(late) // 2],
        "loop_lag_p99_ms": late[int(len(late) * 0.99)],
        "loop_lag_max_ms": late[-1],
    }


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for radixd serve")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each single-stream figure")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args()
    print(describe(), flush=True)
    figures: dict[str, Any] = {}
    radixd = str(Path(sys.executable).with_name("radixd"))
    for cache in ("radix", "naive"):
        command = [radixd, "serve", "--port=0", f"--model={options.model}", f"--cache={cache}"]
        with serving(command) as (_, address):
            figures |= {f"{cache}_{name}": value for name, value in asyncio.run(measure(address, options)).items()}
    figures |= loop_lag(options)
    names = [
        ("one stream, 128 in / 128 out, tok/s", "single_tok_s", ".1f"),
        ("TTFT of 1,024 tokens, ms", "ttft_1024_ms", ".0f"),
        ("8 clients, 128 in / 64 out, output tok/s", "conc8_tok_s", ".1f"),
        ("32 clients, same", "conc32_tok_s", ".1f"),
        ("shared prefix, output tok/s", "prefix_tok_s", ".1f"),
        ("shared prefix, seconds in all", "prefix_s", ".1f"),
        ("shared prefix, prompt tokens from the cache", "prefix_hit", ".1%"),
    ]
    rows = []
    for label, name, form in names:
        radix, naive = figures[f"radix_{name}"], figures[f"naive_{name}"]
        rows.append([label, format(radix, form), format(naive, form), f"{radix / naive:.2f}x" if naive else "-"])
    print(table(["", "radix", "naive", "radix/naive"], rows))
    lag = [figures[f"loop_lag_{name}_ms"] for name in ("p50", "p99", "max")]
    print(
        f"event loop lag during a {LAG_PROMPT:,}-token prefill: "
        f"p50 {lag[0]:.2f} ms, p99 {lag[1]:.2f} ms, max {lag[2]:.2f} ms"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
