"""What a request may ask for. Everything is checked here, before any of it reaches a tensor."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from executor.request import Group, Sequence
from wire.errors import Code, Refused
from wire.generate import Submit
from wire.memory import MAX_TOKEN_BYTES

# A whole sequence must fit one message to memd, beside everything else in it.
MAX_CONTEXT = MAX_TOKEN_BYTES // 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the model, of the pool and of the settings."""

    block_size: int  # token slots per block
    blocks: int  # that can be granted: the null block is not counted
    context: int  # most tokens of prompt + output
    vocab: int  # ids at or above it are refused
    end_ids: tuple[int, ...] = ()  # the model's end-of-text ids
    step_tokens: int = 512  # most tokens computed in one step
    sequences: int = 256  # most running at once
    waiting: int = 1024  # most requests in the queue
    waiting_tokens: int = 1_000_000  # most prompt tokens in the queue


def blocks_needed(bounds: Bounds, prompt: int, new: int, choices: int) -> int:
    """Blocks a group holds when all choices are at their longest: they share the prompt's full ones."""
    shared = prompt // bounds.block_size
    return shared + choices * (-(-(prompt + new) // bounds.block_size) - shared)


def most_new_tokens(bounds: Bounds, prompt: int, choices: int) -> int:
    """Tokens each choice can generate before the context or the pool ends; 0 or less: none."""
    shared = prompt // bounds.block_size
    each = (bounds.blocks - shared) // choices + shared
    return min(bounds.context, each * bounds.block_size) - prompt


def accept(
    bounds: Bounds, submit: Submit, *, peer: bytes, order: tuple[int, int], deadline: float | None
) -> Group:
    """Turn a message into a group that can be scheduled.

    Raises:
        Refused: INVALID, CONTEXT_LENGTH or NEVER_FITS; it can never run here as it stands.
    """
    sampling, choices = submit.sampling, submit.n
    if not submit.tokens:
        raise Refused(Code.INVALID, "the prompt has no tokens; send at least one")
    if len(submit.tokens) % 4:
        raise Refused(
            Code.INVALID,
            f"the prompt has {len(submit.tokens)} bytes, which is not a whole number of 4-byte ids",
        )
    prompt = array("I", submit.tokens).tolist()
    _check_ids(bounds, "prompt token", prompt)
    _check_ids(bounds, "stop token", sampling.stop_ids)
    _check_ids(bounds, "logit_bias token", [bias.token for bias in sampling.logit_bias])
    if choices > bounds.sequences:
        raise Refused(
            Code.INVALID,
            f"n is {choices}, but this server runs at most {bounds.sequences} sequences at once: "
            "ask for fewer choices",
        )
    limit = _limit(bounds, len(prompt), sampling.max_tokens, choices)
    if sampling.min_tokens > limit:
        raise Refused(
            Code.INVALID,
            f"min_tokens is {sampling.min_tokens}, but at most {limit} tokens can be generated: "
            "lower min_tokens or raise max_tokens",
        )
    stops = set(sampling.stop_ids)
    group = Group(
        peer=peer,
        id=submit.id,
        prompt=prompt,
        packed=submit.tokens,
        sampling=sampling,
        limit=limit,
        stops=frozenset(stops if sampling.ignore_eos else stops.union(bounds.end_ids)),
        ends=tuple(sorted(stops.union(bounds.end_ids))) if sampling.min_tokens else (),
        order=order,
        tenant=submit.tenant,
        deadline=deadline,
    )
    group.live = [Sequence(group, choice, prompt.copy()) for choice in range(choices)]
    return group


def _check_ids(bounds: Bounds, what: str, ids: list[int] | tuple[int, ...]) -> None:
    if ids and (largest := max(ids)) >= bounds.vocab:
        raise Refused(
            Code.INVALID,
            f"{what} id {largest} is outside the model's vocabulary of {bounds.vocab} ids "
            f"(0 to {bounds.vocab - 1})",
        )


def _limit(bounds: Bounds, prompt: int, max_tokens: int, choices: int) -> int:
    """Tokens each choice may generate; raises Refused when the request cannot run to that length."""
    if prompt + max(max_tokens, 1) > bounds.context:
        asked = (
            f"{max_tokens} tokens to generate" if max_tokens else "at least one token to generate"
        )
        raise Refused(
            Code.CONTEXT_LENGTH,
            f"the model's context is {bounds.context} tokens, but the prompt has {prompt} and there "
            f"are {asked} ({prompt + max(max_tokens, 1)} in all): shorten one of them",
        )
    needed = blocks_needed(bounds, prompt, max(max_tokens, 1), choices)
    if needed > bounds.blocks:
        raise Refused(
            Code.NEVER_FITS,
            f"a prompt of {_counted(prompt, 'token')} with {_counted(choices, 'choice')} of up to "
            f"{_counted(max(max_tokens, 1), 'token')} needs {needed} KV blocks of "
            f"{bounds.block_size} tokens, but the whole pool has {bounds.blocks}: shorten "
            "the request, or start the server with more --kv-memory",
        )
    return max_tokens or most_new_tokens(bounds, prompt, choices)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
