"""A running pair on a real device: measured bytes, losses, tokens and adapters.

One item a rule and scenario, `LV-01[live-memory]`; `colocert rules LV-01` says what it asks.
"""

from colocert.suite import Profile

live = Profile("live")
