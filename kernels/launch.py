"""What one launch of a Triton kernel is compiled for, as data: read by the ahead-of-time compiler.

Each kernel's module has `launches(architecture)`, which makes its `Launch`es with the code that launches it,
so what is compiled without a device is what runs on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class Launch:
    """One specialisation of one kernel.

    `function` is the `triton.jit` function. `signature` names the Triton type of every parameter that is not
    in `constants`, such as "*bf16" or "i32". `aligned` names the parameters whose value (or address) the
    launcher finds to be a multiple of 16, which is what lets loads and stores be wide.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    note: str = ""
    aligned: frozenset[str] = field(default_factory=frozenset)


def architecture(device: torch.device) -> str:
    """What a kernel on `device` is compiled for: "sm_90", "gfx942", or "interpreter" on a CPU."""
    return INTERPRETER if device.type == "cpu" else _gpu(device.index or 0)


@lru_cache
def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
