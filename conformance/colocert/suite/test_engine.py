"""An engine that gives memory back by tag, takes weights and adapters, and is asked all the while.

One item a rule and scenario, `EN-02[engine-lora-by-tag]`; `colocert rules EN-02` says what it asks.
"""

from colocert.suite import Profile

engine = Profile("engine")
