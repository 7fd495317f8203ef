"""vLLM's in-process KVCacheManager under the load of `bench.memd`; run by vLLM's own Python, not by ours.

It answers lines like `bench/memd/worker.py` does. What is timed is what vLLM's scheduler calls: for a step
`allocate_slots` of every running request (hashing of what they append is left out), for a prompt its block
hashes, `get_computed_blocks` and `allocate_slots`, at the end `free`.

    /path/to/vllm/bin/python bench/memd/peer.py BLOCKS
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import time
from typing import Any

BLOCK = 16
PROMPT = 161
FILLER = 8192
WARM = 16
CONTEXT = 1 << 20


class Manager:
    """vLLM's manager with its prefix cache full."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
        from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # type: ignore[import-not-found]
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # type: ignore[import-not-found]
        from vllm.v1.request import Request  # type: ignore[import-not-found]

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.request_type, self.params = Request, SamplingParams(max_tokens=CONTEXT)
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=3, head_size=64, dtype=torch.bfloat16
        )
        config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        wanted = {
            "scheduler_block_size": BLOCK,
            "hash_block_size": BLOCK,
            "max_in_flight_tokens": CONTEXT,
            "enable_caching": True,
        }
        known = inspect.signature(KVCacheManager.__init__).parameters
        given = {name: value for name, value in wanted.items() if name in known}
        self.manager = KVCacheManager(config, CONTEXT, **given)
        self.next_id = 1
        self.fill(blocks)
        gc.collect()
        gc.freeze()  # as vLLM's engine does when it is ready

    def prompt(self, seq: int, count: int) -> list[int]:
        return [(seq * 7919 + place) % 2**31 for place in range(count)]

    def request(self, tokens: list[int]) -> Any:
        self.next_id += 1
        return self.request_type(str(self.next_id), tokens, self.params, None)

    def admit(self, request: Any) -> None:
        request._block_hasher = self.hasher
        request.block_hashes = self.hasher(request)
        blocks, computed, *_ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - computed
        if self.manager.allocate_slots(request, new, computed, blocks) is None:
            raise SystemExit("vLLM's manager has no blocks left")
        request.num_computed_tokens = request.num_tokens

    def fill(self, blocks: int) -> None:
        left = blocks - 1
        while left > 0:
            tokens = min(FILLER, left * BLOCK)
            request = self.request(self.prompt(self.next_id, tokens))
            self.admit(request)
            self.manager.free(request)
            left -= tokens // BLOCK

    def step(self, count: int, samples: int) -> list[float]:
        requests = [
            self.request(self.prompt(self.next_id, 32 + index % BLOCK)) for index in range(count)
        ]
        for request in requests:
            self.admit(request)
        taken = []
        for turn in range(WARM + samples):
            for request in requests:
                request.append_output_token_ids((request.num_tokens * 31 + count) % 50_000)
            started = time.perf_counter()
            granted = [self.manager.allocate_slots(request, 1) for request in requests]
            if turn >= WARM:
                taken.append(time.perf_counter() - started)
            if None in granted:
                raise SystemExit("vLLM's manager has no blocks left")
            for request in requests:
                request.num_computed_tokens += 1
        for request in requests:
            self.manager.free(request)
        return taken

    def admits(self, samples: int, hit: bool) -> list[float]:
        taken = []
        first = self.prompt(self.next_id, PROMPT)
        if hit:
            request = self.request(first)
            self.admit(request)
            self.manager.free(request)
        for _ in range(samples):
            request = self.request(first if hit else self.prompt(self.next_id, PROMPT))
            started = time.perf_counter()
            self.admit(request)
            taken.append(time.perf_counter() - started)
            self.manager.free(request)
        return taken

    def frees(self, samples: int) -> list[float]:
        taken = []
        for _ in range(samples):
            request = self.request(self.prompt(self.next_id, PROMPT))
            self.admit(request)
            started = time.perf_counter()
            self.manager.free(request)
            taken.append(time.perf_counter() - started)
        return taken

    def measure(self, asked: dict[str, Any]) -> list[float] | None:
        samples = asked["samples"]
        match asked["op"]:
            case "step":
                return self.step(asked["count"], samples)
            case "admit" | "lookup" as op:
                return self.admits(samples, hit=op == "lookup")
            case "free":
                return self.frees(samples)
        return None  # it has no such operation


def main() -> int:
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM writes there as it likes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # type: ignore[import-not-found]

    manager = Manager(int(sys.argv[1]))
    print(json.dumps(f"vLLM {vllm.__version__}"), file=answers, flush=True)
    for line in sys.stdin:
        taken = manager.measure(json.loads(line))
        print(json.dumps(taken), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
