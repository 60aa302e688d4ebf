"""What the proxy adds to a stream: the same request straight to a server and through the proxy, in turn.

    python benchmarks/proxy.py --engine http://127.0.0.1:30000 [--tokens 2000] [--rounds 5]

Client, proxy and recording share one process, as in a check. The figure is the ratio of the medians of one run.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from harness.engines import Session
from harness.engines.proxy import ProxyFront
from harness.engines.sglang import Engine
from harness.history import Delivered, Event
from harness.loop import VirtualLoop
from harness.schedule import Schedule
from harness.tokenizer import load


async def stream(client: aiohttp.ClientSession, url: str, tokens: int, loop: VirtualLoop) -> tuple[float, int]:
    """Seconds that a stream takes, and its events; read as a client reads it, the last event in full."""
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [97, 98, 99], "sampling_params": params, "stream": True, "return_logprob": True}
    begin, count, last = time.monotonic(), 0, b""
    with loop.outside():
        async with client.post(f"{url}/generate", json=body) as response:
            buffer = bytearray()
            async for segment in response.content.iter_any():
                buffer += segment
                *events, rest = buffer.split(b"\n\n")
                buffer = bytearray(rest)
                for event in events:
                    count += 1
                    last = event if b"[DONE]" not in event else last
    took = time.monotonic() - begin
    ids = json.loads(bytes(last).removeprefix(b"data: "))["meta_info"]["completion_tokens"]
    assert ids == tokens, f"{ids} tokens instead of {tokens}"
    return took, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    loop, front = VirtualLoop(sockets=True), ProxyFront(args.engine.rstrip("/"))
    loop.run(front.start())
    told: list[Event] = []
    front.attach(Session(Engine(Schedule(), load()), told.append, lambda: None))

    async def once(url: str) -> tuple[float, int]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20) as client:
            return await stream(client, url, args.tokens, loop)

    urls: dict[str, Any] = {"direct": front.name, "proxied": f"http://{front.host}:{front.port}"}
    took: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(args.rounds + 1):
        for name, url in urls.items():
            seconds, events = loop.run(once(url))
            if number:  # the first round warms up
                took[name].append(seconds)
                print(f"round {number} {name:8} {seconds:6.2f} s   {events} events", flush=True)
    recorded = sum(len(event.ids) for event in told if isinstance(event, Delivered))
    assert recorded == args.tokens * (args.rounds + 1), "the proxy must have recorded every token"
    direct, proxied = median(took["direct"]), median(took["proxied"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"direct {direct:.2f} s, proxied {proxied:.2f} s: ratio {proxied / direct:.3f}   peak {peak:.0f} MiB")
    loop.run(front.stop())


if __name__ == "__main__":
    main()
