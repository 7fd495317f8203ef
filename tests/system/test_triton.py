"""The real processes with Triton's kernels, in its interpreter: the same text as with plain torch."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.system.stack import Stack
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.system


def stream(url: str) -> list[str]:
    """The pieces of a greedy completion, as they arrive."""
    body = {"model": "tiny", "prompt": "Pages", "max_tokens": 5, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [
            line[6:] for line in answer.read().decode().split("\n") if line.startswith("data")
        ]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


def test_a_stream_from_tritons_kernels_is_that_of_plain_torch(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    texts = {}
    for kernels in ("triton", "torch"):
        options = {"kernels": kernels, "dtype": "float32", "num-blocks": "20"}
        stack = Stack(model, executor=options)
        try:
            stack.up()
            texts[kernels] = "".join(stream(stack.url))
            log = stack.logs["executor"].read_text()
            assert ("kernels=triton" in log) == (kernels == "triton")
        finally:
            stack.down()
    assert texts["triton"] == texts["torch"] != ""
