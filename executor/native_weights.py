"""A model's weights, packed as the native step wants them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from executor.load import LoadedModel
from executor.models.decoder import Linear
from executor.quantize import Narrow, Quantised, Weights, narrow, of_floats, stacked
from kernels.cpu import native

_EMBEDDING = "model.embed_tokens"
_AT_ONCE = 2048  # rows brought to 8 bits at a time


class NativeWeights:
    """Copies of a model's weights as the step wants them."""

    def __init__(
        self, library: native.Library, loaded: LoadedModel, weights: Weights, *, keep: bool
    ) -> None:
        self._library = library
        self._loaded = loaded
        self._weights = weights
        self._file = loaded.file if weights == "file" else None
        self._arena = native.Arena()
        self._wide = loaded.model.dtype == torch.float32
        self._keep = keep
        self.owned: list[object] = []  # what the addresses given out point into

    def vector(self, values: Tensor | None, *names: str) -> int | None:
        """Address of a float32 copy, padded with 0 to whole panels.

        Args:
            names: of its parts, as Hugging Face has them.
        """
        if values is None:
            return None
        return self._padded(self._as_stored(values, names))

    def _as_stored(self, values: Tensor, names: Sequence[str]) -> Tensor:
        file, config = self._file, self._loaded.config
        parts = [file.vector(name, config) for name in names] if file else []
        given = [part for part in parts if part is not None]
        return torch.cat(given) if given and len(given) == len(parts) else values

    def _padded(self, values: Tensor) -> int:
        flat = values.float().numpy(force=True).ravel()
        out = np.zeros(-(-len(flat) // self._library.panel) * self._library.panel, np.float32)
        out[: len(flat)] = flat
        self.owned.append(out)
        return out.ctypes.data

    def matrix(self, weight: Tensor, *, pairs: bool = False) -> int:
        """Address of a packed copy of [outputs, inputs]."""
        own = weight.contiguous()
        packed = self._library.pack(
            self._arena, own.data_ptr(), *own.shape, wide=self._wide, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def linear(self, linear: Linear, names: Sequence[str], *, pairs: bool = False) -> native.Linear:
        """Packed; the original is dropped.

        Args:
            names: of its parts, as Hugging Face has them, without `.weight` and `.bias`.
        """
        scales = None
        if (eight := self._narrow(linear)) is not None:
            form, address = native.Form.W8A8, self._packed_narrow(eight, pairs=pairs)
            scales = self._by_column(torch.from_numpy(eight.scales), pairs=pairs)
        elif (quantised := self._quantised(linear, names)) is not None:
            form, address = quantised.form, self._packed(quantised, pairs=pairs)
        else:
            form, address = native.Form.UNITS, self.matrix(linear.weight, pairs=pairs)
        bias = linear.bias
        if bias is not None:
            bias = self._as_stored(bias, [f"{name}.bias" for name in names])
        if not self._keep:
            linear.weight = torch.empty(0)
        held = None if bias is None else self._by_column(bias, pairs=pairs)
        return native.Linear(address, held, scales, form)

    def embedding(self, embedding: Tensor) -> tuple[native.Form, int]:
        """Form and address of a row-major copy."""
        raw = self._file.rows_of_bytes(f"{_EMBEDDING}.weight") if self._file else None
        if raw is None:
            rows = embedding.contiguous()
            self.owned.append(rows)
            return native.Form.UNITS, rows.data_ptr()
        if not self._keep:
            self._loaded.model.embedding = torch.empty(0)
        copied = self._arena.take(raw.nbytes)
        copied[:] = raw.ravel()
        self.owned.append(copied)
        return native.Form.BYTES, copied.ctypes.data

    def _narrow(self, linear: Linear) -> Narrow | None:
        if self._weights != "w8a8":
            return None
        parts = torch.split(linear.weight, _AT_ONCE)
        made = [narrow(part.float().numpy(force=True)) for part in parts]
        given = [part for part in made if part is not None]
        if len(given) < len(made):
            return None
        return Narrow(
            np.concatenate([part.weight for part in given]),
            np.concatenate([part.scales for part in given]),
        )

    def _quantised(self, linear: Linear, names: Sequence[str]) -> Quantised | None:
        if self._weights == "int8":
            parts = torch.split(linear.weight, _AT_ONCE)
            return stacked([of_floats(part.float().numpy(force=True)) for part in parts])
        if self._file is None:
            return None
        config = self._loaded.config
        return stacked([self._file.quantised(f"{name}.weight", config) for name in names])

    def _packed(self, matrix: Quantised, *, pairs: bool) -> int:
        packed = self._library.pack_groups(
            self._arena, matrix.form, matrix.weight, matrix.scales, matrix.offsets, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def _packed_narrow(self, matrix: Narrow, *, pairs: bool) -> int:
        outputs, inputs = matrix.weight.shape
        packed = self._library.pack(
            self._arena, matrix.weight.ctypes.data, outputs, inputs // 4, wide=True, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def _by_column(self, values: Tensor, *, pairs: bool) -> int:
        """Address of a float32 for each column, in packed order."""
        return self._padded(self._in_turns(values) if pairs else values)

    def _in_turns(self, values: Tensor) -> Tensor:
        """Gates and their partners as vectors in turn, each half padded to whole vectors."""
        lanes = self._library.lanes
        halves = values.float().view(2, -1)
        padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % lanes))
        return padded.view(2, -1, lanes).transpose(0, 1).reshape(-1)


def model_of(
    loaded: LoadedModel, weights: NativeWeights, block_size: int, num_blocks: int
) -> native.Model:
    """All but the threads and the KV memory."""
    config, decoder = loaded.config, loaded.model
    layers = (native.Layer * config.layers)()
    for index, layer in enumerate(decoder.layers):
        at = f"model.layers.{index}"
        layers[index] = native.Layer(
            weights.vector(layer.input_norm, f"{at}.input_layernorm.weight"),
            weights.vector(layer.post_norm, f"{at}.post_attention_layernorm.weight"),
            weights.vector(layer.query_norm, f"{at}.self_attn.q_norm.weight"),
            weights.vector(layer.key_norm, f"{at}.self_attn.k_norm.weight"),
            weights.linear(layer.qkv, [f"{at}.self_attn.{part}_proj" for part in "qkv"]),
            weights.linear(layer.output, [f"{at}.self_attn.o_proj"]),
            weights.linear(layer.gate_up, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], pairs=True),
            weights.linear(layer.down, [f"{at}.mlp.down_proj"]),
            layer.window or 0,
            layer.rotated,
        )
    form, embedding = weights.embedding(decoder.embedding)
    head = weights.linear(decoder.head, [_EMBEDDING if config.tied else "lm_head"])
    weights.owned.append(layers)
    return native.Model(
        wide=decoder.dtype == torch.float32,
        hidden=config.hidden,
        intermediate=config.intermediate,
        vocab=config.vocab_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        blocks=num_blocks,
        epsilon=config.norm_epsilon,
        scale=config.head_dim**-0.5,
        embedding_form=form,
        embedding=embedding,
        norm=weights.vector(decoder.norm, "model.norm.weight"),
        head=head,
        layer=ctypes.addressof(layers),
    )
