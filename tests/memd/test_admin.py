"""Admin HTTP of real processes: one open on loopback, one behind a token."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request

from memd.admin import Admin
from memd.config import Config
from memd.metrics import registry
from memd.server import Server
from tests.memd.daemon import Answer, Daemon, Executor, running, stop
from tests.memd.driver import ME, Driver, memory, pack, spec
from wire.clock import PauseClock
from wire.memory import Admit, Commit, Fork, Goodbye, Granted, Register, Step
from wire.rpc import Limits, Router, ipc

TOKEN = "s3cret-of-the-operator"
GET_PATHS = [
    "/", "/health", "/ready", "/metrics", "/v1/state", "/v1/map", "/v1/blocks", "/v1/blocks/1",
    "/v1/sequences", "/v1/sequences/1",
]  # fmt: skip
OPEN = {"/health", "/ready"}
PROTECTED = [path for path in GET_PATHS if path not in OPEN]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Holds one pool: sequence 1 (10 tokens) and its fork 2 over blocks of 4, kept alive by a thread."""
    with (
        running(
            tmp_path_factory.mktemp("open") / "r", "--lease-ms", "600000", "--allowed-hosts", "memd"
        ) as daemon,
        daemon.executor() as executor,
    ):
        got = executor.register(Register((1, 0), ME, spec(num_blocks=21)))
        identity = (ME, got.generation, got.epoch)
        executor.ask(Step(*identity, 1, admits=[Admit(1, pack(range(10)), 10, "acme")]))
        last = executor.ask(
            Step(*identity, 2, commits=[Commit(1, 10)], forks=[Fork(1, 2, 10)], frees=[])
        )
        assert isinstance(last, Granted)
        yield daemon


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(
        tmp_path_factory.mktemp("guarded") / "r", "--admin-host", "0.0.0.0", MEMD_ADMIN_TOKEN=TOKEN
    ) as daemon:
        yield Daemon(daemon.process, daemon.run_dir, "127.0.0.1", daemon.port)


def error(answer: Answer) -> tuple[int, str]:
    assert set(answer.json) == {"error"}
    assert answer.json["error"]["message"]
    assert answer.headers["Content-Type"].startswith("application/json")
    return answer.status, answer.json["error"]["code"]


# ------------------------------------------------------------ what is shown


def test_state_names_memd_and_every_pool_with_blocks_that_sum_up(daemon: Daemon) -> None:
    state = daemon.get("/v1/state").json
    assert re.fullmatch("[0-9a-f]{32}", state["boot_id"])
    assert state["epoch"] == 1
    (pool,) = state["pools"]
    assert (pool["name"], pool["block_size"], pool["total"], pool["sequences"]) == ("p", 4, 20, 2)
    assert pool["free"] + pool["cached"] + pool["used"] + pool["quarantined"] == pool["total"]
    assert pool["used"] == 3
    assert (pool["model"], pool["dtype"], pool["block_bytes"]) == ("model", "float32", 1024)
    assert (pool["instance"], pool["generation"], pool["step"]) == (ME, 1, 2)
    assert pool["slots_filled"] == pytest.approx(10 / 12)
    assert pool["sharing_saved"] == pytest.approx(1 - 3 / 6)
    assert 0 <= pool["lease_age_ms"] < 600_000
    assert pool["counters"]["steps"] == 2


def test_health_and_ready_answer_in_json(daemon: Daemon) -> None:
    assert daemon.get("/health").json == {"status": "ok"}
    assert daemon.get("/ready").json == {"status": "ready", "pools": 1}
    assert daemon.http("HEAD", "/ready").status == 200


def test_a_block_shows_who_holds_it(daemon: Daemon) -> None:
    page = daemon.get("/v1/blocks?state=used").json
    assert len(page["blocks"]) == 3
    assert all(row["refcount"] == 2 for row in page["blocks"])
    first = page["blocks"][0]["id"]
    block = daemon.get(f"/v1/blocks/{first}?pool=p").json
    assert block["holders"] == [{"seq": 1, "index": 0}, {"seq": 2, "index": 0}]
    assert (block["filled"], block["tenant"], block["sealed"]) == (4, "acme", True)
    assert daemon.get("/v1/blocks/0").json["state"] == "null"


