"""What one launch of a Triton kernel is compiled for, as data: read by the ahead-of-time compiler.

Each kernel's module has `launches(architecture)`, which makes its `Launch`es with the code that launches it,
so what is compiled without a device is what runs on one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# For AMD, Triton makes another kind of each kernel for each mixture of tensors above and below 2 GiB, so that
# small ones may be read with offsets of 32 bits. Offsets here are of 64: nothing is lost without.
os.environ.setdefault("AMDGCN_USE_BUFFER_OPS", "0")

INTERPRETER = "interpreter"
_POINTED = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


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

    @property
    def key(self) -> str:
        """The same for launches that one compiled kernel serves, on one architecture."""
        return repr(
            (
                self.name,
                sorted(self.signature.items()),
                sorted((name, repr(value)) for name, value in self.constants.items()),
                self.num_warps,
                self.num_stages,
                sorted(self.aligned),
            )
        )


def architecture(device: torch.device) -> str:
    """What a kernel on `device` is compiled for: "sm_90", "gfx942", or "interpreter" on a CPU."""
    return INTERPRETER if device.type == "cpu" else _gpu(device.index or 0)


@lru_cache
def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel with all it is called with: run it, or describe what it would be compiled for."""

    function: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Tensor | int | float | None]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        self.function[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
        )

    def describe(self, note: str) -> Launch:
        """Mirrors what Triton specialises on: None and 1 are constants, multiples of 16 are known as such."""
        varied = _exempt(self.function, "do_not_specialize")
        anywhere = _exempt(self.function, "do_not_specialize_on_alignment")
        signature: dict[str, str] = {}
        constants = dict(self.constants)
        aligned: set[str] = set()
        for name, value in self.arguments.items():
            if value is None or (isinstance(value, int) and value == 1 and name not in varied):
                constants[name] = value
                continue
            signature[name] = _type(value)
            if isinstance(value, Tensor):
                if name not in anywhere and _address(value) % 16 == 0:
                    aligned.add(name)
            elif isinstance(value, int) and value % 16 == 0 and name not in varied:
                aligned.add(name)
        return Launch(
            self.function.fn.__name__.lstrip("_"),
            self.function,
            signature,
            constants,
            self.num_warps,
            self.num_stages,
            note,
            frozenset(aligned),
        )


def _address(tensor: Tensor) -> int:
    """Of its first element, modulo 16: memory of its own begins at a multiple of that."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


def _exempt(function: Any, kind: str) -> frozenset[str]:
    """Parameters that a kernel, compiled or interpreted, keeps out of one kind of specialisation."""
    given = getattr(function, "kwargs", {}).get(kind) or getattr(function, kind, None)
    return frozenset(given or ())


def short(dtype: torch.dtype) -> str:
    """A type's name for a note: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _type(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        return "*" + _POINTED[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
