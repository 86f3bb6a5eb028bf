"""The Llama architecture: RMSNorm, grouped-query attention with rotary positions, SwiGLU, the head tied or not.

All tokens of a step go through every matrix as one product, whichever sequence they belong to; only attention tells the
sequences apart. Query, key and value share one product, gate and up another. The residual stream, the norms and the
rotation are float32 whatever the type of the weights: rounding a running sum of sixty terms to bfloat16 costs more
accuracy than all the products together.

Rotation pairs element i of a head with element i + head_dim / 2. GGUF files store query and key rows for pairing
neighbours instead; the rows are put back in order when they are loaded.

Touvron et al., "Llama 2", 2023, https://arxiv.org/abs/2307.09288; Su et al., "RoFormer", 2021,
https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

from engine.models.base import ModelShape
from engine.models.linear import Linear

if TYPE_CHECKING:
    from engine.attention.base import AttentionBackend, PagedLayout
    from engine.weights.gguf import GGUFFile
    from kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """A Llama model's sizes and constants."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Self:
        """Reads it from a file's metadata.

        Raises:
            ModelLoadError: A key is missing, contradicts another, or asks for something this code does not do.
        """
        hidden = file.integer("llama.embedding_length")
        heads = file.integer("llama.attention.head_count")
        if heads < 1 or hidden < 1:
            raise file.error(f"has {heads} heads and a hidden size of {hidden}")
        head_dim = file.integer("llama.attention.key_length", hidden // heads)
        config = cls(
            layers=file.integer("llama.block_count"),
            hidden=hidden,
            feed_forward=file.integer("llama.feed_forward_length"),
            heads=heads,
            kv_heads=file.integer("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=file.integer("llama.vocab_size", 0) or len(file.strings("tokenizer.ggml.tokens")),
            context_length=file.integer("llama.context_length"),
            rope_base=file.number("llama.rope.freq_base", 10000.0),
            norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
        )
        _refuse_unsupported(file, config)
        return config


def _refuse_unsupported(file: GGUFFile, config: LlamaConfig) -> None:
    sizes = (config.layers, config.feed_forward, config.kv_heads, config.vocab_size, config.context_length)
    if min(sizes) < 1 or config.head_dim < 2 or config.head_dim % 2 or config.heads % config.kv_heads:
        raise file.error(f"has sizes that do not fit together: {config}")
    if file.integer("llama.attention.value_length", config.head_dim) != config.head_dim:
        raise file.error(
            "has values and keys of different widths (llama.attention.value_length), which is not supported"
        )
    if file.integer("llama.rope.dimension_count", config.head_dim) != config.head_dim:
        raise file.error("rotates only part of each head (llama.rope.dimension_count), which is not supported")
    # A factor without a type means linear scaling, under the key's old name and its new one.
    factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 1.0))
    scaling = file.string("llama.rope.scaling.type", "none" if factor == 1.0 else "linear")
    if scaling != "none":
        raise file.error(f"has rope scaling type {scaling!r} (llama.rope.scaling.type), which is not supported")
    if file.has_tensor("rope_freqs.weight"):
        raise file.error("has rope frequency factors (tensor rope_freqs.weight), which are not supported")
    if file.integer("llama.expert_count", 0):
        raise file.error("is a mixture of experts (llama.expert_count), which is not supported")
    if not file.boolean("llama.attention.causal", True):
        raise file.error("has attention that is not causal (llama.attention.causal), which is not supported")


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    feed_forward_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """A Llama model's weights and forward pass; see ``engine.models.base.Model``."""

    def __init__(
        self, config: LlamaConfig, embedding: torch.Tensor, layers: tuple[_Layer, ...], norm: torch.Tensor, head: Linear
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = 1.0 / config.rope_base**exponents

    @classmethod
    def from_gguf(cls, file: GGUFFile, dtype: torch.dtype) -> LlamaModel:
        """Loads it from a file; the head is the embedding where the file has no tensor ``output.weight``.

        Args:
            file: The file. ``require_all_read`` holds afterwards if it has nothing but a Llama model.
            dtype: float32 or bfloat16.

        Raises:
            ModelLoadError: Something is missing, misshapen or not supported.
        """
        config = LlamaConfig.from_gguf(file)
        hidden = config.hidden
        embedding = file.tensor("token_embd.weight", (config.vocab_size, hidden), dtype)
        # GGUF has no flag for a tied head: a model is tied exactly if its file leaves the head out.
        untied = file.has_tensor("output.weight")
        head = file.tensor("output.weight", (config.vocab_size, hidden), dtype) if untied else embedding
        layers = tuple(_load_layer(file, config, index, dtype) for index in range(config.layers))
        return cls(config, embedding, layers, file.tensor("output_norm.weight", (hidden,)), Linear(head))

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        config = self.config
        return ModelShape(config.vocab_size, config.context_length, config.layers, config.kv_heads, config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, keys and values."""
        return self._embedding.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        pool: KVPool,
        layout: PagedLayout,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """See ``engine.models.base.Model.forward``."""
        config = self.config
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        rotated_heads = heads + kv_heads
        cos, sin = self._rotation(positions)
        residual = functional.embedding(token_ids, self._embedding).float()
        attended = torch.empty(len(token_ids), heads, head_dim, dtype=self.dtype, device=residual.device)
        for layer, keys, values in zip(self._layers, pool.keys, pool.values, strict=True):
            qkv = layer.qkv(self._normalise(residual, layer.attention_norm)).view(-1, heads + 2 * kv_heads, head_dim)
            halves = qkv[:, :rotated_heads].view(-1, rotated_heads, 2, head_dim // 2)
            rotated = (halves * cos).addcmul_(halves.flip(2), sin).flatten(2).to(self.dtype)
            keys.view(-1, kv_heads, head_dim).index_copy_(0, slots, rotated[:, heads:])
            values.view(-1, kv_heads, head_dim).index_copy_(0, slots, qkv[:, rotated_heads:])
            query = rotated[:, :heads].contiguous()
            attention.attend(attended, query, keys, values, layout, head_dim**-0.5)
            residual += layer.attention_out(attended.flatten(1))
            gate, up = layer.gate_up(self._normalise(residual, layer.feed_forward_norm)).chunk(2, dim=1)
            residual += layer.down(functional.silu(gate.float()).mul_(up).to(self.dtype))
        return self._normalise(residual, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``engine.models.base.Model.logits``."""
        return self._head(hidden).float()

    def _normalise(self, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(residual, weight.shape, weight, self.config.norm_epsilon).to(self.dtype)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, float32[T, 1, 2, head_dim / 2], for the two halves of every head."""
        angles = torch.outer(positions.float(), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1)


def _load_layer(file: GGUFFile, config: LlamaConfig, index: int, dtype: torch.dtype) -> _Layer:
    hidden, head_dim = config.hidden, config.head_dim

    def matrix(name: str, rows: int, columns: int) -> torch.Tensor:
        return file.tensor(f"blk.{index}.{name}.weight", (rows, columns), dtype)

    def rotated(name: str, heads: int) -> torch.Tensor:
        weight = matrix(name, heads * head_dim, hidden)
        return weight.view(heads, head_dim // 2, 2, hidden).transpose(1, 2).reshape(weight.shape)

    query, key = rotated("attn_q", config.heads), rotated("attn_k", config.kv_heads)
    value = matrix("attn_v", config.kv_heads * head_dim, hidden)
    gate, up = (matrix(name, config.feed_forward, hidden) for name in ("ffn_gate", "ffn_up"))
    return _Layer(
        attention_norm=file.tensor(f"blk.{index}.attn_norm.weight", (hidden,)),
        qkv=Linear(torch.cat((query, key, value))),
        attention_out=Linear(matrix("attn_output", hidden, config.heads * head_dim)),
        feed_forward_norm=file.tensor(f"blk.{index}.ffn_norm.weight", (hidden,)),
        gate_up=Linear(torch.cat((gate, up))),
        down=Linear(matrix("ffn_down", hidden, config.feed_forward)),
    )
