"""An executor without a model: it plays scripts over a real Router, and keeps what it was told.

It runs on the asyncio loop of the test. By default every request is answered at once with the tokens of
`FakeExecutor.reply`; a `respond` function gives a `Script` per request instead, or refuses it.
"""

from __future__ import annotations

import asyncio
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from wire.errors import Code, Refused
from wire.generate import (
    MAX_TO_EXECUTOR,
    PROTOCOL,
    Abort,
    Bye,
    Delta,
    Events,
    Failed,
    GenerateCodec,
    Gone,
    Hello,
    ModelCard,
    Ping,
    Status,
    Submit,
    ToGateway,
    TokenLogprobs,
    Tokens,
    TopToken,
    Welcome,
)
from wire.rpc import Limits, PeerGone, PeerSlow, Router, ipc, private_directory, watch

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "Hello world, this is a small text to train a small tokenizer on. The quick brown fox jumps "
    "over the lazy dog, again and again. ABC DEFGHIJ user assistant system\n"
)


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 tokens that can write any text; special tokens as SmolLM2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[
            AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<|bos|>")
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    return tokenizer


def make_card(tokenizer: Tokenizer | None = None, **changes: object) -> ModelCard:
    """A card of a model of 2,048 tokens of context; `changes` replace its fields."""
    tokenizer = tokenizer or byte_level_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    card = ModelCard(
        name="org/fake-model",
        root="fake-model.gguf",
        created=1_700_000_000,
        architecture="FakeForCausalLM",
        dtype="float32",
        context_length=2048,
        pool_tokens=65536,
        block_size=16,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer=tokenizer.to_str().encode(),
        chat_template=CHAT_TEMPLATE,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        eos_ids=(end,) if end is not None else (),
    )
    return msgspec.structs.replace(card, **changes)


@dataclass(slots=True)
class Script:
    """How one request is answered.

    Attributes:
        choices: token ids of each choice; the end id is added when `finish` is "stop".
        finish: of every choice; "" leaves the request running for ever.
        step: tokens per event.
        delay: seconds before each event.
        fail_after: after this many events the request fails with `failure`.
        cached: prompt tokens said to have been cached.
        queued_ms: how long the request is said to have waited for its first step.
    """

    choices: Sequence[Sequence[int]]
    finish: str = "length"
    step: int = 1
    delay: float = 0.0
    fail_after: int | None = None
    failure: Failed = field(default_factory=lambda: Failed(1, Code.INTERNAL, "The fake failed."))
    cached: int = 0
    queued_ms: int = 0


Respond = Callable[[Submit], Script]


class FakeExecutor:
    """Serves one socket.

    Args:
        directory: of the socket, `NAME.sock`; made private.
        respond: a script for each request; may raise Refused.

    Attributes:
        submits, aborts: what gateways sent, in order.
        silent: nothing is sent or read while true, as in a stopped process.
    """

    def __init__(
        self,
        directory: Path,
        card: ModelCard,
        respond: Respond | None = None,
        name: str = "executor-0",
    ) -> None:
        self.card = card
        self.tokenizer: Tokenizer = Tokenizer.from_str(card.tokenizer.decode())
        self.reply = "Hello world"
        self.respond = respond or self._reply
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.hellos = 0
        self.silent = False
        self.ready = True
        self.draining = False
        self._path = private_directory(directory) / f"{name}.sock"
        self._codec = GenerateCodec()
        self._instance = uuid.uuid4().hex
        self._peers: set[bytes] = set()
        self._running: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._outgoing: dict[bytes, Events] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def __aenter__(self) -> FakeExecutor:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._router = Router(ipc(self._path), Limits(max_message=MAX_TO_EXECUTOR))
        self._unwatch = watch(loop, self._router, self._drain, every=0.02)
        self._reporter = loop.create_task(self._report())

    async def stop(self) -> None:
        """End at once, as a killed process does: no goodbyes."""
        tasks = [self._reporter, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._unwatch()
        self._router.close()

    def forget_sessions(self) -> None:
        """Tell every gateway that its session is gone."""
        for peer in list(self._peers):
            self._end(peer)
            self._send(peer, Gone(Code.FENCED, "The session expired."))
        self._peers.clear()

    @property
    def running(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------ inside

    def _reply(self, submit: Submit) -> Script:
        return Script([self.encode(self.reply)] * submit.n, finish="stop")

    def _drain(self) -> None:
        if self.silent:
            return
        for peer, payload in self._router.receive():
            message = self._codec.decode_to_executor(payload)
            match message:
                case Hello():
                    self.hellos += 1
                    self._end(peer)
                    self._peers.add(peer)
                    self._send(peer, Welcome(PROTOCOL, self._instance, 3000, self.card))
                    self._send(peer, self._status())
                case _ if peer not in self._peers:
                    self._send(peer, Gone(Code.FENCED, "No such session."))
                case Submit():
                    self.submits.append(message)
                    self._start(peer, message)
                case Abort():
                    self.aborts.append(message.id)
                    if task := self._running.pop((peer, message.id), None):
                        task.cancel()
                case Bye():
                    self._end(peer)
                    self._peers.discard(peer)
                case Ping():
                    pass

    def _start(self, peer: bytes, submit: Submit) -> None:
        try:
            script = self.respond(submit)
        except Refused as refused:
            failed = Failed(submit.id, refused.code, refused.message)
            self._send(peer, Events(failed=[failed]))
            return
        self._running[peer, submit.id] = asyncio.get_running_loop().create_task(
            self._play(peer, submit, script)
        )

    async def _play(self, peer: bytes, submit: Submit, script: Script) -> None:
        end = [self.card.eos_ids[0]] if script.finish == "stop" else []
        tokens = [[*choice, *end] for choice in script.choices]
        longest = max(map(len, tokens))
        for number, start in enumerate(range(0, longest, script.step)):
            if script.fail_after is not None and number >= script.fail_after:
                break
            await asyncio.sleep(script.delay)
            deltas = []
            for index, own in enumerate(tokens):
                if start >= len(own):
                    continue
                now = own[start : start + script.step]
                last = start + script.step >= len(own)
                deltas.append(
                    Delta(
                        submit.id,
                        index,
                        now,
                        script.finish if last else "",
                        script.cached if start == 0 else 0,
                        self._logprobs(submit, now),
                        script.queued_ms if start == 0 else 0,
                    )
                )
            self._emit(peer, deltas)
        if script.fail_after is not None:
            failed = Failed(submit.id, script.failure.code, script.failure.message)
            self._emit(peer, [], [failed])
        elif not script.finish:
            await asyncio.Event().wait()
        self._running.pop((peer, submit.id), None)

    def _logprobs(self, submit: Submit, tokens: list[int]) -> list[TokenLogprobs]:
        if (most := submit.sampling.logprobs) < 0:
            return []
        return [
            TokenLogprobs(
                -float(token) / 1000,
                [TopToken((token + k) % self.card.vocab_size, -float(k)) for k in range(most)],
            )
            for token in tokens
        ]

    def _end(self, peer: bytes) -> None:
        for key in [key for key in self._running if key[0] == peer]:
            self._running.pop(key).cancel()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for peer in list(self._peers):
                self._send(peer, self._status())

    def _status(self) -> Status:
        return Status(
            self.ready, self.draining, "" if self.ready else "warming up", 0, len(self._running),
            0, 0, 4096, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def _emit(self, peer: bytes, deltas: list[Delta], failed: Sequence[Failed] = ()) -> None:
        """One `Events` for all that happens at the same time, as an engine step has it."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        events = self._outgoing.setdefault(peer, Events([], []))
        events.deltas.extend(deltas)
        events.failed.extend(failed)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for peer, events in outgoing.items():
            self._send(peer, in_columns(events))

    def _send(self, peer: bytes, message: ToGateway) -> None:
        if self.silent:
            return
        try:
            self._router.send(peer, self._codec.encode(message))
        except (PeerGone, PeerSlow):
            self._peers.discard(peer)


def in_columns(events: Events) -> Events:
    """The same, with tokens in columns where a real executor has them: those that come alone and say nothing
    else, unless their choice has something else to say as well."""
    seen = Counter((delta.id, delta.index) for delta in events.deltas)
    plain = [
        delta
        for delta in events.deltas
        if delta == Delta(delta.id, delta.index, delta.tokens[:1])
        and seen[delta.id, delta.index] == 1
    ]
    tokens = Tokens(
        struct.pack(f"<{len(plain)}Q", *(delta.id for delta in plain)),
        bytes(delta.index for delta in plain),
        struct.pack(f"<{len(plain)}I", *(delta.tokens[0] for delta in plain)),
    )
    return Events([delta for delta in events.deltas if delta not in plain], events.failed, tokens)
