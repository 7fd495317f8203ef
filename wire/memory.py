"""executor <-> memd: every message about KV memory.

One `Step` per engine step carries everything for all sequences together, and one reply answers it.
Only what changes travels: a sequence that stays inside its last block is not named at all, and token
ids go over when blocks have filled. memd handles the parts of a step in this order, whatever their order in
the engine: commits, frees, forks, appends, admits.

A step is a promise about time: memd may be asked for step k+1 while the device still computes step k.
Blocks freed by the message for step k+1 can be granted by that same message, because the device runs
steps in order; a block that is the *source of a copy* of step k+1 cannot.

Identity: an executor is a uuid per process start. `boot_id` and `epoch` of memd are in every reply; an
executor that sees either change drops all requests' blocks and registers again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from wire.errors import Code

PROTOCOL = (1, 0)  # major must match; minor may differ, unknown trailing fields are ignored

MAX_TOKEN_BYTES = 1 << 20  # of one sequence's ids in one message: a context of 262,144 tokens
# Bytes of a whole message. The scheduler bounds admissions and commits far below the first; a reply is
# larger where forks of long prompts bring their tables, and memd is trusted.
MAX_STEP = 4 << 20
MAX_REPLY = (
    64 << 20
)  # bytes; a step whose admissions would exceed it is sent in parts by the executor
NULL_BLOCK = 0  # never granted, written, hashed or freed

BlockId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SeqId = Annotated[int, Meta(ge=1, le=2**53 - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Instance = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Tenant = Annotated[str, Meta(max_length=64)]
TokenBytes = Annotated[
    bytes, Meta(max_length=MAX_TOKEN_BYTES)
]  # token ids, uint32 little-endian, packed

# ---------------------------------------------------------------- executor -> memd


class PoolSpec(Struct, frozen=True, array_like=True):
    """What one pool's blocks hold. Everything a block's content depends on besides its tokens."""

    name: Name
    model: Annotated[str, Meta(max_length=256)]  # digest of weights and config, adapter included
    dtype: Annotated[str, Meta(max_length=32)]  # of K and V
    block_size: Annotated[int, Meta(ge=1, le=1024)]  # token slots per block
    num_blocks: Annotated[int, Meta(ge=2, le=1 << 24)]  # the null block included
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]  # K and V of one block, all layers


class Register(Struct, frozen=True, array_like=True, tag="register"):
    """Take a lease on a new pool. Repeating it with the same instance starts a new generation."""

    protocol: tuple[int, int]
    instance: Instance
    pool: PoolSpec


class Commit(Struct, frozen=True, array_like=True, gc=False):
    """The KV of a sequence's first `computed` tokens is written. Full blocks are sealed and indexed;
    one equal to a sealed block is merged into it (a `Change` in the reply tells)."""

    seq: SeqId
    computed: TokenCount
    tokens: TokenBytes = b""  # ids that follow those memd knows already, at least up to `computed`


class Fork(Struct, frozen=True, array_like=True, gc=False):
    """`child` starts with the first `at` tokens of `parent`, sharing its blocks by reference. A `Change` in
    the reply has the child's whole table, since the parent's may change before and after the fork."""

    parent: SeqId
    child: SeqId
    at: TokenCount


class Append(Struct, frozen=True, array_like=True, gc=False):
    """Make slots `.. upto` writable: new blocks at the end, a private copy of a shared last block.
    The executor sends it when `upto` exceeds the sequence's room (see `Granted`)."""

    seq: SeqId
    upto: TokenCount


