from __future__ import annotations

import asyncio
import contextlib
import os
import socket as unix
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from wire.rpc import (
    MAX_IPC_PATH,
    BadEndpoint,
    Dealer,
    Limits,
    PeerGone,
    PeerSlow,
    Router,
    ipc,
    private_directory,
    watch,
)

SMALL = Limits(max_message=1000, queue=4)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return ipc(tmp_path / "s")


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    with Router(endpoint, SMALL) as router:
        yield router


def connect(endpoint: str, limits: Limits = SMALL) -> Dealer:
    """A dealer that is through with its handshake."""
    dealer = Dealer(endpoint, limits)
    assert dealer.raw.poll(2000, zmq.POLLOUT)
    return dealer


def wait(found: Callable[[], object], seconds: float = 3) -> bool:
    limit = time.monotonic() + seconds
    while not found():
        if time.monotonic() > limit:
            return False
        time.sleep(0.005)
    return True


def take(router: Router) -> tuple[bytes, bytes]:
    assert router.poll(3000)
    return next(router.receive())


def test_a_message_arrives_whole_and_its_answer_returns_to_the_sender(
    router: Router, endpoint: str
) -> None:
    with connect(endpoint) as first, connect(endpoint) as second:
        first.send(b"from first")
        second.send(b"from second")
        for _ in range(2):
            peer, payload = take(router)
            router.send(peer, payload + b", answered")
        assert first.poll(3000)
        assert second.poll(3000)
        assert list(first.receive()) == [b"from first, answered"]
        assert list(second.receive()) == [b"from second, answered"]


def test_receive_returns_at_once_when_nothing_waits(router: Router, endpoint: str) -> None:
    with connect(endpoint) as dealer:
        started = time.monotonic()
        assert list(router.receive()) == []
        assert list(dealer.receive()) == []
        assert time.monotonic() - started < 0.1


def test_a_dealer_without_a_server_refuses_instead_of_queueing(endpoint: str) -> None:
    with Dealer(endpoint, SMALL) as dealer, pytest.raises(PeerGone):
        dealer.send(b"x")


def test_a_dealer_finds_a_server_that_starts_later_and_one_that_restarts(endpoint: str) -> None:
    with Dealer(endpoint, SMALL) as dealer:
        for payload in (b"first", b"second"):
            with Router(endpoint, SMALL) as router:

                def arrives(router: Router = router, payload: bytes = payload) -> bool:
                    # What goes into the old connection before its end is noticed is lost, as on any network.
                    with contextlib.suppress(PeerGone):
                        dealer.send(payload)
                    return router.poll(50) and next(router.receive())[1] == payload

                assert wait(arrives, 10)


def test_sending_to_a_peer_that_left_says_so(router: Router, endpoint: str) -> None:
    with connect(endpoint) as dealer:
        dealer.send(b"x")
        peer, _ = take(router)

    def gone() -> bool:
        try:
            router.send(peer, b"y")
        except PeerGone:
            return True
        return False

    assert wait(gone)


def test_sending_to_a_peer_that_never_was_says_so(router: Router) -> None:
    with pytest.raises(PeerGone):
        router.send(b"\0\1\2\3\4", b"y")


def test_a_peer_that_does_not_read_is_reported_slow_and_others_go_on(
    router: Router, endpoint: str
) -> None:
    with connect(endpoint) as slow, connect(endpoint) as quick:
        slow.send(b"x")
        peer, _ = take(router)
        with pytest.raises(PeerSlow):
            _flood(router, peer)
        quick.send(b"z")
        other, payload = take(router)
        router.send(other, payload)
        assert quick.poll(3000)


def test_a_message_over_the_limit_is_lost_and_the_next_one_passes(
    router: Router, endpoint: str
) -> None:
    with connect(endpoint, Limits(max_message=10_000)) as dealer, connect(endpoint) as other:
        dealer.send(b"x" * 1001)
        other.send(b"from another")
        assert take(router)[1] == b"from another"
        # libzmq closes the connection that broke the rule, with what was under way on it, and the
        # dealer makes a new one: whoever gets no answer sends again.
        assert wait(lambda: _try(dealer, b"x" * 1000) and router.poll(50))
        assert take(router)[1] == b"x" * 1000


