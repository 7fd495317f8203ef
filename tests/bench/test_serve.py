from __future__ import annotations

import asyncio
import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load import chat, datasets, report, versus, workloads
from bench.load.client import Client, EventSplitter, Request, ServerProblem
from bench.load.datasets import Arrival, DataProblem
from bench.load.loops import as_traced, closed_loop, open_loop, poisson
from bench.load.plan import vocabulary_of
from bench.load.records import Record, Slo, percentile, summarise
from bench.load.workloads import Fit, Vocabulary
from bench.serve import main
from tests.bench.sse_server import (
    DONE,
    Server,
    breaks,
    hangs,
    serve,
    text,
    usage,
    writes,
)
from tests.fake_executor import Script, byte_level_tokenizer
from tests.gateway import serving

T = TypeVar("T")
VOCABULARY = Vocabulary(400, 10)


def run(test: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await test

    return asyncio.run(bounded())


def record(*arrivals: float, tokens: int = 0, prompt: int = 0, label: str = "") -> Record:
    return Record(
        0.0,
        tokens or len(arrivals),
        label,
        list(arrivals),
        ended=arrivals[-1],
        prompt_tokens=prompt,
        output_tokens=tokens or len(arrivals),
    )


# ---------------------------------------------------------------- figures


def test_a_percentile_lies_between_its_neighbours_in_proportion() -> None:
    assert percentile([1.0, 2.0, 3.0, 5.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 5.0], 90) == pytest.approx(4.4)
    assert percentile([7.0], 99) == 7.0


def test_a_requests_figures_follow_from_its_instants() -> None:
    one = Record(10.0, 5, arrivals=[10.5, 11.0, 11.0, 12.5], ended=12.6, output_tokens=5)
    assert one.ttft == 0.5
    assert one.latency == 2.5
    assert one.gaps() == [0.5, 0.0, 1.5]
    assert one.tpot == 0.5  # two seconds for the four tokens after the first
    assert one.normalised == 0.5


def test_a_runs_figures_count_what_ended_well_over_the_whole_time() -> None:
    failed = Record(0.0, 8, ended=4.0, error="http 429", message="slow down")
    short = record(1.0, 2.0, tokens=2, prompt=30)
    short.wanted = 3
    summary = summarise([record(0.5, 1.5, 2.5, prompt=10), short, failed])
    assert (summary.requests, summary.completed, summary.short) == (3, 2, 1)
    assert summary.errors == {"http 429": 1}
    assert summary.examples == {"http 429": "slow down"}
    assert summary.seconds == 4.0
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1.25
    assert summary.total_tokens_per_s == 11.25
    assert (summary.ttft.mean, summary.ttft.p50) == (750.0, 750.0)
    assert summary.itl.mean == 1000.0
    assert summary.normalised.mean == pytest.approx((2500 / 3 + 1000) / 2)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft=500.0, tpot=1000.0), True),
        (Slo(ttft=499.0), False),
        (Slo(tpot=999.0), False),
    ],
)
def test_a_request_is_good_when_it_keeps_each_bound(slo: Slo, kept: bool) -> None:
    assert slo.kept(record(0.5, 1.5, 2.5)) is kept


def test_one_token_cannot_miss_the_bound_on_further_tokens() -> None:
    assert Slo(tpot=1.0).kept(record(0.5))
    assert math.isnan(summarise([record(0.5)]).tpot.mean)


def test_requests_are_grouped_by_label_in_the_order_of_turns() -> None:
    labels = ["turn 10", "turn 9", "cold"]
    groups = summarise([record(1.0, prompt=4, label=label) for label in labels]).groups
    assert list(groups) == ["cold", "turn 9", "turn 10"]
    assert groups["turn 9"].prompt_tokens == 4
    assert groups["turn 9"].ttft.mean == 1000.0


def test_two_servers_are_compared_round_by_round() -> None:
    first = [{"requests/s": 2.0, "TTFT ms": 1.0}, {"requests/s": 9.0, "TTFT ms": 4.0},
             {"requests/s": 4.0, "TTFT ms": 2.0}]  # fmt: skip
    second = [{"requests/s": 1.0, "TTFT ms": 2.0}, {"requests/s": 3.0, "TTFT ms": 4.0},
              {"requests/s": 4.0, "TTFT ms": 0.0}]  # fmt: skip
    rate, ttft = versus.compare(first, second)
    assert (rate.better, rate.ratio, rate.least, rate.most) == ("higher", 2.0, 1.0, 3.0)
    # A round with nothing to divide by has no ratio.
    assert (ttft.better, ttft.ratio, ttft.least, ttft.most) == ("lower", 0.75, 0.5, 1.0)
    assert "2.00     (1.00 - 3.00)   higher" in versus.table([rate, ttft], ("a", "b"))


