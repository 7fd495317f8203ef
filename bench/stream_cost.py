"""What a streamed token costs the gateway: CPU time per token, as one process among real ones.

A fake executor sends each of `--streams` requests one token per step; the gateway is a process of its own
(`python -m gateway`), whose CPU time is read from the system; clients read and count events.

    python -m bench.stream_cost --streams 64 --tokens 256
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil

from tests.fake_executor import FakeExecutor, Script, make_card
from wire.generate import Submit


async def _client(url: str, http: aiohttp.ClientSession, tokens: int) -> int:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": tokens,
        "temperature": 0,
    }
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        return (await response.read()).count(b'"index"')


async def _measure(streams: int, tokens: int, delay: float) -> None:
    with tempfile.TemporaryDirectory(prefix="pk-") as directory:
        run_dir = Path(directory)
        card = make_card()
        line: list[int] = []

        def respond(submit: Submit) -> Script:
            return Script([line], delay=delay)

        async with FakeExecutor(run_dir, card, respond) as executor:
            text = executor.encode("the quick brown fox jumps over the lazy dog ")
            line = (text * (tokens // len(text) + 1))[:tokens]
            gateway = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway", "--run-dir", directory, "--port", "0",
                "--log-level", "warning",
            )  # fmt: skip
            try:
                await _report(run_dir, gateway.pid, streams, tokens)
            finally:
                gateway.send_signal(signal.SIGTERM)
                await gateway.wait()


async def _report(run_dir: Path, pid: int, streams: int, tokens: int) -> None:
    announced = run_dir / "gateway.json"
    while not announced.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    url = msgspec.json.decode(announced.read_bytes())["url"]
    process = psutil.Process(pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        while (await http.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.gather(*(_client(url, http, tokens) for _ in range(streams)))
        cpu, wall = process.cpu_times(), time.perf_counter()
        events = sum(await asyncio.gather(*(_client(url, http, tokens) for _ in range(streams))))
        after, took = process.cpu_times(), time.perf_counter() - wall
    used = after.user + after.system - cpu.user - cpu.system
    total = streams * tokens
    print(
        f"{streams} streams x {tokens} tokens: {events} events for {total} tokens in {took:.2f} s; "
        f"gateway CPU {used:.2f} s = {used / total * 1e6:.1f} us per token, "
        f"{used / events * 1e6:.1f} us per event (user {after.user - cpu.user:.2f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--delay", type=float, default=0.03, help="seconds between steps")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    asyncio.run(_measure(options.streams, options.tokens, options.delay))


if __name__ == "__main__":
    main()
