"""The hand-offs between trainer and engine: a driver's own loop, in both peak modes, judged over all ranks and engines.

One item a rule and scenario, `HO-01[gpu-lora-one]`; `colocert rules HO-01` says what it asks.
"""

from colocert.suite import Profile

handoff = Profile("handoff")
