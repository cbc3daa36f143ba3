"""What a weight sync sends, on real tensors: the base or not, names and values, memory it is read from and left in.

One item a rule and scenario, `SP-01[payload-adapter-dummy]`; `colocert rules SP-01` says what it asks.
"""

from colocert.suite import Profile

sync_payload = Profile("sync-payload")
