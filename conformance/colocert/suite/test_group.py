"""The calls of a group of ranks, some of which fail, hang, die or are replaced.

One item a rule and scenario, `GR-01[group-lora-2-hangs]`; `colocert rules GR-01` says what it asks.
"""

from colocert.suite import Profile

group = Profile("group")
