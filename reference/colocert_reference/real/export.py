"""What the engine loads, out of what megatron-core trains: Hugging Face's Llama names, and PEFT's for the adapter.

Knows how megatron fuses and shards. Does not know who receives the tensors or how they travel.

    linear_qkv   rows in groups, one a KV head: [its query heads, its key, its value]   -> q_proj, k_proj, v_proj
    linear_fc1   on each rank its rows of the gate, then its rows of `up`               -> gate_proj, up_proj
    linear_proj, linear_fc2, norms, embedding, output layer: renamed

A LoRA delta is fused as its weight is: B's rows are the weight's rows, and one A serves all the projections that a
fused linear splits into, so each of them gets a copy of it.

What is returned lies in plain host memory, whole, contiguous, each tensor in memory of its own. Under tensor
parallelism each rank first splits its shard and then the parts are gathered: every rank calls, every rank gets all.
Only what is asked for is read: the adapter can be exported while the base is released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from colocert_reference.real.model import Shape

Gather = Callable[[torch.Tensor, int], torch.Tensor]
"""The whole tensor out of this rank's shard and the dimension along which it is sharded."""
Tensors = Mapping[str, torch.Tensor]
"""Where values are read: tensors by megatron's names, such as host backups of released parameters."""

FUSED = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Column-parallel linears: sharded by rows, A replicated and B sharded."""
SINGLE = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
"""Row-parallel linears: sharded by columns, A sharded and B replicated."""
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
ROWS, COLUMNS = 0, 1
PEFT = "base_model.model."


def llama_sizes(shape: Shape) -> dict[str, Any]:
    """The arguments that make an engine's `LlamaShape` the same model. Its caches (`slots`, `length`) are its own."""
    shared = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "rope_theta", "rms_eps")
    lora = ("lora_rank", "lora_alpha") if shape.lora_rank else ()
    return {name: getattr(shape, name) for name in (*shared, *lora)}


def base_state(
    gpt: torch.nn.Module, shape: Shape, *, tensors: Tensors | None = None, gather: Gather | None = None
) -> dict[str, torch.Tensor]:
    """Every base parameter, by the names of Hugging Face's Llama."""
    read, whole = tensors or dict(gpt.named_parameters()), gather or _over_the_group(gpt)
    state = {
        "model.embed_tokens.weight": whole(read["embedding.word_embeddings.weight"], ROWS),
        "model.norm.weight": read["decoder.final_layernorm.weight"],
        "lm_head.weight": whole(read["output_layer.weight"], ROWS),
    }
    for layer in range(shape.layers):
        there, here = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for norm, name in NORMS.items():
            state[f"{here}{name}.weight"] = read[f"{there}{norm}.weight"]
        for linear in FUSED:
            for name, rows in split(linear, read[f"{there}{linear}.weight"], shape).items():
                state[f"{here}{name}.weight"] = whole(rows, ROWS)
        for linear, name in SINGLE.items():
            state[f"{here}{name}.weight"] = whole(read[f"{there}{linear}.weight"], COLUMNS)
    return {name: _copied(tensor) for name, tensor in state.items()}


def adapter_state(
    gpt: torch.nn.Module, shape: Shape, *, tensors: Tensors | None = None, gather: Gather | None = None
) -> dict[str, torch.Tensor]:
    """The adapter, by the names under which PEFT keeps it. Reads parameters of the adapter only."""
    if not shape.lora_rank:
        raise ValueError("an adapter is exported from a model with LoRA (got lora_rank=0): export its base")
    read, whole = tensors or dict(gpt.named_parameters()), gather or _over_the_group(gpt)
    state = {}
    for layer in range(shape.layers):
        there, here = f"decoder.layers.{layer}.", f"{PEFT}model.layers.{layer}."
        for linear in FUSED:
            for name, rows in split(linear, read[f"{there}{linear}.lora_b"], shape).items():
                state[f"{here}{name}.lora_A.weight"] = read[f"{there}{linear}.lora_a"]
                state[f"{here}{name}.lora_B.weight"] = whole(rows, ROWS)
        for linear, name in SINGLE.items():
            state[f"{here}{name}.lora_A.weight"] = whole(read[f"{there}{linear}.lora_a"], COLUMNS)
            state[f"{here}{name}.lora_B.weight"] = read[f"{there}{linear}.lora_b"]
    return {name: _copied(tensor) for name, tensor in state.items()}


def split(linear: str, rows: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """The rows of each projection, out of those of a fused linear, whole or one rank's."""
    parts = split_qkv(rows, shape) if linear.endswith("linear_qkv") else split_gate_up(rows)
    return dict(zip(FUSED[linear], parts, strict=True))


def split_qkv(rows: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Query, key and value rows."""
    queries, head = shape.heads // shape.kv_heads, shape.hidden // shape.heads
    grouped = rows.unflatten(0, (-1, queries + 2, head))
    parts = grouped.split([queries, 1, 1], dim=1)
    return tuple(part.flatten(0, 2) for part in parts)


def split_gate_up(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gate and up rows; megatron puts the activation on the first half."""
    return rows.chunk(2, dim=0)


def _over_the_group(gpt: Any) -> Gather:
    """By megatron's tensor-parallel group, which a model of one rank does without."""
    if gpt.config.tensor_model_parallel_size == 1:
        return lambda shard, dim: shard

    def whole(shard: torch.Tensor, dim: int) -> torch.Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        own = shard.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, dim=dim)

    return whole


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