def test_lists_are_paged(daemon: Daemon) -> None:
    page = daemon.get("/v1/blocks?limit=7&after=7").json
    assert [row["id"] for row in page["blocks"]] == list(range(8, 15))
    assert page["next"] == 14
    page = daemon.get("/v1/sequences?limit=1").json
    assert ([row["seq"] for row in page["sequences"]], page["next"]) == ([1], 1)
    page = daemon.get("/v1/sequences?limit=1&after=1").json
    assert ([row["seq"] for row in page["sequences"]], page["next"]) == ([2], None)


def test_a_sequence_shows_its_block_table(daemon: Daemon) -> None:
    sequence = daemon.get("/v1/sequences/2").json
    assert len(sequence["table"]) == 3
    assert sequence["shared"] == [0, 1, 2]
    assert (sequence["tokens"], sequence["computed"], sequence["kin"]) == (10, 10, [1])


def test_the_map_has_one_entry_per_cell_in_every_list(daemon: Daemon) -> None:
    cells = daemon.get("/v1/map?pool=p").json
    assert cells["total"] == 20
    for name in ("used", "cached", "quarantined", "refs"):
        assert len(cells[name]) == 20
    assert sum(cells["used"]) == 3000


def test_an_audit_checks_everything_and_says_what_it_took(daemon: Daemon) -> None:
    audit = daemon.http("POST", "/v1/audit")
    assert audit.status == 200
    assert audit.json["ok"] is True
    assert audit.json["checked"] == {"pools": 1, "blocks": 20, "sequences": 2}
    assert audit.json["micros"] >= 0
    assert audit.json["broken"] == []


def test_an_audit_that_finds_something_answers_500_with_what_is_broken(tmp_path: Path) -> None:
    driver = Driver()
    driver.admit(1, range(5))
    driver.pool.refs[driver.table(1)[0]] += 1
    with Router(ipc(tmp_path / "s"), Limits()) as router:
        server = Server(driver.memory, router, PauseClock(time.monotonic, 1.5), lambda: None)
        admin = Admin(server, Config())
        response = asyncio.run(admin.audit(make_mocked_request("POST", "/v1/audit")))
    assert response.status == 500
    assert isinstance(response.body, bytes)
    audit = json.loads(response.body)
    assert audit["ok"] is False
    assert f"block {driver.table(1)[0]}" in " ".join(audit["broken"])


def test_shares_of_nothing_are_listed_and_are_no_number(tmp_path: Path) -> None:
    driver = Driver()
    with Router(ipc(tmp_path / "s"), Limits()) as router:
        server = Server(driver.memory, router, PauseClock(time.monotonic, 1.5), lambda: None)
        found = {
            sample.name: sample.value
            for family in registry(server).collect()
            for sample in family.samples
        }
    assert math.isnan(found["memd_slots_filled_ratio"])
    assert math.isnan(found["memd_sharing_saved_ratio"])


def test_metrics_agree_with_the_state(daemon: Daemon) -> None:
    for name, value in (
        ('memd_blocks{pool="p",state="used"}', 3),
        ('memd_blocks{pool="p",state="free"}', 17),
        ('memd_sequences{pool="p"}', 2),
        ('memd_sharing_saved_ratio{pool="p"}', 0.5),
        ('memd_steps_total{pool="p"}', 2),
        ('memd_prefix_query_tokens_total{pool="p"}', 10),
        ('memd_step_seconds_bucket{le="+Inf"}', 2),
        ("memd_step_seconds_count", 2),
        ("memd_epoch", 1),
        ("memd_leases", 1),
        ("memd_bad_frames_total", 0),
    ):
        assert daemon.metric(name) == value, name


def test_metrics_are_offered_in_the_open_format_to_who_asks(daemon: Daemon) -> None:
    plain = daemon.get("/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain")
    assert b"# HELP memd_blocks Blocks by state" in plain.body
    asked = daemon.get("/metrics", Accept="application/openmetrics-text;version=1.0.0")
    assert asked.headers["Content-Type"].startswith("application/openmetrics-text")
    assert asked.body.endswith(b"# EOF\n")


