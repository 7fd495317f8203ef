"""Hostile and mistaken requests against the whole gateway: each has the status it should, none is a 500,
and after all of them the next request works."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.gateway.front import Answer, call, exchange, parse
from tests.gateway.serving import run, serve

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]

Case = tuple[str, int, str, str, Any, dict[str, str]]


def chat(name: str, status: int, headers: dict[str, str] | None = None, **fields: Any) -> Case:
    body = {"messages": USER, "max_tokens": 4, **fields}
    return name, status, "POST", CHAT, json.dumps(body).encode(), headers or {}


def text(name: str, status: int, **fields: Any) -> Case:
    body = {"prompt": "Hello", "max_tokens": 4, **fields}
    return name, status, "POST", TEXT, json.dumps(body).encode(), {}


def raw(name: str, status: int, body: bytes, **headers: str) -> Case:
    return name, status, "POST", CHAT, body, {k.replace("_", "-"): v for k, v in headers.items()}


def at(name: str, status: int, method: str, path: str, body: bytes | None = None) -> Case:
    return name, status, method, path, body, {}


GOOD = json.dumps({"messages": USER, "max_tokens": 4}).encode()

CASES: list[Case] = [
    # What must work.
    chat("plain", 200),
    chat("unknown fields are ignored", 200, foo=1, metadata={"a": [1]}, store=False),
    chat("nulls mean defaults", 200, temperature=None, stop=None, seed=None, n=None),
    chat("an empty stop list", 200, stop=[]),
    chat("a text part", 200, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}]}]),
    chat("control characters", 200, messages=[{"role": "user", "content": "a\x00\x07\u202eb"}]),
    chat("an emoji of several code points", 200, messages=[{"role": "user", "content": "👩‍👩‍👧‍👦"}]),
    chat("a negative seed", 200, seed=-1),
    text("token ids", 200, prompt=[1, 2, 3]),
    text("a batch of prompts", 200, prompt=["a", "b"]),
    # JSON.
    raw("no body", 400, b""),
    raw("not JSON", 400, b"hello"),
    raw("cut short", 400, GOOD[:-1]),
    raw("two objects", 400, GOOD + GOOD),
    raw("a list", 400, b"[]"),
    raw("a string", 400, b'"x"'),
    raw("null", 400, b"null"),
    raw("a byte order mark", 400, b"\xef\xbb\xbf" + GOOD),
    raw("UTF-16", 400, GOOD.decode().encode("utf-16")),
    raw("invalid UTF-8", 400, GOOD.replace(b"Hello", b"\xff\xfe")),
    raw("an overlong encoding", 400, GOOD.replace(b"Hello", b"\xc0\xaf")),
    raw("a lone surrogate", 400, GOOD.replace(b"Hello", b"\\ud800")),
    raw("NaN", 400, GOOD.replace(b"4", b"NaN")),
    raw("Infinity", 400, b'{"messages": [], "temperature": Infinity}'),
    raw("1e999", 400, b'{"messages": [], "temperature": 1e999}'),
    raw("a comment", 400, b"/* hi */" + GOOD),
    raw("single quotes", 400, b"{'messages': []}"),
    raw("a trailing comma", 400, b'{"messages": [],}'),
    raw("100,000 lists", 400, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    raw("100,000 objects", 400, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    raw("deep content", 400, b'{"messages": [{"role": "user", "content": ' + b"[" * 5000),
    raw("a number of 10,000 digits", 400, b'{"messages": [], "n": ' + b"9" * 10_000 + b"}"),
    raw("a repeated key, the last one bad", 400, b'{"messages": [], "n": 1, "n": 0}'),
    # Headers of bodies.
    raw("a form", 415, b"a=b", Content_Type="application/x-www-form-urlencoded"),
    raw("plain text", 415, GOOD, Content_Type="text/plain"),
    raw("multipart", 415, GOOD, Content_Type="multipart/form-data; boundary=x"),
    raw("a type that is none", 415, GOOD, Content_Type="json"),
    raw("an endless type", 415, GOOD, Content_Type="a/" + "b" * 5000),
    raw("another charset", 415, GOOD, Content_Type="application/json; charset=latin-1"),
    raw("compressed", 415, gzip.compress(GOOD), Content_Encoding="gzip"),
    raw("compressed twice", 415, GOOD, Content_Encoding="gzip, gzip"),
    raw("a compression nobody knows", 415, GOOD, Content_Encoding="pony"),
    raw("too large", 413, b'{"messages": "' + b"x" * (1 << 20) + b'"}'),
    raw("an odd expectation", 417, GOOD, Expect="pony"),
    raw("a negative length", 400, GOOD, Content_Length="-1"),
    raw("a length that is no number", 400, GOOD, Content_Length="many"),
    raw("length and chunks", 400, GOOD, Transfer_Encoding="chunked"),
    # Fields out of range.
    chat("no choices", 400, n=0),
    chat("a million choices", 400, n=1_000_000),
    chat("a fraction of a choice", 400, n=1.5),
    chat("a boolean number", 400, n=True),
    chat("negative tokens", 400, max_tokens=-1),
    chat("more tokens than 32 bits", 400, max_tokens=2**40),
    chat("more tokens than the context", 400, max_tokens=1_000_000),
    chat("too hot", 400, temperature=3),
    chat("below zero", 400, temperature=-0.1),
    chat("top_p above 1", 400, top_p=2),
    chat("top_k below -1", 400, top_k=-2),
    chat("penalty 0", 400, repetition_penalty=0),
    chat("an empty stop string", 400, stop=""),
    chat("an empty stop string in a list", 400, stop=["a", ""]),
    chat("a stop that is no text", 400, stop=[1]),
    chat("many stop strings", 400, stop=["a"] * 1000),
    chat("a stop id below zero", 400, stop_token_ids=[-1]),
    chat("a stop id outside the vocabulary", 400, stop_token_ids=[10**6]),
    chat("a bias for no id", 400, logit_bias={"x": 1}),
    chat("a bias outside the vocabulary", 400, logit_bias={"99999999": 1}),
    chat("a bias below zero", 400, logit_bias={"-1": 1}),
    chat("a bias too strong", 400, logit_bias={"1": 101}),
    chat("a seed of 100 bits", 400, seed=2**100),
    chat("top_logprobs above the bound", 400, logprobs=True, top_logprobs=21),
    chat("top_logprobs alone", 400, top_logprobs=3),
    chat("a priority out of range", 400, priority=10**9),
    chat("bad while streaming", 400, stream=True, n=0),
    chat("stream as text", 400, stream="yes"),
    # Messages.
    chat("no messages", 400, messages=[]),
    chat("messages as text", 400, messages="Hello"),
    chat("no role", 400, messages=[{"content": "a"}]),
    chat("content as number", 400, messages=[{"role": "user", "content": 5}]),
    chat("content null", 400, messages=[{"role": "user", "content": None}]),
    chat("an empty role", 400, messages=[{"role": "", "content": "a"}]),
    chat(
        "an image by URL is not fetched",
        400,
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
            }
        ],
    ),
    chat("a part without a type", 400, messages=[{"role": "user", "content": [{"text": "a"}]}]),
    chat("a template of the client's", 400, chat_template="{{ cycler.__init__.__globals__ }}"),
    chat("a message far over the context", 400, messages=[{"role": "user", "content": "ab " * 9000}]),
    # Prompts.
    text("an empty list", 400, prompt=[]),
    text("a mixture", 400, prompt=["a", 1]),
    text("an id below zero", 400, prompt=[-1]),
    text("an id outside the vocabulary", 400, prompt=[999_999]),
    text("an id of 64 bits", 400, prompt=[2**64]),
    text("null", 400, prompt=None),
    text("a nested mixture", 400, prompt=[[1, 2], "a"]),
    text("an object", 400, prompt={"a": 1}),
    # Models and paths.
    chat("another model", 404, model="gpt-4"),
    chat("a model that is a path", 404, model="../../etc/passwd"),
    at("no such path", 404, "GET", "/v1/nothing"),
    at("no such model", 404, "GET", "/v1/models/none/such"),
    at("up the tree", 404, "GET", "/v1/../../etc/passwd"),
    at("a NUL in the path", 404, "GET", "/v1/models/%00"),
    at("a path of 7,000 bytes", 404, "GET", "/" + "a" * 7000),
    at("a path of 9,000 bytes", 400, "GET", "/" + "a" * 9000),
    at("invalid UTF-8 in the path", 404, "GET", "/%ff%fe"),
    at("the wrong method", 405, "GET", CHAT),
    at("deleting", 405, "DELETE", "/v1/models"),
    at("an invented method", 405, "PURGE", CHAT),
    at("TRACE", 405, "TRACE", "/health"),
    at("a probe with a body", 200, "GET", "/health", b"{}"),
    at("HEAD", 200, "HEAD", "/health"),
    # Tokenizing.
    at("tokenize nothing", 400, "POST", "/tokenize", b"{}"),
    at("detokenize an id below zero", 400, "POST", "/detokenize", b'{"tokens": [-1]}'),
    at("detokenize an unknown id", 400, "POST", "/detokenize", b'{"tokens": [4294967295]}'),
    at("detokenize text", 400, "POST", "/detokenize", b'{"tokens": ["a"]}'),
]  # fmt: skip


def test_there_are_many_cases_and_each_is_named_once() -> None:
    names = [(case[3], case[0]) for case in CASES]
    assert len(names) == len(set(names))
    assert len(names) >= 60


def test_each_hostile_request_gets_its_status_and_the_next_request_works() -> None:
    async def torture() -> list[tuple[Case, Answer]]:
        async with serve(max_body=1 << 20) as served:
            port = int(served.url.rsplit(":", 1)[1])
            answers = []
            for case in CASES:
                _, _, method, path, body, headers = case
                answers.append((case, await call(port, method, path, body, headers)))
            status, body = await served.post(CHAT, {"messages": USER})
            assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello world")
            assert served.executor.running == 0
            return answers

    wrong = []
    for (name, status, method, path, *_), answer in run(torture()):
        if answer.status != status:
            wrong.append(f"{path} {name}: {answer.status}, not {status}: {answer.body[:200]!r}")
        elif status >= 400 and method != "HEAD":
            assert answer.error["type"] == "invalid_request_error", name
        assert answer.headers.get("x-request-id"), name
    assert not wrong, "\n".join(wrong)


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("between", [b"", b"\r\n\r\n"])
def test_pipelined_requests_are_answered_in_order(between: bytes) -> None:
    async def pipeline() -> bytes:
        async with serve() as served:
            return await exchange(int(served.url.rsplit(":", 1)[1]), HEALTH + between + MODELS)

    first, second = run(pipeline()).split(b"HTTP/1.1 200 OK")[1:]
    assert b'"ok"' in first
    assert b'"object":"list"' in second


def test_a_refused_body_cannot_smuggle_a_second_request() -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"

    async def smuggle() -> bytes:
        async with serve() as served:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\n"
            head += f"Content-Length: {len(inner)}\r\n\r\n"
            after = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            sent = head.encode() + inner + after
            return await exchange(int(served.url.rsplit(":", 1)[1]), sent)

    answers = run(smuggle())
    assert parse(answers).status == 415
    assert b'"object":"list"' not in answers
    assert answers.count(b"HTTP/1.1 ") == 2
