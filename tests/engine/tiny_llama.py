"""A Llama small enough for a test: random weights, the GGUF file that holds them, and transformers' own model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 32, 64, 4, 2, 8, 96, 128
EPSILON, ROPE_BASE = 1e-5, 10000.0

Array = np.ndarray[Any, np.dtype[np.float32]]


def random_tensors(seed: int = 0, *, head: bool = False) -> dict[str, Array]:
    """Tensors under their GGUF names, with query and key rows in the order of transformers: halves of each head."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(0, 0.2, (rows, columns)).astype(np.float32)

    def norm() -> Array:
        return rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": norm()}
    if head:
        tensors["output.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": norm() for name in ("attn_norm", "ffn_norm")}
    return tensors


@dataclass
class TinyFile:
    """What to write: tensors, and metadata where it differs from the usual. A value of None leaves the key out."""

    tensors: dict[str, Array] = field(default_factory=random_tensors)
    metadata: dict[str, Any] = field(default_factory=dict)
    architecture: str = "llama"

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        usual = {
            "llama.block_count": LAYERS,
            "llama.context_length": CONTEXT,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": FEED_FORWARD,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.layer_norm_rms_epsilon": EPSILON,
            "llama.rope.freq_base": ROPE_BASE,
            "llama.vocab_size": VOCAB,
        }
        for key, value in (usual | self.metadata).items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(_neighbours(name, tensor)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _neighbours(name: str, tensor: Array) -> Array:
    """Query and key rows as GGUF keeps them: row i of a head's first half next to row i of its second."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None or tensor.ndim != 2 or len(tensor) % (2 * heads):
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def reference_logits(tensors: dict[str, Array], ids: list[int]) -> torch.Tensor:
    """What transformers computes in float32 from the same tensors: float32[len(ids), VOCAB]."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=EPSILON,
        rope_theta=ROPE_BASE,
        tie_word_embeddings="output.weight" not in tensors,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    load_llama(model, {name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def load_llama(model: LlamaForCausalLM, tensors: dict[str, torch.Tensor]) -> None:
    """Fills transformers' model with tensors under their GGUF names, rows in the order of transformers."""
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    state = {}
    for name, tensor in tensors.items():
        if name in outer:
            state[outer[name]] = tensor
        else:
            _, layer, kind, _ = name.split(".")
            state[f"model.layers.{layer}.{names[kind]}.weight"] = tensor
    if "output.weight" not in tensors:
        state["lm_head.weight"] = tensors["token_embd.weight"]
    model.load_state_dict(state, strict=True)