def _flood(router: Router, peer: bytes) -> None:
    for _ in range(100_000):  # the system's socket buffers fill before the queue of four does
        router.send(peer, b"y" * 1000)


def _try(dealer: Dealer, payload: bytes) -> bool:
    try:
        dealer.send(payload)
    except PeerGone:
        return False
    return True


def _drained(router: Router) -> list[bytes]:
    """The payloads that come in until there is one, and what waits behind it."""
    received: list[bytes] = []

    def found() -> bool:
        received.extend(payload for _, payload in router.receive(8))
        return bool(received)

    assert wait(found)
    found()
    return received


def test_messages_of_many_parts_are_dropped_whole(router: Router, endpoint: str) -> None:
    with connect(endpoint) as dealer:
        dealer.raw.send_multipart([b"p"] * 1000)
        dealer.raw.send_multipart([b"", b"with a delimiter"])
        dealer.send(b"one part")
        assert _drained(router) == [b"one part"]


def test_a_wave_of_unshaped_messages_does_not_hide_the_good_one_behind_it(
    router: Router, endpoint: str
) -> None:
    with connect(endpoint, Limits(queue=4096)) as dealer:
        for _ in range(50):
            dealer.raw.send_multipart([b"a", b"b"])
        dealer.send(b"good")
        assert _drained(router) == [b"good"]


def test_half_a_handshake_holds_nobody_up_and_is_closed(endpoint: str, tmp_path: Path) -> None:
    hasty = Limits(max_message=1000, queue=4, handshake_ms=300)
    with Router(endpoint, hasty) as router:
        half = []
        for index in range(50):
            client = unix.socket(unix.AF_UNIX)
            client.connect(str(tmp_path / "s"))
            client.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f"[: index % 11])
            half.append(client)
        with connect(endpoint) as dealer:
            dealer.send(b"x")
            assert take(router)[1] == b"x"
        for client in half:
            client.settimeout(3)
            while client.recv(4096):  # its greeting, then the end
                pass
            client.close()


def test_noise_instead_of_a_handshake_harms_nobody(
    router: Router, endpoint: str, tmp_path: Path
) -> None:
    with unix.socket(unix.AF_UNIX) as client, connect(endpoint) as dealer:
        client.connect(str(tmp_path / "s"))
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        dealer.send(b"x")
        # libzmq takes some noise for frames of its first version: a payload is anything until decoded.
        assert wait(lambda: any(payload == b"x" for _, payload in router.receive()), 5)


def test_closing_does_not_wait_for_unsent_messages(endpoint: str) -> None:
    with Router(endpoint, Limits()) as router:
        dealer = connect(endpoint, Limits())
        for _ in range(200):
            dealer.send(b"x" * 100_000)
        started = time.monotonic()
        dealer.close()
        assert time.monotonic() - started < 1
        assert not router.closed


def test_a_router_leaves_no_socket_file(endpoint: str, tmp_path: Path) -> None:
    with Router(endpoint, SMALL):
        assert (tmp_path / "s").is_socket()
    assert not (tmp_path / "s").exists()


def test_a_router_that_closes_late_leaves_its_successors_socket_file(
    endpoint: str, tmp_path: Path
) -> None:
    old = Router(endpoint, SMALL)
    with Router(endpoint, SMALL) as router:
        old.close()
        assert (tmp_path / "s").is_socket()
        with connect(endpoint) as dealer:
            dealer.send(b"x")
            assert take(router)[1] == b"x"


