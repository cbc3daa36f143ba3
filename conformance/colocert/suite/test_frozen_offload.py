"""Frozen weights that go to files or to host memory, and come back.

One item a rule and scenario, `FO-02[frozen-altered-files]`; `colocert rules FO-02` says what it asks.
"""

from colocert.suite import Profile

frozen_offload = Profile("frozen-offload")
