"""How many streams `rolloutcheck serve` keeps at their rate: a client process counts what arrives, and how late.

``python -m benchmarks.serve`` starts the server in a process of its own and opens 1,000 concurrent streams at 50 tokens
a second each, with and without logprobs, cumulative and incremental. A server that is behind merges events, as SGLang
does: then fewer come, with more tokens each. The n-th token is due n / rate after the request; its event is late by
what it comes after that. The client only counts; one that parses JSON needs a core more. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS_KEY = b'"completion_tokens":'
SAMPLE_EVERY = 3
"""Of so many arrivals of a stream, one has its lateness measured."""


@dataclass
class Counter(asyncio.Protocol):
    """One stream's client: sends its request, counts events, looks at some."""

    request: bytes
    rate: float
    done: asyncio.Future[None]
    events: int = 0
    arrivals: int = 0
    begun_s: float = 0.0
    ended_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun_s = time.monotonic()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")
        self.arrivals += 1
        if self.arrivals % SAMPLE_EVERY == 0:
            number = data.rpartition(TOKENS_KEY)[2].partition(b",")[0]
            if number.isdigit():
                self.late_s.append(time.monotonic() - self.begun_s - int(number) / self.rate)
        if data.endswith(b"0\r\n\r\n"):
            self.ended_s = time.monotonic()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the stream ended early"))


@dataclass(frozen=True)
class Load:
    """What is asked of the server."""

    streams: int
    rate: float
    seconds: float
    logprobs: bool

    @property
    def tokens(self) -> int:
        return int(self.rate * self.seconds)

    def request(self, number: int) -> bytes:
        body = {
            "input_ids": [97, *map(ord, str(number))],
            "sampling_params": {"max_new_tokens": self.tokens, "ignore_eos": True},
            "return_logprob": self.logprobs,
            "stream": True,
        }
        data = json.dumps(body).encode()
        return b"POST /generate HTTP/1.1\r\nHost: mock\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


@contextmanager
def server(rate: float, *options: str) -> Iterator[tuple[int, int]]:
    """Its port and its process id."""
    command = [sys.executable, "-m", "harness", "serve", "--port", "0", "--rate", str(rate), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline().rpartition(":")[2]), process.pid
        finally:
            process.terminate()


def seconds_of(pid: int) -> float:
    """CPU time that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory_of(pid: int) -> float:
    """The most memory that a process has had, in MiB (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


async def drive(port: int, load: Load) -> list[Counter]:
    loop = asyncio.get_running_loop()
    counters = [Counter(load.request(i), load.rate, loop.create_future()) for i in range(load.streams)]
    for counter in counters:
        await loop.create_connection(lambda counter=counter: counter, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(counter.done for counter in counters))
    return counters


def measure(load: Load, *options: str) -> None:
    with server(load.rate, *options) as (port, pid):
        before, began = seconds_of(pid), time.process_time()
        counters = asyncio.run(drive(port, load))
        used, own, memory = seconds_of(pid) - before, time.process_time() - began, memory_of(pid)
    lasted = max(c.ended_s for c in counters) - min(c.begun_s for c in counters)
    per_second = sum(c.events for c in counters) / lasted
    share = sum(c.events for c in counters) / (load.streams * load.tokens)
    late = sorted(1000 * s for c in counters for s in c.late_s)
    slower = statistics.median((c.ended_s - c.begun_s) / (load.tokens / load.rate) for c in counters)
    name = " ".join(["incremental" if options else "cumulative", "logprobs" if load.logprobs else ""])
    print(
        f"{name:22} {per_second:9.0f} {share:8.0%} {slower:7.2f} {statistics.median(late):8.0f} "
        f"{late[len(late) * 99 // 100]:8.0f} {used / lasted:5.2f} {sum(c.events for c in counters) / used:9.0f} "
        f"{own / lasted:6.2f} {memory:5.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, metavar="N", help="at once (default 1000)")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="tokens a second each (default 50)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="a stream lasts (default 10)")
    given = parser.parse_args()
    print(f"{given.streams} streams, {given.rate:g} tokens/s each, goal {given.streams * given.rate:.0f} events/s")
    columns = f"{'events/s':>9} {'of goal':>8} {'time':>7} {'late ms':>8} {'p99 ms':>8} {'CPU':>5} {'per CPU s':>9}"
    print(f"{'':22} {columns} {'client':>6} {'MiB':>5}")
    for logprobs in (False, True):
        for options in ((), ("--incremental",)):
            measure(Load(given.streams, given.rate, given.seconds, logprobs), *options)


if __name__ == "__main__":
    main()