# ---------------------------------------------------------------- workloads


def test_the_same_seed_asks_the_same_and_another_asks_something_else() -> None:
    def drawn(seed: int) -> list[Request]:
        return list(itertools.islice(workloads.fixed(VOCABULARY, 20, 7, seed), 3))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    for request in drawn(1):
        assert (len(request.prompt), request.output) == (20, 7)
        assert all(10 <= int(token) < 400 for token in request.prompt)


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    def drawn(share: bool) -> tuple[Any, Any]:
        source = workloads.shared_prefix(VOCABULARY, 50, 20, 7, 1, share=share)
        return next(source).prompt, next(source).prompt

    first, second = drawn(True)
    assert (len(first), len(second)) == (70, 70)
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    first, second = drawn(False)
    assert (len(first), len(second)) == (70, 70)
    assert first[:16] != second[:16]


def test_prompts_of_a_trace_share_as_many_tokens_as_they_share_blocks() -> None:
    trace = [Arrival(0, 1300, 100, (0, 1, 2)), Arrival(1, 1536, 50, (0, 1, 3)), Arrival(2, 9, 9)]
    first, second, third = workloads.traced(VOCABULARY, trace, Fit(scale=0.25), seed=1)
    assert [len(each.prompt) for each in (first, second, third)] == [325, 384, 2]
    assert [each.output for each in (first, second, third)] == [25, 12, 2]
    assert first.prompt[:256] == second.prompt[:256]
    assert first.prompt[256:272] != second.prompt[256:272]
    assert [each.at for each in (first, second, third)] == [0, 1, 2]
    other = next(workloads.traced(VOCABULARY, trace, Fit(scale=0.25), seed=2))
    assert other.prompt[:16] != first.prompt[:16]


def test_lengths_are_scaled_then_cut_to_the_bounds_and_the_context() -> None:
    assert Fit(0.5).lengths(100, 41) == (50, 20)
    assert Fit(0.5).lengths(1, 1) == (1, 1)
    assert Fit(max_input=30, max_output=10).lengths(100, 100) == (30, 10)
    assert Fit(context=100).lengths(90, 40) == (60, 40)
    assert Fit(context=100).lengths(90, 400) == (1, 99)


def test_sharegpts_questions_are_asked_with_the_recorded_answers_length() -> None:
    def words(count: int) -> str:
        return "w " * count

    talks = [
        [("human", words(5)), ("gpt", words(9)), ("human", words(400))],
        [("gpt", words(5)), ("human", words(9))],  # begins with an answer
        [("human", words(3)), ("gpt", words(9))],  # too short a question
        [("human", words(60)), ("gpt", words(41))],  # too long in all
        [("human", words(60)), ("gpt", words(40))],
    ]

    def encode(text: str) -> list[int]:
        return [1] * len(text.split())

    requests = list(workloads.conversations(talks, encode, Fit(context=100), seed=1))
    assert sorted((len(each.prompt), each.output) for each in requests) == [(5, 9), (60, 40)]


def test_a_dialogue_and_its_cold_twin_begin_differently_at_equal_length() -> None:
    dialogue = next(chat.random_dialogues([6, 3], seed=1))
    assert [len(question.split()) for question in dialogue.questions] == [6, 3]
    first, other = str(dialogue.number), str(dialogue.other)
    assert len(first) == len(other) == 6
    assert first[0] != other[0]


def test_recorded_dialogues_have_as_many_turns_as_asked_for_and_fit() -> None:
    talks = [[("human", "a"), ("gpt", "b"), ("human", "c")], [("human", "a")],
             [("human", "long"), ("human", "d")]]  # fmt: skip
    found = chat.recorded_dialogues(talks, 2, 1, lambda questions: "long" not in questions)
    assert [dialogue.questions for dialogue in found] == [["a", "c"]]


def test_a_traces_own_arrivals_begin_at_once_and_can_be_sped_up() -> None:
    requests = [Request(1, at=at) for at in (10.0, 12.0, 15.0)]
    assert as_traced(requests, 2.0) == [0.0, 1.0, 2.5]


def test_a_trace_can_be_cut_to_its_first_seconds() -> None:
    requests = (Request(1, at=at) for at in (10.0, 12.0, 12.5, 15.0))
    assert [request.at for request in workloads.within(requests, 2.0)] == [10.0, 12.0]


