"""One decoder for the Llama family, driven by its config, over a flat batch of tokens and a paged KV cache.

Pre-norm residual layers of grouped-query attention and a gated SiLU network (Touvron et al., "LLaMA", 2023).
Projections that read the same input are fused: q, k, v into one matrix, gate and up into another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.models.config import ModelConfig
from kernels.dispatch import Attention


@dataclass(slots=True, frozen=True)
class Batch:
    """The flat tokens of one step."""

    ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, in their sequences
    attention: Attention


@dataclass(slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]

    @classmethod
    def empty(
        cls, outputs: int, inputs: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Linear:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return cls(weight, torch.empty(outputs, dtype=dtype, device=device) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    """Weights of one layer, fused."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # to (heads + 2 kv_heads) * head_dim: queries, keys, values
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Linear
    post_norm: Tensor  # [hidden]
    gate_up: Linear  # to 2 * intermediate: gate, up
    down: Linear
    window: int | None
    rotated: bool


class Decoder:
    """The model. Its weights are allocated here, once, in their final type, and filled by a loader."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = self._vector(config.vocab_size, config.hidden)
        self.layers = [self._layer(index) for index in range(config.layers)]
        self.norm = self._vector(config.hidden)
        head = self.embedding if config.tied else self._vector(config.vocab_size, config.hidden)
        self.head = Linear(head, None)
        self._frequencies = config.rope.frequencies(config.head_dim).to(device)

    def _vector(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _linear(self, outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear.empty(outputs, inputs, bias, self.dtype, self.device)

    def _layer(self, index: int) -> Layer:
        c = self.config
        attended, kept = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Layer(
            input_norm=self._vector(c.hidden),
            qkv=self._linear(attended + 2 * kept, c.hidden, c.qkv_bias),
            query_norm=self._vector(c.head_dim) if c.qk_norm else None,
            key_norm=self._vector(c.head_dim) if c.qk_norm else None,
            output=self._linear(c.hidden, attended, c.output_bias),
            post_norm=self._vector(c.hidden),
            gate_up=self._linear(2 * c.intermediate, c.hidden, c.mlp_bias),
            down=self._linear(c.hidden, c.intermediate, c.mlp_bias),
            window=c.windows[index],
            rotated=c.rotated[index],
        )

    def parameters(self) -> dict[str, Tensor]:
        """Every weight under its Hugging Face name, as a view of where it is to be written."""
        c = self.config
        attended, kept = c.heads * c.head_dim, c.kv_heads * c.head_dim
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not c.tied:
            named["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            at = f"model.layers.{index}."
            named[at + "input_layernorm.weight"] = layer.input_norm
            named[at + "post_attention_layernorm.weight"] = layer.post_norm
            if layer.query_norm is not None and layer.key_norm is not None:
                named[at + "self_attn.q_norm.weight"] = layer.query_norm
                named[at + "self_attn.k_norm.weight"] = layer.key_norm
            parts = (
                (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                (layer.output, ("self_attn.o_proj",)),
                (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
                (layer.down, ("mlp.down_proj",)),
            )
            for linear, names in parts:
                equal = [linear.weight.shape[0] // len(names)] * len(names)
                sizes = [attended, kept, kept] if len(names) == 3 else equal
                for name, weight in zip(names, torch.split(linear.weight, sizes), strict=True):
                    named[f"{at}{name}.weight"] = weight
                if linear.bias is not None:
                    for name, bias in zip(names, torch.split(linear.bias, sizes), strict=True):
                        named[f"{at}{name}.bias"] = bias
        return named

    def forward(self, batch: Batch, keys: Tensor, values: Tensor) -> Tensor:
        """Compute a flat batch, writing its K and V.

        Args:
            keys: [layers, num_blocks, block_size, kv_heads, head_dim].
            values: as keys.

        Returns:
            [tokens, hidden]: the residual stream after the last layer, before the last norm.
        """
        batch.attention.begin(*self._angles(batch.positions))
        x = F.embedding(batch.ids, self.embedding)
        for index, layer in enumerate(self.layers):
            normed = self._normed(x, layer.input_norm)
            x = x + self._attention(layer, normed, batch.attention, keys[index], values[index])
            gate, up = layer.gate_up(self._normed(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[rows, vocab] float32 from [rows, hidden] of `forward`'s result."""
        return self.head(self._normed(x, self.norm)).float()

    def _attention(
        self,
        layer: Layer,
        x: Tensor,  # [tokens, hidden]
        attention: Attention,
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,
    ) -> Tensor:  # [tokens, hidden]
        c = self.config
        heads = layer.qkv(x).view(len(x), c.heads + 2 * c.kv_heads, c.head_dim)
        turning, value = torch.split(heads, [c.heads + c.kv_heads, c.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = torch.split(turning, [c.heads, c.kv_heads], dim=1)
            query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
            turning = torch.cat((query, key), dim=1)
        attended = attention.attend(
            turning,
            value,
            keys,
            values,
            rotated=layer.rotated,
            window=layer.window,
            scale=c.head_dim**-0.5,
        )
        return layer.output(attended.reshape(len(x), -1))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's angles: each [tokens, head_dim / 2] float32."""
        angles = positions[:, None].float() * self._frequencies
        factor = self.config.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor
