"""A client of OpenAI's streaming API that costs little: it shares the machine with what it measures.

Events are told apart by searching for a few bytes. Only the few that hold no output (usage, errors) are
decoded, and all of them where the text is needed to continue a conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from bench.load.records import Record

_OUTPUT = (b'"choices":[{', b'"choices": [{')  # an event with output, as servers write it
_decode = msgspec.json.Decoder().decode


class ServerProblem(Exception):
    """The server cannot be measured at all; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send.

    Attributes:
        prompt: token ids, or a text; for `/v1/completions`.
        messages: a conversation instead, for `/v1/chat/completions`.
        output: tokens the answer shall have.
        at: seconds after the start when a trace has it arrive.
        label: kept in the record.
    """

    output: int
    prompt: list[int] | str = field(default_factory=list)
    messages: list[dict[str, str]] | None = None
    at: float = 0.0
    label: str = ""


class EventSplitter:
    """Bytes as they come in, whole server-sent events out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, without the blank line that ends each."""
        # JSON never holds a raw carriage return, so those of servers with CRLF can go.
        *events, self._rest = (self._rest + data.replace(b"\r", b"")).split(b"\n\n")
        return events


class _Failed(Exception):
    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """Sends requests to one server; use it as an async context manager.

    Args:
        url: of the server, without `/v1`.
        model: its name; "" takes the first one the server lists.
        key: sent as bearer token, if any.
        fields: of every request's body, beside those this client sets.
        min_tokens: also force the length by `min_tokens`, for servers that know no `ignore_eos`.
        timeout: seconds without a byte after which a request has failed.
        clock: of all instants, for tests.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        key: str = "",
        fields: dict[str, Any] | None = None,
        min_tokens: bool = False,
        timeout: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.max_model_len = 0  # tokens; 0: the server did not say
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._fields = fields or {}
        self._min_tokens = min_tokens
        self._timeout = timeout
        self._clock = clock

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._timeout),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def header_lines(self) -> str:
        """What every request's head holds, for who writes it."""
        return "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())

    async def connect(self) -> None:
        """Find the model.

        Raises:
            ServerProblem: nobody answers, the key is refused, or the model is not there.
        """
        status, body = await self.get("/v1/models")
        if status == 401:
            raise ServerProblem(
                f"{self.url} wants a key (401); set OPENAI_API_KEY or give --api-key"
            )
        models = body.get("data") if isinstance(body, dict) else None
        if status != 200 or not models:
            raise ServerProblem(
                f"{self.url}/v1/models answered {status} without a list of models; "
                "is it an OpenAI-compatible server, and ready?"
            )
        names = [str(model.get("id")) for model in models]
        if self.model and self.model not in names:
            raise ServerProblem(f"{self.url} has no model {self.model!r}; it has {names}")
        self.model = self.model or names[0]
        chosen = models[names.index(self.model)]
        self.max_model_len = int(chosen.get("max_model_len") or 0)

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded body, None if it is not JSON. Raises ServerProblem if nobody answers."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """As `get`, with a body."""
        return await self._ask("POST", path, msgspec.json.encode(body))

    async def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        try:
            async with self._http.request(method, self.url + path, data=body) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise ServerProblem(
                f"no server answers at {self.url} ({problem}); start one, or give another --url"
            ) from problem
        try:
            return response.status, _decode(data)
        except msgspec.DecodeError:
            return response.status, None

    def body(self, request: Request) -> bytes:
        """A request as it goes over the wire."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._min_tokens:
            body["min_tokens"] = request.output
        if request.messages is None:
            body["prompt"] = request.prompt
        else:
            body["messages"] = request.messages
        return msgspec.json.encode(body | self._fields)

    async def send(self, request: Request, record: Record | None = None) -> Record:
        """Send one request and read all of its answer; a failure is in the record.

        Args:
            record: filled while the answer comes, for who looks before it has ended; default: a new one.
        """
        chat = request.messages is not None
        url = self.url + ("/v1/chat/completions" if chat else "/v1/completions")
        body = self.body(request)
        record = record or Record(0.0, request.output, request.label)
        record.sent = self._clock()
        reader = _Reader(record, chat)
        try:
            async with self._http.post(url, data=body) as response:
                if response.status != 200:
                    raise _Failed(f"http {response.status}", _reason(await response.read()))
                split = EventSplitter().feed
                async for data in response.content.iter_any():
                    now = self._clock()
                    for event in split(data):
                        reader.take(event, now)
            reader.finish()
        except _Failed as failed:
            record.error, record.message = failed.kind, str(failed)
        except aiohttp.ClientConnectorError as problem:
            record.error, record.message = "no connection", str(problem)
        except TimeoutError:
            record.error, record.message = "timeout", f"{self._timeout:g} s without a byte"
        except (aiohttp.ClientError, OSError) as problem:
            record.error, record.message = "disconnected", str(problem) or repr(problem)
        record.ended = self._clock()
        return record


class _Reader:
    """Writes the events of one answer into its record."""

    __slots__ = ("_chat", "_done", "_record", "_usage")

    def __init__(self, record: Record, chat: bool) -> None:
        self._record = record
        self._chat = chat
        self._done = False
        self._usage = False

    def take(self, event: bytes, now: float) -> None:
        if not event.startswith(b"data:"):
            event = _data_line(event)
            if not event:
                return
        if not self._chat and event.endswith(b"}") and (_OUTPUT[0] in event or _OUTPUT[1] in event):
            self._record.arrivals.append(now)
            return
        self._take_other(event[5:].strip(), now)

    def _take_other(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            body = _decode(data)
        except msgspec.DecodeError as problem:
            raise _Failed("broken event", f"{problem}: {data[:200]!r}") from None
        if not isinstance(body, dict) or body.get("error"):
            raise _Failed("error event", _reason(data))
        if usage := body.get("usage"):
            self._take_usage(usage)
        for choice in body.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            # A chat's first event may name the role alone, which is no output.
            if text or not self._chat:
                self._record.arrivals.append(now)
                self._record.text += text or ""

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._usage = True
        self._record.prompt_tokens = usage.get("prompt_tokens") or 0
        self._record.output_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        self._record.cached_tokens = details.get("cached_tokens") or 0

    def finish(self) -> None:
        if not self._done:
            raise _Failed("cut off", "the stream ended without data: [DONE]")
        if not self._record.arrivals:
            raise _Failed("no output", "the stream ended without an event with output")
        if not self._usage:
            self._record.output_tokens = len(self._record.arrivals)


def _data_line(event: bytes) -> bytes:
    """The data of an event that begins with something else, such as a comment."""
    return next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")


def _reason(data: bytes) -> str:
    """What an error body says, in one line."""
    try:
        error = _decode(data)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return data[:200].decode("utf-8", "replace")