def test_poisson_arrivals_come_at_the_rate_on_average() -> None:
    arrivals = list(itertools.islice(poisson(4.0, random.Random(1)), 4000))
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(1000, rel=0.05)


# ---------------------------------------------------------------- data sets


def test_azures_trace_is_read_with_its_seven_digits(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:16:47.1805901,396,109\n"
    )
    first, second = datasets.azure(path)
    assert (first.at, first.inputs, first.outputs) == (0.0, 374, 44)
    assert second.at == pytest.approx(60.5000001, abs=1e-6)


def test_mooncakes_trace_is_read_from_gzip(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl.gz"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
    path.write_bytes(gzip.compress((line % 2000 + line % 3500).encode()))
    assert datasets.mooncake(path) == [
        Arrival(0.0, 600, 5, (0, 7)), Arrival(1.5, 600, 5, (0, 7)),
    ]  # fmt: skip


def test_sharegpts_file_may_be_cut_off_anywhere(tmp_path: Path) -> None:
    records = [
        {"id": "1", "conversations": [{"from": "human", "value": 'say "[]"'}, {"from": "gpt"}]},
        {"id": "2", "conversations": []},
    ]
    whole = json.dumps(records, indent=1)
    path = tmp_path / "sharegpt.json"
    first = whole.index('"id": "2"') - len('{\n  "')
    for end in range(first, len(whole) + 1):
        path.write_text(whole[:end])
        talks = list(datasets.sharegpt(path))
        assert talks[0] == [("human", 'say "[]"'), ("gpt", "")]
        assert len(talks) == (2 if whole[:end].rstrip().endswith(("}\n]", "]\n }")) else 1)


@pytest.mark.parametrize("read", [datasets.azure, datasets.mooncake, datasets.sharegpt])
def test_a_file_that_is_not_the_data_set_is_named_with_what_is_expected(
    read: Any, tmp_path: Path
) -> None:
    path = tmp_path / "other.txt"
    for content in (None, "hello\nworld\n", '{"a": 1}\n'):
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataProblem, match=r"other\.txt cannot be read as"):
            list(read(path))


# ---------------------------------------------------------------- the client

STREAM = b'data: {"a":1}\n\n: comment\n\ndata: {"b":"\\n\\n"}\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans())
def test_events_are_whole_however_their_bytes_arrive(cuts: list[int], crlf: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if crlf else STREAM
    edges = sorted({0, len(stream), *cuts})
    splitter = EventSplitter()
    events = [event for a, b in itertools.pairwise(edges) for event in splitter.feed(stream[a:b])]
    assert events == STREAM.split(b"\n\n")[:-1]


async def ask(server: Server, request: Request | None = None, **settings: Any) -> Record:
    async with Client(server.url, "fake", **settings) as client:
        return await client.send(request or Request(4, [1, 2, 3]))


def test_tokens_are_counted_by_usage_and_times_by_events() -> None:
    async def test() -> None:
        async with serve() as server:
            server.answer = writes(text(), text(), text(), usage(3, 4, cached=2), DONE)
            ticks = itertools.count()
            record = await ask(server, clock=lambda: float(next(ticks)))
        assert record.ok
        assert len(record.arrivals) == 3
        assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (3, 2, 4)
        assert record.sent < record.arrivals[0] <= record.arrivals[-1] < record.ended
        assert server.bodies == [
            {
                "model": "fake",
                "prompt": [1, 2, 3],
                "max_tokens": 4,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]

    run(test())


def test_events_are_counted_where_a_server_sends_no_usage() -> None:
    async def test() -> None:
        async with serve() as server:
            server.answer = writes(b": hello\n\n", text(), b": hello\n" + text(), b"\n\n", DONE)
            record = await ask(server)
        assert record.ok
        assert record.output_tokens == 2

    run(test())


def test_in_a_chat_the_role_alone_is_no_output() -> None:
    async def test() -> None:
        async with serve() as server:
            request = Request(3, messages=[{"role": "user", "content": "one two"}])
            record = await ask(server, request)
        assert record.ok
        assert len(record.arrivals) == 3
        assert record.text == "word word word "
        assert record.prompt_tokens == 2

    run(test())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (writes(text(), b'data: {"error":{"message":"out of memory"}}\n\n'), "error event",
         "out of memory"),
        (writes(text(), b'data: {"choices":[{"text":"a\n\n', DONE), "broken event", "choices"),
        (writes(text(), b"data: hello\n\n", DONE), "broken event", "hello"),
        (writes(text(), usage(3, 1)), "cut off", "DONE"),
        (writes(usage(3, 0), DONE), "no output", "without an event"),
        (breaks, "disconnected", ""),
        (hangs, "timeout", "0.2 s without a byte"),
    ],
)  # fmt: skip
def test_a_stream_that_fails_is_an_error_of_its_kind(answer: Any, kind: str, message: str) -> None:
    async def test() -> None:
        async with serve() as server:
            server.answer = answer
            record = await ask(server, timeout=0.2)
        assert record.error == kind
        assert message in record.message
        assert record.ended > record.sent

    run(test())


