"""A small trainer of LoRA adapters that lends its GPU to an inference engine between two epochs.

It exists to be certified: `docs/tutorial.md` of colocert walks through it. Two faults are left in on purpose.
"""

__version__ = "0.3.0"
