"""How long a step takes on the paper's machines, and a runner that takes that long on a virtual clock.

A step reads the weights and every key and value it attends to, and multiplies the weights with every token:

    seconds = max(weights / bandwidth, tokens * 2 * parameters / flops) + context * kv_bytes / bandwidth
              + step_overhead + sequences * sequence_overhead

per GPU, at 80 % of the A100's bandwidth and 60 % of its dense fp16 FLOP/s. The two overheads (Python of
2023, no CUDA graphs, one sampler call per request) are the only fitted numbers. They are fitted once, to
two points of vLLM alone in Fig. 13, by Little's law (requests in the batch = tokens a second * seconds a
step, for OPT-13B):

    ShareGPT at  2 requests/s: 30.42 in the batch,   676 tokens/s -> 45.0 ms a step
    Alpaca   at 30 requests/s: 132.44 in the batch, 1754 tokens/s -> 75.5 ms a step

Of these, weights or products take 21.4 and 24.4 ms (prompts are computed in the same steps), keys and
values 10.0 and 6.7. What is left makes 4.5 ms for a step and 0.3 ms for each request of its batch. The same
numbers serve every policy, model and data set; that a batch of 30 fits at all is not fitted, it is what the
pool and the allocator allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor.plan import Drawn, Plan

BANDWIDTH_SHARE, FLOPS_SHARE = 0.8, 0.6  # of the peak
STEP_OVERHEAD, SEQUENCE_OVERHEAD = 4.5e-3, 0.3e-3  # seconds


@dataclass(frozen=True, slots=True)
class Device:
    """A model on its GPUs. All but `slots` per GPU."""

    name: str
    slots: int  # token slots of the KV pool, as in the paper's Table 1
    weights: float  # bytes
    kv_bytes: float  # of one token
    bandwidth: float  # bytes/s, peak
    flops: float  # peak, dense fp16
    step_overhead: float = STEP_OVERHEAD
    sequence_overhead: float = SEQUENCE_OVERHEAD
    slowness: float = 1.0  # all times are multiplied by it

    def seconds(self, tokens: int, context: int, sequences: int) -> float:
        """One step's time.

        Args:
            tokens: computed in the step.
            context: tokens attended to, over all sequences.
            sequences: in the batch.
        """
        if not sequences:
            return 0.0
        bandwidth = self.bandwidth * BANDWIDTH_SHARE
        products = tokens * self.weights / (self.flops * FLOPS_SHARE)  # 2 FLOPs for 2 bytes
        reads = context * self.kv_bytes / bandwidth
        overhead = self.step_overhead + sequences * self.sequence_overhead
        return self.slowness * (max(self.weights / bandwidth, products) + reads + overhead)


A100_40, A100_80, FP16 = 1.555e12, 2.039e12, 312e12  # bytes/s, bytes/s, FLOP/s

OPT_13B = Device("OPT-13B, 1 A100", 15_700, 26e9, 2 * 2 * 40 * 5120, A100_40, FP16)
OPT_66B = Device("OPT-66B, 4 A100", 9_700, 132e9 / 4, 2 * 2 * 64 * 9216 / 4, A100_40, FP16)
OPT_175B = Device("OPT-175B, 8 A100-80", 60_100, 346e9 / 8, 2 * 2 * 96 * 12288 / 8, A100_80, FP16)
# A development machine's CPU with the native step, after `bench.kernels.cpu_step`: 8.8, 12.5, 19.1 and
# 64.1 ms at 1, 8, 16 and 64 streams of 320 tokens; the formula says 8.9, 12.3, 17.9 and 66.6. Bandwidth
# and FLOP/s are what makes it so with the shares of a peak above.
CPU = Device(
    "SmolLM2-135M, 2 CPUs",
    1024,
    270e6,
    48e3,
    50e9,
    850e9,
    step_overhead=1.7e-3,
    sequence_overhead=0.1e-3,
)
MODELS = {"13b": OPT_13B, "66b": OPT_66B, "175b": OPT_175B}


class VirtualClock:
    """Seconds that pass only when someone lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedRunner:
    """Takes the time a device would; draws a token that names the request and the choice."""

    def __init__(self, device: Device, clock: VirtualClock) -> None:
        self._device = device
        self._clock = clock

    def prepare(self, plan: Plan) -> None:
        pass

    def run(self, plan: Plan) -> list[Drawn]:
        tokens = sum([len(row.tokens) for row in plan.rows])
        context = sum([row.start for row in plan.rows]) + tokens
        self._clock.sleep(self._device.seconds(tokens, context, len(plan.rows)))
        return [
            Drawn(draw.seq, draw.prompt[-1] | draw.choice << CHOICE_BIT)
            for row in plan.rows
            for draw in row.draws
        ]


CHOICE_BIT = 24  # token ids of simulated requests: the request's number below it, the choice above
