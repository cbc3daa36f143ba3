"""What is trained: a megatron-core GPTModel with LoRA on its parallel linears, its DDP wrapper and its optimizer.

Knows megatron-core. Does not know regions or the lifecycle: the caller says in which region each of these is built.

The model has RMSNorm, grouped-query attention, SwiGLU and rotary positions, out of the local layer spec (no
Transformer Engine). Weights are drawn whole on the CPU and then sharded, so a seed gives the same model on every device
and for every tensor-parallel size.

    host    FP32; the optimizer steps the parameters themselves
    cuda    bf16 with FP32 gradients, and megatron's distributed optimizer, which exists on CUDA only: FP32 masters and
            moments, sharded over the data-parallel ranks. Has not run yet; its DDP buffers have, on `host`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

OUTPUT_LAYER = "output_layer"  # a column-parallel linear too, but LoRA leaves the vocabulary projection alone


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model. `lora_rank=0` trains every parameter."""

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 512
    vocabulary: int = 512
    sequence: int = 32
    lora_rank: int = 8
    lora_alpha: float = 16.0
    rope_theta: int = 10000
    rms_eps: float = 1e-5

    def config(self, tensor: int = 1, *, bf16: bool = False) -> TransformerConfig:
        """For a rank of `tensor` tensor-parallel ones; `bf16` brings the distributed optimizer with it."""
        for name in ("heads", "kv_heads", "ffn", "vocabulary"):
            if getattr(self, name) % tensor:
                raise ValueError(f"{name} must be a multiple of the tensor-parallel size {tensor} (got {self})")
        return TransformerConfig(
            tensor_model_parallel_size=tensor,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            ffn_hidden_size=self.ffn,
            normalization="RMSNorm",
            layernorm_epsilon=self.rms_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            # The fused kernels need a GPU or Apex; off on both devices, so that both run the same operations.
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
        )


def build_model(shape: Shape, config: TransformerConfig, device: str, seed: int) -> GPTModel:
    """The model on `device`: with LoRA, a frozen base and trainable adapters; without, everything trainable."""
    torch.manual_seed(seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=False,
    )
    if device != "cpu" or config.bf16:
        model.to(device=device, dtype=config.params_dtype)  # norms are made in FP32 whatever the configuration says
    if shape.lora_rank:
        model.requires_grad_(False)
        add_lora(model, shape.lora_rank, shape.lora_alpha, seed)
    return model


def add_lora(model: torch.nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Gives each parallel linear but the output layer a trainable `lora_a` [rank, in] and `lora_b` [out, rank].

    The output becomes `W x + alpha/rank * B (A x)`; B starts at zero, so the adapted model starts as the base. What is
    sharded is what touches the sharded side of the weight: B of a column-parallel linear, A of a row-parallel one.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    for linear in parallel_linears(model):
        outputs, inputs = linear.weight.shape
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        drawn = torch.randn(rank, linear.input_size, generator=generator) / linear.input_size**0.5
        column = isinstance(linear, ColumnParallelLinear)
        if not column:
            drawn = drawn.chunk(linear.tp_group.size(), dim=1)[linear.tp_group.rank()]
        # By factories, which a region captures on `host` too; what an operator returns it does not.
        lora_a, lora_b = torch.empty(rank, inputs, **like), torch.zeros(outputs, rank, **like)
        lora_a.copy_(drawn)
        linear.register_parameter("lora_a", torch.nn.Parameter(lora_a))
        linear.register_parameter("lora_b", torch.nn.Parameter(lora_b))
        # What megatron asks where it counts a parameter once, as in a gradient norm.
        set_tensor_model_parallel_attributes(linear.lora_b if column else linear.lora_a, True, 0 if column else 1, 1)
        linear.register_forward_hook(_Lora(alpha / rank))


def parallel_linears(model: torch.nn.Module) -> Iterator[Any]:
    """The linears that LoRA adapts, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and name != OUTPUT_LAYER:
            yield module


@dataclass(frozen=True)
class _Lora:
    """The forward hook of one linear; megatron's linears return (output, bias).

    The group is asked of the linear at each call: a rebuild replaces it there. Column-parallel, each rank knows only
    its part of the gradient of `A x`: it is summed there, and thus for A and for x. Row-parallel, each rank has only
    its part of `A x`: it is summed before B, whose product is then whole on every rank.
    """

    scale: float

    def __call__(self, linear: Any, inputs: tuple[torch.Tensor, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
        output, bias = result
        column = isinstance(linear, ColumnParallelLinear)
        meet = copy_to_tensor_model_parallel_region if column else reduce_from_tensor_model_parallel_region
        inner = meet(torch.nn.functional.linear(inputs[0], linear.lora_a), group=linear.tp_group)
        return output + self.scale * torch.nn.functional.linear(inner, linear.lora_b), bias


def wrap(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """The model in megatron's DDP, which makes one fused FP32 gradient buffer over all trainable parameters.

    For the distributed optimizer it makes one of parameters too, and moves them into it.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=config.bf16
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(ddp: DistributedDataParallel, learning_rate: float, *, bf16: bool = False) -> Any:
    """Megatron's AdamW over the trainable parameters, or over its share of their masters, its moments already made.

    Adam makes its moments in the first step by itself, outside every region; here they exist from the start.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        weight_decay=0.01,
        clip_grad=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=bf16,
    )
    chain: Any = get_megatron_optimizer(config, [ddp])
    [optimizer] = chain.chained_optimizers  # dense parameters only; the chain itself wants a gradient norm, on CUDA
    optimizer.init_state_fn(optimizer.optimizer, config)
    for parameter in optimizer.get_parameters():
        optimizer.optimizer.state[parameter].setdefault("step", _host_counter())
    return optimizer


def seed_cuda(seed: int) -> None:
    """Megatron's own RNG tracker, which needs a GPU and the groups; `cpu_shims` puts a stand-in there on the CPU."""
    model_parallel_cuda_manual_seed(seed)


def _host_counter() -> torch.Tensor:
    """A step counter in plain host memory, where torch's Adam keeps it; nothing places what `from_numpy` returns."""
    return torch.from_numpy(numpy.zeros((), dtype=numpy.float32))