def test_a_refusal_is_an_error_with_its_status_and_reason() -> None:
    async def test() -> None:
        async with serve() as server:
            server.status = 429
            record = await ask(server)
        assert (record.error, record.message) == ("http 429", "slow down")
        gone = await ask(server)
        assert gone.error == "no connection"

    run(test())


@pytest.mark.parametrize(
    ("status", "model", "message"),
    [
        (200, "other", r"no model 'other'; it has \['fake'\]"),
        (401, "", "wants a key"),
        (503, "", "answered 503"),
    ],
)
def test_a_server_that_cannot_be_measured_is_said_to_be(
    status: int, model: str, message: str
) -> None:
    async def test() -> None:
        async with serve() as server:
            server.models_status = status
            async with Client(server.url + "/v1/", model) as client:
                with pytest.raises(ServerProblem, match=message):
                    await client.connect()

    run(test())


def test_nobody_at_the_address_is_said_to_be_nobody() -> None:
    async def test() -> None:
        async with serve() as server:
            pass
        async with Client(server.url) as client:
            with pytest.raises(ServerProblem, match="no server answers"):
                await client.connect()

    run(test())


def test_a_closed_loop_has_so_many_requests_in_flight_and_sends_all() -> None:
    async def test() -> None:
        async with serve() as server, Client(server.url, "fake") as client:
            requests = itertools.islice(workloads.fixed(VOCABULARY, 5, 6, 1), 20)
            records = await closed_loop(client, requests, 3)
        assert server.most == 3
        assert len(server.bodies) == len(records) == 20
        assert all(record.ok and record.output_tokens == 6 for record in records)

    run(test())


def test_an_open_loop_waits_for_no_answer_before_the_next_request() -> None:
    async def test() -> None:
        async with serve() as server, Client(server.url, "fake", timeout=0.3) as client:
            server.answer = hangs
            requests = itertools.islice(workloads.fixed(VOCABULARY, 5, 6, 1), 5)
            records = await open_loop(client, requests, itertools.repeat(0.0))
        assert server.most == 5
        assert [record.error for record in records] == ["timeout"] * 5

    run(test())


def test_a_chat_sends_the_history_and_then_asks_the_last_turn_without_a_cache() -> None:
    async def test() -> None:
        async with serve() as server, Client(server.url, "fake") as client:
            dialogues = [chat.Dialogue(["one two", "three"], 123456, 654321)]
            records = await chat.converse(client, dialogues, 1, 2, 0.0, random.Random(1))
        history = [
            {"role": "user", "content": "123456. one two"},
            {"role": "assistant", "content": "word word "},
            {"role": "user", "content": "three"},
        ]
        cold = [{"role": "user", "content": "654321. one two"}, *history[1:]]
        assert [body["messages"] for body in server.bodies] == [history[:1], history, cold]
        assert [record.label for record in records] == ["turn 1", "turn 2", "cold"]
        assert [record.prompt_tokens for record in records] == [3, 6, 6]

    run(test())


# ---------------------------------------------------------------- the whole


def measured(*arguments: str, answer: Any = None, status: int = 200) -> tuple[int, Server]:
    """Run the program against a fake server."""

    async def test() -> tuple[int, Server]:
        async with serve() as server:
            server.status = status
            if answer:
                server.answer = answer
            argv = [argument.replace("URL", server.url) for argument in arguments]
            return await asyncio.to_thread(main, ["--url", server.url, *argv]), server

    return run(test())


def test_it_writes_figures_and_one_row_a_request(tmp_path: Path) -> None:
    figures, rows = tmp_path / "out.json", tmp_path / "out.csv"
    status, server = measured(
        "--requests", "6", "--concurrency", "2", "--warmup", "3", "--input", "9", "--output", "5",
        "--json", str(figures), "--csv", str(rows), "--api-key", "secret",
    )  # fmt: skip
    assert status == 0
    assert len(server.bodies) == 9
    told = json.loads(figures.read_text())
    [measured_once] = told["servers"][0]["rounds"]
    assert (measured_once["completed"], measured_once["output_tokens"]) == (6, 30)
    assert measured_once["prompt_tokens"] == 54
    assert "secret" not in figures.read_text()
    with rows.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["output_tokens"] for row in read] == ["5"] * 6


