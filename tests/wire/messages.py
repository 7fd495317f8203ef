"""One example of every message, each field away from its default, and a hypothesis strategy for its type.

`python -m tests.wire.messages` prints the golden file anew; do that only for a change of protocol version.
"""

from __future__ import annotations

import struct

import msgspec

from wire.errors import Code
from wire.generate import (
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
    TokenLogprobs,
    Tokens,
    TopToken,
    Welcome,
)
from wire.memory import (
    Admit,
    Admitted,
    Append,
    Change,
    Commit,
    Copy,
    Fork,
    Goodbye,
    Granted,
    MemoryCodec,
    PoolSpec,
    Refusal,
    Register,
    Registered,
    Rejected,
    Step,
    Usage,
)
from wire.sampling import Bias, Sampling

A = "0123456789abcdef" * 2
B = "fedcba9876543210" * 2
IDS = struct.pack("<3I", 1, 65_536, 4_000_000)

SAMPLING = Sampling(
    seed=2**63 - 1,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    max_tokens=128,
    min_tokens=2,
    ignore_eos=True,
    logprobs=3,
    stop_ids=(2, 7),
    logit_bias=(Bias(5, -100.0),),
)
CARD = ModelCard(
    name="tiny",
    root="llm-tiny",
    created=1_700_000_000,
    architecture="LlamaForCausalLM",
    dtype="float32",
    context_length=2048,
    pool_tokens=65_536,
    block_size=16,
    vocab_size=49_152,
    tokenizer=b"{}",
    chat_template="{{ messages }}",
    bos_token="<s>",
    eos_token="</s>",
    pad_token="<pad>",
    eos_ids=(2, 3),
    add_bos=True,
)

TO_MEMD = (
    Register((1, 0), A, PoolSpec("gpu-0", "sha256:00", "bfloat16", 16, 4096, 368_640)),
    Step(
        instance=A,
        generation=3,
        epoch=7,
        number=41,
        commits=[Commit(11, 48, IDS), Commit(12, 1)],
        frees=[13, 2**53 - 1],
        forks=[Fork(11, 14, 47)],
        appends=[Append(11, 49)],
        admits=[Admit(15, IDS, 512, "acme", 9, False), Admit(16, IDS, 1)],
        fills=struct.pack("<2Q", 12, 30),
    ),
    Goodbye(A, 3),
)
FROM_MEMD = (
    Registered(B, 7, A, 3, 3000),
    Granted(
        boot_id=B,
        epoch=7,
        number=41,
        usage=Usage(4095, 4000, 40, 54, 1, 640, 1280),
        changes=[Change(11, 3, [200, 201])],
        copies=[Copy(199, 201)],
        admitted=[Admitted(15, 16, [5, 202])],
        refused=[Refusal(16, Code.NO_BLOCKS, 2, 1)],
    ),
    Rejected(B, 7, 42, Code.FENCED, "lease ended: register again"),
)
TO_EXECUTOR = (
    Hello((2, 0), A),
    Submit(
        id=5, tokens=IDS, sampling=SAMPLING, n=4, priority=-1, tenant="acme", deadline_ms=30_000
    ),
    Abort(5),
    Ping(),
    Bye(),
)
TO_GATEWAY = (
    Welcome((2, 0), B, 3000, CARD),
    Events(
        deltas=[
            Delta(5, 3, [9, 2], "stop", 16, [TokenLogprobs(-0.5, [TopToken(9, -0.5)])], 12),
            Delta(6, 0, [7]),
        ],
        failed=[Failed(8, Code.CONTEXT_LENGTH, "prompt has 3000 tokens, the model takes 2048")],
        tokens=Tokens(
            struct.pack("<2Q", 9, 2**53 - 1), bytes([0, 15]), struct.pack("<2I", 7, 49151)
        ),
    ),
    Status(True, False, "", 4, 16, 2, 300, 4095, 54, 40, 900, 1, 5000, 700, 640, 1280, 12),
    Gone(Code.FENCED, "unknown session: say hello again"),
)

MESSAGES: dict[str, msgspec.Struct] = {
    type(message).__name__: message for message in (*TO_MEMD, *FROM_MEMD, *TO_EXECUTOR, *TO_GATEWAY)
}


def encoded() -> dict[str, bytes]:
    """The bytes of every example, by the message's name."""
    memory, generate = MemoryCodec(), GenerateCodec()
    return {
        name: (memory if isinstance(message, TO_MEMD_TYPES + FROM_MEMD_TYPES) else generate).encode(
            message
        )
        for name, message in MESSAGES.items()
    }


TO_MEMD_TYPES = tuple(map(type, TO_MEMD))
FROM_MEMD_TYPES = tuple(map(type, FROM_MEMD))


if __name__ == "__main__":
    for name, payload in encoded().items():
        print(name, payload.hex())
