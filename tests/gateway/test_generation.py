"""What a request leaves in the metrics, and what many clients that do not read cost."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import sse
from gateway.engine import ENGINE
from gateway.limits import ADMISSION
from tests.fake_executor import Script, byte_level_tokenizer
from tests.gateway.serving import Served, run, serve, until
from wire.errors import Code, Refused
from wire.generate import Submit

TEXT: dict[str, Any] = {"prompt": "Hi"}
URL = "/v1/completions"
FOX = list(byte_level_tokenizer().encode("the fox ", add_special_tokens=False).ids)


async def _sample(served: Served, name: str) -> float:
    """The only sample of this name."""
    async with served.http.get(served.url + "/metrics") as response:
        text = await response.text()
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]
    assert len(values) == 1
    return values[0]


@pytest.mark.parametrize("stream", [True, False])
def test_the_time_an_executor_queued_a_request_reaches_the_histograms(stream: bool) -> None:
    def queued(submit: Submit) -> Script:
        return Script([FOX] * submit.n, delay=0.2, queued_ms=150)

    async def test() -> None:
        async with serve(queued) as served:
            await served.raw(URL, {**TEXT, "stream": stream, "n": 2})
            await until(lambda: served.app[ADMISSION].requests == 0)
            assert await _sample(served, "vllm:request_queue_time_seconds_count") == 1
            queue = await _sample(served, "vllm:request_queue_time_seconds_sum")
            assert queue == pytest.approx(0.15)
            first = await _sample(served, "vllm:time_to_first_token_seconds_sum")
            prefill = await _sample(served, "vllm:request_prefill_time_seconds_sum")
            assert prefill == pytest.approx(first - 0.15)
            whole = await _sample(served, "vllm:e2e_request_latency_seconds_sum")
            inference = await _sample(served, "vllm:request_inference_time_seconds_sum")
            assert inference == pytest.approx(whole - 0.15)

    run(test())


def test_a_request_that_never_ran_has_no_queue_time() -> None:
    def refuse(submit: Submit) -> Script:
        raise Refused(Code.OVERLOADED, "Too much.")

    async def test() -> None:
        async with serve(refuse) as served:
            status, _ = await served.post(URL, TEXT)
            assert status >= 400
            assert await _sample(served, "vllm:request_queue_time_seconds_count") == 0
            assert await _sample(served, "vllm:e2e_request_latency_seconds_count") == 1

    run(test())


def test_200_clients_that_do_not_read_their_streams_are_dropped_and_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "_SOCKET_BUFFER", 4096)  # so that less text does
    tokens = FOX * 5000

    def flood(submit: Submit) -> Script:
        if submit.sampling.seed == 7:
            return Script([FOX], "stop")
        return Script([tokens], "", step=500, delay=0.02)  # more than all buffers, and no end

    async def test() -> None:
        async with serve(flood, write_timeout=0.5) as served:
            host, port = served.url.removeprefix("http://").split(":")
            body = json.dumps({**TEXT, "stream": True})
            asked = (
                f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}"
            ).encode()
            memory = psutil.Process().memory_info().rss
            with contextlib.ExitStack() as clients:
                for _ in range(200):
                    client = clients.enter_context(socket.socket())
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    client.connect((host, int(port)))
                    client.sendall(asked)
                await until(lambda: len(served.executor.submits) == 200, 10)
                friend = await served.post(URL, {**TEXT, "seed": 7})
                assert friend[0] == 200
                assert friend[1]["choices"][0]["text"] == "the fox "
                await until(lambda: len(served.executor.aborts) == 200, 20)
                most = psutil.Process().memory_info().rss - memory
                # 200 times what may wait for one: 16 KiB and an event, with their copies.
                assert most < 100 << 20, f"{most >> 20} MiB more"
            assert served.executor.running == 0
            assert served.app[ADMISSION].requests == 0
            assert served.app[ENGINE].in_progress == 0
            assert (await served.post(URL, {**TEXT, "seed": 7}))[0] == 200

    run(test())
