"""What the paper reports (Kwon et al., SOSP'23), to stand beside what is measured here."""

from __future__ import annotations

from bench.paper.policies import Policy

# Fig. 13: mean requests in the batch, OPT-13B; ShareGPT at 2 requests/s, Alpaca at 30.
BATCHED = {
    "sharegpt": {
        Policy.PAGED: 30.42,
        Policy.ORACLE: 13.62,
        Policy.POW2: 9.81,
        Policy.MAX: 7.00,
    },
    "alpaca": {
        Policy.PAGED: 132.44,
        Policy.ORACLE: 72.75,
        Policy.POW2: 43.24,
        Policy.MAX: 7.00,
    },
}
BATCHED_RATE = {"sharegpt": 2.0, "alpaca": 30.0}

# Fig. 2: percent of the KV pool: token states, reserved, internal and external fragmentation. For its own
# system the paper gives the first alone.
MEMORY = {
    Policy.PAGED: (96.3, None, None, None),
    Policy.ORACLE: (38.2, 25.2, 0.0, 36.6),
    Policy.POW2: (26.8, 17.9, 13.6, 41.6),
    Policy.MAX: (20.4, 13.3, 57.3, 8.9),
}

# Section 6.2: how much higher a request rate its system sustains on ShareGPT, over the three models.
SUSTAINED = {Policy.ORACLE: (1.7, 2.7), Policy.MAX: (2.7, 8.0)}

# Section 6.4, Fig. 16: throughput against Orca (Oracle) with a shared prefix, by its tokens.
PREFIX = {80: 1.67, 341: 3.58}

# Section 6.5, Fig. 17: rate against all three Orcas in chat with history.
CHAT = 2.0

# Section 6.3, Fig. 15a: percent of blocks saved by parallel sampling of 2, 4 and 6 outputs on Alpaca; on
# ShareGPT the text gives a range.
SAVED = {2: 6.09, 4: 8.53, 6: 9.79}
SAVED_SHAREGPT = (16.2, 30.5)