def test_the_page_is_one_file_that_asks_nobody_else(daemon: Daemon) -> None:
    page = daemon.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    assert "/v1/map" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/state?pool=p", (400, "invalid_request")),
        ("/v1/map?pool=q", (404, "unknown_pool")),
        ("/v1/blocks?pool=q", (404, "unknown_pool")),
        ("/v1/blocks?state=lost", (400, "invalid_request")),
        ("/v1/blocks?limit=0", (400, "invalid_request")),
        ("/v1/blocks?limit=1001", (400, "invalid_request")),
        ("/v1/blocks?limit=1&limit=2", (400, "invalid_request")),
        ("/v1/blocks?limit=ten", (400, "invalid_request")),
        ("/v1/blocks?after=-1", (400, "invalid_request")),
        ("/v1/blocks?after=99999999999999999999", (400, "invalid_request")),
        ("/v1/blocks?lmit=1", (400, "invalid_request")),
        ("/v1/blocks/21", (404, "unknown_block")),
        ("/v1/blocks/-1", (400, "invalid_request")),
        ("/v1/blocks/1.5", (400, "invalid_request")),
        ("/v1/blocks/%C2%B2", (400, "invalid_request")),
        ("/v1/blocks/" + "9" * 17, (400, "invalid_request")),
        ("/v1/sequences/3", (404, "unknown_sequence")),
        ("/v1/sequences/x", (400, "invalid_request")),
        ("/v1", (404, "not_found")),
        ("/v1/state/", (404, "not_found")),
        ("//v1/state", (404, "not_found")),
        ("/page.html", (404, "not_found")),
        ("/../memd/config.py", (404, "not_found")),
    ],
)
def test_what_is_not_there_or_not_right_gets_a_status_a_code_and_a_sentence(
    daemon: Daemon, path: str, expected: tuple[int, str]
) -> None:
    assert error(daemon.get(path)) == expected


def test_an_unknown_pool_is_answered_with_the_names_there_are(daemon: Daemon) -> None:
    message = daemon.get("/v1/blocks?pool=q").json["error"]["message"]
    assert "'q'" in message
    assert "there are: p" in message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *itertools.product(["POST", "PUT", "PATCH", "DELETE", "OPTIONS"], GET_PATHS),
        *itertools.product(["GET", "HEAD", "PUT", "DELETE", "OPTIONS"], ["/v1/audit"]),
    ],
)
def test_methods_that_are_not_meant_are_refused_with_those_that_are(
    daemon: Daemon, method: str, path: str
) -> None:
    answer = daemon.http(method, path)
    assert answer.status == 405
    assert answer.headers["Allow"] == ("POST" if path == "/v1/audit" else "GET, HEAD")
    assert not [name for name in answer.headers if name.startswith("Access-Control")]


def test_no_pool_and_two_pools_are_told_apart(tmp_path: Path) -> None:
    with running(tmp_path / "r") as daemon, daemon.executor() as executor:
        assert error(daemon.get("/v1/blocks")) == (404, "unknown_pool")
        generations = [
            executor.register(Register((1, 0), ME, spec(name=name))).generation for name in "ab"
        ]
        assert error(daemon.get("/v1/blocks")) == (400, "invalid_request")
        assert daemon.get("/v1/blocks?pool=b").json["pool"] == "b"
        for generation in generations:
            executor.ask(Goodbye(ME, generation))


# ------------------------------------------------------------ who may ask


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1/evil",
        "localhost?x",
        "",
        "10.1.2.3:9100",
    ],
)
@pytest.mark.parametrize("path", [*GET_PATHS, "/v1/audit", "/nothing"])
def test_a_name_that_is_not_this_servers_is_refused_on_every_route(
    daemon: Daemon, path: str, host: str
) -> None:
    method = "POST" if path == "/v1/audit" else "GET"
    assert error(daemon.http(method, path, Host=host)) == (403, "forbidden_host")


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9100", "127.0.0.1", "[::1]:1", "memd:9100"]
)
def test_this_servers_names_are_answered(daemon: Daemon, host: str) -> None:
    assert daemon.get("/v1/state", Host=host).status == 200


def test_two_host_headers_or_none_are_refused(daemon: Daemon) -> None:
    for headers in (b"Host: localhost\r\nHost: localhost\r\n", b""):
        answer = daemon.raw(b"GET /v1/state HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n")
        assert answer.split()[1] in (b"400", b"403")
        assert b"boot_id" not in answer


