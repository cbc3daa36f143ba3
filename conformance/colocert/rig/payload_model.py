"""The small model of the sync-payload profile: its shape, its two layouts, and the way from one to the other.

Knows the trainer's layout (fused linears, as megatron-core has them), the engine's (Hugging Face names) and PEFT's
names for an adapter. Does not know who holds the tensors. torch is imported by the functions that make or join
tensors; everything else is names and numbers.

    trainer                                       shape            engine
    decoder.layers.N.self_attention.linear_qkv    [(H+2G)D, E]     model.layers.N.self_attn.{q,k,v}_proj
    decoder.layers.N.self_attention.linear_proj   [E, HD]          model.layers.N.self_attn.o_proj
    decoder.layers.N.mlp.linear_fc1               [2F, E]          model.layers.N.mlp.{gate,up}_proj
    decoder.layers.N.mlp.linear_fc2               [E, F]           model.layers.N.mlp.down_proj
    embedding.word_embeddings                     [V, E]           model.embed_tokens
    decoder.final_layernorm                       [E]              model.norm

`linear_qkv` holds for each of the G key groups the rows of its H/G query heads, then its key, then its value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Shape:
    """Sizes, as elements. The scale of an adapter is `alpha / rank`, not a power of two."""

    layers: int = 2
    hidden: int = 48
    heads: int = 4
    groups: int = 2
    head: int = 12
    ffn: int = 64
    vocabulary: int = 32
    rank: int = 4
    alpha: float = 6.0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


SHAPE = Shape()
OUTSIDE = "decoder.final_layernorm.weight"
"""The tensor that trains beside the adapters where `rig.config.outside` says so."""


def linears(shape: Shape = SHAPE) -> Iterator[tuple[str, int, int]]:
    """The linears that have an adapter: name, rows, columns."""
    qkv = (shape.heads + 2 * shape.groups) * shape.head
    for layer in range(shape.layers):
        at = f"decoder.layers.{layer}"
        yield f"{at}.self_attention.linear_qkv", qkv, shape.hidden
        yield f"{at}.self_attention.linear_proj", shape.hidden, shape.heads * shape.head
        yield f"{at}.mlp.linear_fc1", 2 * shape.ffn, shape.hidden
        yield f"{at}.mlp.linear_fc2", shape.hidden, shape.ffn


def base_shapes(shape: Shape = SHAPE) -> dict[str, tuple[int, ...]]:
    """Every tensor of the base in the trainer's layout."""
    return {
        "embedding.word_embeddings.weight": (shape.vocabulary, shape.hidden),
        **{f"{name}.weight": (rows, columns) for name, rows, columns in linears(shape)},
        OUTSIDE: (shape.hidden,),
    }


def slots(shape: Shape = SHAPE) -> dict[str, tuple[int, tuple[int, int]]]:
    """Where each tensor of an adapter lies in its fused buffer: name to offset and shape, in elements."""
    found: dict[str, tuple[int, tuple[int, int]]] = {}
    offset = 0
    for name, rows, columns in linears(shape):
        for part, dims in (("lora_a", (shape.rank, columns)), ("lora_b", (rows, shape.rank))):
            found[f"{name}.{part}"] = (offset, dims)
            offset += dims[0] * dims[1]
    return found


def buffer_length(shape: Shape = SHAPE) -> int:
    """Elements of one adapter's fused buffer."""
    offset, (rows, columns) = list(slots(shape).values())[-1]
    return offset + rows * columns


def _qkv_rows(shape: Shape) -> dict[str, list[range]]:
    """Which rows of `linear_qkv` belong to the queries, the keys and the values."""
    found: dict[str, list[range]] = {"q": [], "k": [], "v": []}
    start = 0
    for _ in range(shape.groups):
        for kind, heads in (("q", shape.heads // shape.groups), ("k", 1), ("v", 1)):
            found[kind].append(range(start, start + heads * shape.head))
            start += heads * shape.head
    return found


def parts(linear: str, shape: Shape = SHAPE) -> dict[str, list[range] | None]:
    """The engine's modules that a fused linear holds, each with its rows (None: all of them)."""
    *_, layer, owner, kind = linear.split(".")
    if kind == "linear_qkv":
        return {f"model.layers.{layer}.self_attn.{k}_proj": rows for k, rows in _qkv_rows(shape).items()}
    if kind == "linear_fc1":
        half = {"gate": range(shape.ffn), "up": range(shape.ffn, 2 * shape.ffn)}
        return {f"model.layers.{layer}.mlp.{k}_proj": [rows] for k, rows in half.items()}
    name = "self_attn.o_proj" if owner == "self_attention" else "mlp.down_proj"
    return {f"model.layers.{layer}.{name}": None}


def _pick(weight: Any, rows: list[range] | None) -> Any:
    """These rows of a weight, in new memory; the weight itself for None."""
    if rows is None:
        return weight
    import torch

    return torch.cat([weight[part.start : part.stop] for part in rows])


def to_engine(base: Mapping[str, Any], shape: Shape = SHAPE) -> dict[str, Any]:
    """The base in the engine's layout, of new memory where rows are picked."""
    found: dict[str, Any] = {"model.embed_tokens.weight": base["embedding.word_embeddings.weight"]}
    for linear, _, _ in linears(shape):
        weight = base[f"{linear}.weight"]
        for module, rows in parts(linear, shape).items():
            found[f"{module}.weight"] = _pick(weight, rows)
    found["model.norm.weight"] = base[OUTSIDE]
    return found


def to_peft(tensors: Mapping[str, Any], shape: Shape = SHAPE) -> dict[str, Any]:
    """An adapter's tensors, by slot name, under PEFT's names: `lora_A` [rank, in] and `lora_B` [out, rank]."""
    found: dict[str, Any] = {}
    for linear, _, _ in linears(shape):
        lora_a, lora_b = tensors[f"{linear}.lora_a"], tensors[f"{linear}.lora_b"]
        for module, rows in parts(linear, shape).items():
            found[f"{PEFT_PREFIX}{module}.lora_A.weight"] = lora_a
            found[f"{PEFT_PREFIX}{module}.lora_B.weight"] = _pick(lora_b, rows)
    return found


def views(buffer: Any, shape: Shape = SHAPE) -> dict[str, Any]:
    """The tensors of an adapter as views of its fused buffer."""
    return {
        name: buffer[offset : offset + rows * columns].view(rows, columns)
        for name, (offset, (rows, columns)) in slots(shape).items()
    }


def merged(base: Mapping[str, Any], tensors: Mapping[str, Any], shape: Shape = SHAPE) -> dict[str, Any]:
    """The base with one adapter's delta added, in the trainer's layout, in new memory where there is a delta."""
    found = dict(base)
    for linear, _, _ in linears(shape):
        delta = shape.scale * (tensors[f"{linear}.lora_b"] @ tensors[f"{linear}.lora_a"])
        found[f"{linear}.weight"] = base[f"{linear}.weight"] + delta
    return found
