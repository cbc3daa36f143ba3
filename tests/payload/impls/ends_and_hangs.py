"""A sync that does nothing, but ends its process in one scenario and never returns in another."""

import os
import time
from types import SimpleNamespace

from colocert_reference.colocert_impl import CLAIMS


class Sync:
    def __init__(self, rig):
        self.config = rig.config

    def sync(self, adapter=None):
        if self.config.transport == "alias" and self.config.sync == "full":
            os._exit(3)
        if self.config.transport == "alias" and self.config.sync == "merged":
            time.sleep(600)


implementation = SimpleNamespace(name="ends-and-hangs", version="1", claims=CLAIMS, payload_sync=Sync)
