"""Recordings of real runs: what a framework's own processes do, one file a process, to be judged later.

`colocert.record(...)` is `record` of this package. It imports no framework, torch or saver: it is given their objects.
"""

from colocert.live.recording import Recording, record

__all__ = ["Recording", "record"]