def test_it_asks_two_servers_the_same_in_turns(tmp_path: Path) -> None:
    async def test() -> None:
        order: list[str] = []
        async with serve() as first, serve() as second:
            for name, server in (("A", first), ("B", second)):

                async def answer(
                    response: Any,
                    body: dict[str, Any],
                    name: str = name,
                    whole: Any = server.answer,
                ) -> None:
                    order.append(name)
                    await whole(response, body)

                server.answer = answer
            status = await asyncio.to_thread(
                main,
                ["--url", first.url, "--versus", second.url, "--alternations", "2", "--warmup", "0",
                 "--requests", "2", "--concurrency", "1", "--output", "3",
                 "--json", str(tmp_path / "out.json")],
            )  # fmt: skip
        assert status == 0
        assert order == list("AABBAABB")
        assert first.bodies == second.bodies
        prompts = [body["prompt"] for body in first.bodies]
        assert len({tuple(prompt) for prompt in prompts}) == 4  # a new round asks something new
        compared = json.loads((tmp_path / "out.json").read_text())["comparison"]
        rate = next(each for each in compared if each["name"] == "requests/s")
        ratios = [a / b for a, b in zip(rate["first"], rate["second"], strict=True)]
        assert rate["least"] == pytest.approx(min(ratios))
        assert rate["most"] == pytest.approx(max(ratios))

    run(test())


def test_sharegpts_texts_go_through_the_servers_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "a bb ccc dddd"}, {"from": "gpt", "value": "e e e e e"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    status, server = measured(
        "--workload", "sharegpt", "--data", str(path), "--requests", "1", "--warmup", "0"
    )
    assert status == 0
    assert server.bodies[0]["prompt"] == [1, 2, 3, 4]
    assert server.bodies[0]["max_tokens"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "azure"], "--workload azure needs --data FILE"),
        (["--workload", "azure", "--data", "/nowhere"], "/nowhere cannot be read"),
        (["--model", "other"], "no model 'other'"),
        (["--url", "http://127.0.0.1:1"], "no server answers"),
    ],
)
def test_what_cannot_be_measured_ends_with_one_line_that_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, server = measured(*arguments)
    assert status == 1
    assert not server.bodies
    [line] = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("bench.serve: ")
    assert message in line


def test_a_server_that_refuses_all_warm_up_is_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, server = measured("--warmup", "2", "--requests", "50", status=429)
    assert status == 1
    assert len(server.bodies) == 2
    assert "all 2 warm-up requests" in capsys.readouterr().err


def test_failed_requests_are_counted_by_kind_and_told_by_the_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = measured("--warmup", "0", "--requests", "3", status=429)
    assert status == 1
    assert "failed: 3 x http 429: slow down" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "2", "--concurrency", "3"],
        ["--speedup", "2"],
        ["--workload", "chat", "--rate", "2"],
        ["--share", "both"],
        ["--requests", "0"],
        ["--workload", "sharegpt", "--data", "x.json", "--seconds", "9"],
        ["--body", "[]"],
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2


def test_plots_are_drawn_even_where_all_failed(tmp_path: Path) -> None:
    failed = Record(0.0, 8, ended=4.0, error="http 429")
    report.plot(tmp_path / "out.png", {"a": [record(0.5, 1.5), record(0.2)], "b": [failed]})
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_gateway_is_measured_without_an_error() -> None:
    said = byte_level_tokenizer().encode("Hello world", add_special_tokens=False).ids

    async def test() -> None:
        async with (
            serving.serve(lambda submit: Script([said])) as served,
            Client(served.url) as client,
        ):
            await client.connect()
            assert (client.model, client.max_model_len) == ("org/fake-model", 2048)
            source = workloads.fixed(await vocabulary_of([client], None), 40, len(said), 1)
            records = await closed_loop(client, itertools.islice(source, 30), 10)
            talk = Request(len(said), messages=[{"role": "user", "content": "Hello"}])
            spoken = await client.send(talk)
        summary = summarise(records)
        assert summary.errors == {}
        assert (summary.completed, summary.short) == (30, 0)
        assert (summary.prompt_tokens, summary.output_tokens) == (1200, 30 * len(said))
        assert spoken.ok
        assert spoken.text == "Hello world"

    run(test())
