"""What is trained: a megatron-core GPTModel with LoRA on its parallel linears, its DDP wrapper and its optimizer.

Knows megatron-core. Does not know regions or the lifecycle: the caller says in which region each of these is built.

The model has RMSNorm, grouped-query attention, SwiGLU and rotary positions, out of the local layer spec (no
Transformer Engine), in FP32, tensor-parallel size 1. Weights are drawn on the CPU, so a seed gives the same model on
every device. bf16 and the distributed optimizer, which exist on CUDA only, are a later step.
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
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
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

    def config(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads,
            ffn_hidden_size=self.ffn,
            normalization="RMSNorm",
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
        share_embeddings_and_output_weights=False,
    )
    if device != "cpu":
        model.to(device)
    if shape.lora_rank:
        model.requires_grad_(False)
        add_lora(model, shape.lora_rank, shape.lora_alpha, seed)
    return model


def add_lora(model: torch.nn.Module, rank: int, alpha: float, seed: int) -> None:
    """Gives each parallel linear but the output layer a trainable `lora_a` [rank, in] and `lora_b` [out, rank].

    The output becomes `W x + alpha/rank * B (A x)`; B starts at zero, so the adapted model starts as the base.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    for linear in parallel_linears(model):
        outputs, inputs = linear.weight.shape
        device = linear.weight.device
        # By factories, which a region captures on `host` too; what an operator returns it does not.
        lora_a, lora_b = torch.empty(rank, inputs, device=device), torch.zeros(outputs, rank, device=device)
        lora_a.copy_(torch.randn(rank, inputs, generator=generator) / inputs**0.5)
        linear.register_parameter("lora_a", torch.nn.Parameter(lora_a))
        linear.register_parameter("lora_b", torch.nn.Parameter(lora_b))
        linear.register_forward_hook(_Lora(alpha / rank))


def parallel_linears(model: torch.nn.Module) -> Iterator[Any]:
    """The linears that LoRA adapts, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and name != OUTPUT_LAYER:
            yield module


@dataclass(frozen=True)
class _Lora:
    """The forward hook of one linear; megatron's linears return (output, bias)."""

    scale: float

    def __call__(self, linear: Any, inputs: tuple[torch.Tensor, ...], result: tuple[Any, Any]) -> tuple[Any, Any]:
        output, bias = result
        delta = torch.nn.functional.linear(torch.nn.functional.linear(inputs[0], linear.lora_a), linear.lora_b)
        return output + self.scale * delta, bias


def wrap(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """The model in megatron's DDP, which makes one fused FP32 gradient buffer over all trainable parameters."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(ddp: DistributedDataParallel, learning_rate: float) -> Any:
    """Megatron's FP32 AdamW over the trainable parameters, its moments already made.

    Adam makes its moments in the first step by itself, outside every region; here they exist from the start.
    """
    config = OptimizerConfig(optimizer="adam", lr=learning_rate, weight_decay=0.01, clip_grad=0.0)
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
