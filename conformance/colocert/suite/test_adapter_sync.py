"""Weight syncs at dispatch level: who is on the device, what is sent from where, what the engine then serves.

One item a rule and scenario, `AS-01[sync-adapter-built]`; `colocert rules AS-01` says what it asks.
"""

from colocert.suite import Profile

adapter_sync = Profile("adapter-sync")
