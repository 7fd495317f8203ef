"""How to choose tokens: the one struct that crosses both hops, from HTTP to the sampler.

Every field has hard bounds here, and the executor checks ids against the model's vocabulary again
(`executor/server.py`), because an id out of range that reaches a tensor harms other requests.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 256

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Bias(Struct, frozen=True, array_like=True, gc=False):
    """Added to one token's logit before anything else."""

    token: TokenId
    value: Annotated[float, Meta(ge=-100, le=100)]


class Sampling(Struct, frozen=True, array_like=True, omit_defaults=False):
    """Sampling parameters of one request. Order of application: bias, min_tokens mask, penalties,
    temperature, top-k, top-p, min-p, then one draw keyed by (seed, choice, position)."""

    seed: Seed  # the gateway draws one when the client gives none
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0  # 0 is greedy
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0 is off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0  # prompt and output
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # output only
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # output only
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: as many as fit
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # no end or stop id before
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)] = -1  # -1 none; k: chosen and top k
    stop_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    logit_bias: Annotated[tuple[Bias, ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