def test_watch_drains_every_message_of_a_burst(endpoint: str) -> None:
    """Bursts longer than one drain, answers sent inside it: no edge is lost, nothing waits for a timer."""
    count = 3000

    async def serve(router: Router) -> list[float]:
        delays: list[float] = []
        done = asyncio.Event()

        def drain() -> None:
            for peer, payload in router.receive(most=7):
                delays.append(time.monotonic() - float(payload))
                router.send(peer, payload)
            if len(delays) == count:
                done.set()

        stop = watch(asyncio.get_running_loop(), router, drain, every=30)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 20)
        stop()
        return delays

    def ask() -> None:
        """Keep 500 messages under way."""
        limit = time.monotonic() + 20
        with connect(endpoint, Limits()) as dealer:
            sent = received = 0
            while received < count and time.monotonic() < limit:
                while sent < count and sent - received < 500:
                    dealer.send(repr(time.monotonic()).encode())
                    sent += 1
                dealer.poll(100)
                received += len(list(dealer.receive()))

    with Router(endpoint, Limits()) as router:
        client = threading.Thread(target=ask)
        client.start()
        delays = asyncio.run(serve(router))
        client.join(10)
    assert len(delays) == count
    assert max(delays) < 10  # the timer is at 30 s: no message waited for it


def test_watch_stops_when_told_and_survives_a_closed_socket(endpoint: str) -> None:
    calls: list[int] = []

    async def run() -> None:
        router = Router(endpoint, SMALL)
        stop = watch(asyncio.get_running_loop(), router, lambda: calls.append(1), every=0.01)
        await asyncio.sleep(0.05)
        stop()
        before = len(calls)
        assert before >= 2
        await asyncio.sleep(0.05)
        assert len(calls) == before
        router.close()

    asyncio.run(run())


def test_every_limit_of_a_socket_is_set(router: Router) -> None:
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, 1000),
        (zmq.SNDHWM, 4),
        (zmq.RCVHWM, 4),
        (zmq.SNDTIMEO, 0),
        (zmq.RCVTIMEO, 0),
        (zmq.CONNECT_TIMEOUT, 1000),
        (zmq.HANDSHAKE_IVL, 2000),
        (zmq.RECONNECT_IVL_MAX, 2000),
        (zmq.HEARTBEAT_IVL, 500),
        (zmq.IMMEDIATE, 1),
    ):
        assert router.raw.getsockopt(option) == value


def test_a_run_directory_is_made_for_its_user_alone(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "a" / "run")
    assert made.stat().st_mode & 0o777 == 0o700
    assert private_directory(made) == made


def test_a_directory_others_can_enter_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    with pytest.raises(BadEndpoint, match="chmod 700"):
        private_directory(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_someone_elses_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 12345, 12345)
    with pytest.raises(BadEndpoint, match="belongs to uid 12345"):
        private_directory(tmp_path / "run")


def test_a_socket_path_the_system_cannot_hold_is_refused_before_binding(tmp_path: Path) -> None:
    longest = tmp_path / ("x" * (MAX_IPC_PATH - len(os.fsencode(tmp_path)) - 1))
    with Router(ipc(longest), SMALL):
        assert longest.is_socket()
    with pytest.raises(BadEndpoint, match=f"{MAX_IPC_PATH + 1} bytes"):
        ipc(longest.with_name(longest.name + "x"))


def test_a_router_knows_whether_its_socket_file_is_still_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run" / "s"
    path.parent.mkdir()
    with Router(ipc(path), SMALL) as router:
        assert router.reachable()
        path.unlink()
        assert not router.reachable()
        path.touch()
        assert not router.reachable()
        path.unlink()
        path.parent.rmdir()
        assert not router.reachable()
        path.parent.touch()  # a file where the directory was
        assert not router.reachable()
        path.parent.unlink()


def test_messages_of_several_parts_do_not_upset_the_next(router: Router, endpoint: str) -> None:
    with connect(endpoint) as dealer:
        dealer.raw.send_multipart([b"a", b"b", b"c"])
        dealer.send(b"d")
        assert router.poll(3000)
        time.sleep(0.1)
        assert [payload for _, payload in router.receive()] == [b"d"]
        dealer.send(b"e")
        peer, _ = take(router)
        router.raw.send_multipart([peer, b"x", b"y"])
        router.send(peer, b"z")
        assert dealer.poll(3000)
        time.sleep(0.1)
        assert list(dealer.receive()) == [b"x", b"y", b"z"]
