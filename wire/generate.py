"""gateway <-> executor: submit token ids, get token ids back.

A gateway says `Hello` and gets a `Welcome` with all it needs to serve the model (tokenizer, chat template,
limits), so it holds no model files. Then it sends `Submit` and `Abort`, and a `Ping` each second; a gateway
silent for `session_ms` is dead and its requests are aborted. The executor sends at most one `Events` per
engine step and gateway, and a `Status` twice a second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wire.errors import Code
from wire.memory import Instance, Number, Tenant, TokenBytes, TokenCount
from wire.sampling import MAX_CHOICES, Sampling, TokenId

PROTOCOL = (2, 0)
MAX_TO_EXECUTOR = 2 << 20  # bytes: one prompt of 256k tokens and its parameters
MAX_TO_GATEWAY = 64 << 20  # bytes: a Welcome with a large tokenizer
PING_MS = 1000
STATUS_MS = 500

RequestId = Annotated[int, Meta(ge=1, le=2**53 - 1)]  # a gateway's own counter, never a client's id

# ---------------------------------------------------------------- gateway -> executor


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """Open or renew a session. Requests of an older session of the same gateway are aborted."""

    protocol: tuple[int, int]
    gateway: Instance


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """Generate `n` choices after these tokens."""

    id: RequestId
    tokens: TokenBytes  # uint32 little-endian
    sampling: Sampling
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0  # lower runs first, as in vLLM
    tenant: Tenant = ""
    deadline_ms: Number = 0  # drop it unstarted after this long; 0: no deadline


class Abort(Struct, frozen=True, array_like=True, tag="abort", gc=False):
    """The client left, or a stop string was found. Unknown ids are ignored. No event follows."""

    id: RequestId


class Ping(Struct, frozen=True, array_like=True, tag="ping", gc=False):
    """Keeps the session alive."""


class Bye(Struct, frozen=True, array_like=True, tag="bye", gc=False):
    """The gateway leaves; its requests are aborted."""


ToExecutor = Hello | Submit | Abort | Ping | Bye

# ---------------------------------------------------------------- executor -> gateway


class ModelCard(Struct, frozen=True, array_like=True):
    """What a gateway must know of the model to serve it."""

    name: str  # as served
    root: str  # where it came from: a path's last part or a package name
    created: Number  # unix seconds, for /v1/models only
    architecture: str
    dtype: str
    context_length: TokenCount  # most tokens of prompt + output
    pool_tokens: TokenCount  # token slots in the KV pool
    block_size: TokenCount
    vocab_size: TokenCount  # ids at or above it are refused
    tokenizer: bytes  # tokenizer.json of the `tokenizers` library
    chat_template: str = ""  # jinja2; empty: chat is refused with a clear error
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    eos_ids: tuple[TokenId, ...] = ()
    add_bos: bool = False  # whether plain prompts get bos_token in front


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The session is open."""

    protocol: tuple[int, int]
    executor: Instance
    session_ms: Number
    card: ModelCard


class TopToken(Struct, frozen=True, array_like=True, gc=False):
    token: TokenId
    logprob: float


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, before temperature and truncation) at one position."""

    logprob: float  # of the chosen token
    top: list[TopToken] = []  # the likeliest, best first


class Delta(Struct, frozen=True, array_like=True):
    """New tokens of one choice. A non-empty `finish` is the choice's last delta."""

    id: RequestId
    index: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    tokens: list[TokenId]  # the end or stop id that ended it is included as the last one
    finish: str = ""  # "", "stop" (end or stop id), "length"
    cached: TokenCount = 0  # prompt tokens that were not computed; on a choice's first delta only
    logprobs: list[TokenLogprobs] = []  # one per token when asked for
    queued_ms: TokenCount = 0  # from submission to its first step; on a choice's first delta only


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """A request was refused or died; nothing more follows for its id."""

    id: RequestId
    code: Code
    message: str


class Tokens(Struct, frozen=True, array_like=True, gc=False):
    """One more token each of choices that go on: a `Delta` that says nothing else. In columns, because most
    of what a server sends is this; little-endian."""

    ids: bytes = b""  # [n] uint64
    indices: bytes = b""  # [n] uint8
    tokens: bytes = b""  # [n] uint32

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: the columns are not equally long.
        """
        count = len(self.indices)
        if len(self.ids) != 8 * count or len(self.tokens) != 4 * count:
            raise ValueError("columns of unequal length")

    def deltas(self) -> Iterator[Delta]:
        """One by one."""
        ids, tokens = array("Q", self.ids), array("I", self.tokens)
        for id, index, token in zip(ids, self.indices, tokens, strict=True):
            yield Delta(id, index, [token])


class Events(Struct, frozen=True, array_like=True, tag="events"):
    """All that one engine step brought for one gateway. No choice is in both `deltas` and `tokens`."""

    deltas: list[Delta] = []
    failed: list[Failed] = []
    tokens: Tokens = Tokens()


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Load, for picking an executor and for metrics. Counters rise from the executor's start."""

    ready: bool
    draining: bool
    reason: str  # why not ready, for people; empty when ready
    step_age_ms: Number  # since the last finished step while work is pending; 0 when idle
    running: Number  # sequences
    waiting: Number
    waiting_tokens: Number
    blocks_total: Number
    blocks_used: Number
    blocks_cached: Number
    steps: Number
    preemptions: Number
    prompt_tokens: Number
    generated_tokens: Number
    hit_tokens: Number
    query_tokens: Number
    memory_wait_us: Number  # time the step loop stood waiting for memd, in all


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """This session is not known (any more): say Hello again; all its requests are lost."""

    code: Code
    message: str


ToGateway = Welcome | Events | Status | Gone


class GenerateCodec:
    """Encoders and decoders for both directions, built once per process.

    Decoding raises `msgspec.DecodeError` (which includes ValidationError) or RecursionError.
    """

    def __init__(self) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode_to_executor = msgspec.msgpack.Decoder(ToExecutor).decode
        self.decode_to_gateway = msgspec.msgpack.Decoder(ToGateway).decode
