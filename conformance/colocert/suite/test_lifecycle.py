"""The lifecycle of one trainer rank: `sleep()`, `wake_up()`, `train()`, `update_weights()`, the early release.

One item a rule and scenario, `LC-03[lora-early-release]`; `colocert rules LC-03` says what it asks.
"""

from colocert.suite import Profile

lifecycle = Profile("lifecycle")
