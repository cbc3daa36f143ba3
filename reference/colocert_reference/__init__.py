"""The reference implementation of the colocated LoRA lifecycle: torch-free logic over ports, real parts in `real/`."""