class Admit(Struct, frozen=True, array_like=True):
    """Bring in a sequence with these tokens: find its cached prefix, grant blocks for what follows.

    memd hits `h < len(tokens)` tokens and grants room for `min(h + chunk, len(tokens))`. Admissions
    are looked at in order; after the first refusal the rest of the step's are refused as BEHIND.
    Neighbours with the same non-zero `group` are admitted together or not at all.
    """

    seq: SeqId
    tokens: TokenBytes
    chunk: Annotated[int, Meta(ge=1, le=2**31 - 1)]  # most new tokens to be computed in this step
    tenant: Tenant = ""  # prefix hits never cross tenants
    group: Number = 0
    reuse: bool = True  # False: no prefix hit (prompt logprobs need every position computed)


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """Everything one engine step asks of memd. `number` rises by one per step from 1 at registration;
    the same number again returns the same bytes."""

    instance: Instance
    generation: Number
    epoch: Number
    number: Number
    commits: Annotated[list[Commit], Meta(max_length=65536)] = []
    frees: Annotated[list[SeqId], Meta(max_length=65536)] = []
    forks: Annotated[list[Fork], Meta(max_length=65536)] = []
    appends: Annotated[list[Append], Meta(max_length=65536)] = []
    admits: Annotated[list[Admit], Meta(max_length=4096)] = []
    # Token counts of sequences inside their last block, as pairs (seq, tokens) of uint64 packed
    # little-endian; sent now and then, only so that the share of filled slots is known.
    fills: Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)] = b""


class Goodbye(Struct, frozen=True, array_like=True, tag="goodbye"):
    """The executor leaves: everything it held is freed at once."""

    instance: Instance
    generation: Number


Request = Register | Step | Goodbye

# ---------------------------------------------------------------- memd -> executor


class Registered(Struct, frozen=True, array_like=True, tag="registered"):
    """The lease and the pool generation every later `Step` must carry."""

    boot_id: str
    epoch: Number
    instance: Instance
    generation: Number
    lease_ms: Number  # a lease ends this long after the last valid message


class Change(Struct, frozen=True, array_like=True, gc=False):
    """`table[index : index + len(blocks)] = blocks`, extending the table where it is shorter. Apply
    changes in the order given."""

    seq: SeqId
    index: TokenCount  # logical block number
    blocks: list[BlockId]


class Copy(Struct, frozen=True, array_like=True, gc=False):
    """Copy one whole block before this step's forward pass. No destination of a step is a source."""

    source: BlockId
    target: BlockId


class Admitted(Struct, frozen=True, array_like=True, gc=False):
    """A sequence came in with its whole table so far."""

    seq: SeqId
    computed: TokenCount  # tokens whose KV is in the table already: compute from here
    blocks: list[BlockId]  # ceil(min(computed + chunk, len(tokens)) / block_size) entries


class Refusal(Struct, frozen=True, array_like=True, gc=False):
    """One append, fork or admit that was not done; for it, nothing has changed."""

    seq: SeqId
    code: Code
    need: TokenCount  # blocks it takes
    available: TokenCount  # blocks that could be granted when it was looked at


class Usage(Struct, frozen=True, array_like=True, gc=False):
    """The pool after this step, in blocks (the null block is not counted), and counters so far."""

    total: TokenCount
    free: TokenCount
    cached: TokenCount
    used: TokenCount
    quarantined: TokenCount
    hit_tokens: Number  # prompt tokens found in the prefix index
    query_tokens: Number  # prompt tokens looked up


class Granted(Struct, frozen=True, array_like=True, tag="granted"):
    """The answer to one `Step`.

    A sequence's *room*, the slots it may write without asking, is its table's length in blocks times the
    block size; only while its partial last block is shared by a fork is it the sequence's token count
    (for the child, `Fork.at`). A granted append restores it. The executor asks before it writes past it.
    """

    boot_id: str
    epoch: Number
    number: Number
    usage: Usage
    changes: list[Change] = []
    copies: list[Copy] = []
    admitted: list[Admitted] = []
    refused: list[Refusal] = []


class Rejected(Struct, frozen=True, array_like=True, tag="rejected"):
    """The whole message was refused and the state is as it was. FENCED, STALE and GAP mean: drop
    everything and register again."""

    boot_id: str
    epoch: Number
    number: Number  # of the step refused; 0 for a registration
    code: Code
    message: str


Reply = Registered | Granted | Rejected


class MemoryCodec:
    """Encoders and decoders for both directions, built once per process.

    Decoding raises `msgspec.DecodeError` (which includes ValidationError) or RecursionError.
    """

    def __init__(self) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode_request = msgspec.msgpack.Decoder(Request).decode
        self.decode_reply = msgspec.msgpack.Decoder(Reply).decode
