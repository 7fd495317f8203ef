"""A client of one streamed answer that costs next to nothing, for measurements on the CPUs of the server.

Tokens are counted by a few bytes that each event with output holds; nothing is decoded. `bench.load.client`
understands answers, and costs ten times as much for each token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from bench.load.client import Client, Request, ServerProblem
from bench.load.records import Record

OUTPUT = b'"choices":[{'  # in every event with output
DONE = b"data: [DONE]"
_LONGEST = max(len(OUTPUT), len(DONE)) - 1


class Stream(asyncio.Protocol):
    """One request on a connection of its own.

    Attributes:
        record: of it; `prompt_tokens` are those sent.
        ended: done when the connection is.
    """

    def __init__(
        self, record: Record, head: bytes, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.record = record
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = head
        self._clock = clock
        self._rest = b""  # of what came before, in which a mark may have begun
        self._began = b""
        self._done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type
        self.record.sent = self._clock()
        self._transport.write(self._head)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        if not self.record.arrivals:
            self._began += data
        data = self._rest + data
        if count := data.count(OUTPUT):
            self.record.arrivals += [now] * count
        # A mark that ends here would be counted twice if it were kept whole.
        at = max(len(data) - _LONGEST, data.rfind(OUTPUT) + len(OUTPUT) if count else 0)
        self._rest = data[at:]
        if DONE in data:
            self._done = True
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.record.ended = self._clock()
        self.record.output_tokens = len(self.record.arrivals)
        if not self._done or not self.record.arrivals:
            self.record.error = "no output" if self._done else "cut off"
            self.record.message = self._began[:300].decode("utf-8", "replace") or str(exc or "")
        if not self.ended.done():
            self.ended.set_result(None)


async def at_once(client: Client, requests: Sequence[Request]) -> list[Record]:
    """Send all of them now, and wait until all have ended; a failure is in its record.

    Args:
        client: says where to, and what a request looks like. Prompts are token ids.

    Raises:
        ServerProblem: nobody answers there.
    """
    place = urlsplit(client.url)
    loop = asyncio.get_running_loop()
    streams = []
    for request in requests:
        body = client.body(request)
        head = (
            f"POST {place.path}/v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
            f"{client.header_lines}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        record = Record(0.0, request.output, request.label, prompt_tokens=len(request.prompt))

        def stream(record: Record = record, head: bytes = head + body) -> Stream:
            return Stream(record, head)

        try:
            _, made = await loop.create_connection(
                stream,
                place.hostname or "",
                place.port or (443 if place.scheme == "https" else 80),
                ssl=place.scheme == "https" or None,
            )
        except OSError as problem:
            raise ServerProblem(f"no server answers at {client.url} ({problem})") from problem
        streams.append(made)
    await asyncio.gather(*(stream.ended for stream in streams))
    return [stream.record for stream in streams]