def test_an_absolute_target_does_not_lead_around_the_host_check(daemon: Daemon) -> None:
    answer = daemon.raw(
        b"GET http://localhost/v1/state HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    )
    assert answer.split()[1] == b"403"


def test_another_sites_page_cannot_start_an_audit(daemon: Daemon) -> None:
    answer = daemon.http("POST", "/v1/audit", Origin="http://evil.example")
    assert error(answer) == (403, "forbidden_origin")
    own = f"http://127.0.0.1:{daemon.port}"
    assert daemon.http("POST", "/v1/audit", Origin=own).status == 200


WRONG = [
    "", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Bearer {TOKEN.upper()}", TOKEN,
    "Basic " + base64.b64encode(TOKEN.encode()).decode(), f"Token {TOKEN}", "Bearer null",
]  # fmt: skip


@pytest.mark.parametrize(
    "path", [*PROTECTED, "/nothing", "/v1/", "/health/", "//health", "/health%2f"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_without_the_token_nothing_is_told_not_even_what_exists(
    guarded: Daemon, method: str, path: str
) -> None:
    answer = guarded.http(method, path)
    assert error(answer) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("header", WRONG)
def test_a_wrong_token_is_no_token(guarded: Daemon, header: str) -> None:
    assert error(guarded.get("/v1/state", Authorization=header)) == (401, "unauthorized")
    assert error(guarded.http("POST", "/v1/audit", Authorization=header)) == (401, "unauthorized")


def test_the_token_opens_every_route(guarded: Daemon) -> None:
    basic = "Basic " + base64.b64encode(f"operator:{TOKEN}".encode()).decode()
    for header in (f"Bearer {TOKEN}", basic):
        for path in ("/", "/metrics", "/v1/state"):
            assert guarded.get(path, Authorization=header).status == 200
        assert guarded.http("POST", "/v1/audit", Authorization=header).status == 200


def test_supervisors_need_no_token_for_health_but_a_right_name(guarded: Daemon) -> None:
    for path in OPEN:
        assert guarded.get(path).status == 200
        assert error(guarded.get(path, Host="evil.example")) == (403, "forbidden_host")


def test_an_absolute_target_does_not_lead_around_the_token(guarded: Daemon) -> None:
    for target in (b"http://localhost/v1/state", b"/health/../v1/state", b"/health?/../v1/state"):
        answer = guarded.raw(
            b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert b"boot_id" not in answer


# ------------------------------------------------------------ bounds


def test_headers_and_lines_are_bounded(daemon: Daemon) -> None:
    assert daemon.get("/v1/state?" + "x" * 8000).status == 400
    assert daemon.get("/health", X_Large="x" * 8000).status == 400
    many = b"".join(b"X-%d: y\r\n" % index for index in range(200))
    answer = daemon.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
    assert answer.split()[1] == b"400"


def test_a_connection_that_never_finishes_its_request_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.admin.HEADER_SECONDS", 0.5)

    async def run() -> float:
        with Router(ipc(tmp_path / "s"), Limits()) as router:
            server = Server(memory(), router, PauseClock(time.monotonic, 1.5), lambda: None)
            admin = Admin(server, Config(admin_port=0))
            port = int((await admin.start()).rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            started = time.monotonic()
            writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 8)
            writer.close()
            await admin.stop()
            return time.monotonic() - started

    assert asyncio.run(run()) < 5


def test_requests_that_are_no_http_are_refused_without_a_line_in_the_log(tmp_path: Path) -> None:
    with running(tmp_path / "r") as daemon:
        assert daemon.raw(b"\0\xff rubbish\r\n\r\n").split()[1] == b"400"
        assert daemon.raw(b"GET / HTTP/9.9\r\n\r\n").split()[1] == b"400"
        log = stop(daemon.process)
    assert "Traceback" not in log
    assert "rubbish" not in log


def test_steps_are_answered_while_the_map_of_a_large_pool_is_drawn(tmp_path: Path) -> None:
    with running(tmp_path / "r") as daemon, daemon.executor() as executor:
        got = executor.register(Register((1, 0), ME, spec(num_blocks=1_000_001)))
        _grow(executor, got.generation, 60)
        done = threading.Event()

        def draw() -> None:
            while not done.is_set():
                assert len(daemon.get("/v1/map").json["used"]) > 4000

        painter = threading.Thread(target=draw)
        painter.start()
        waits = []
        for number in range(1000, 1200):
            started = time.perf_counter()
            executor.ask(Step(ME, got.generation, got.epoch, number))
            waits.append(time.perf_counter() - started)
        done.set()
        painter.join()
        waits.sort()
        assert waits[len(waits) // 2] < 0.05
        executor.ask(Goodbye(ME, got.generation))


def _grow(executor: Executor, generation: int, prompts: int) -> None:
    """Grant 15,000 blocks for each of some prompts; uses steps 1 to 999."""
    for number in range(1, 1000):
        admits = (
            [Admit(number, pack(range(number, number + 60_000)), 60_000)]
            if number <= prompts
            else []
        )
        reply = executor.ask(Step(ME, generation, 1, number, admits=admits))
        assert isinstance(reply, Granted)
