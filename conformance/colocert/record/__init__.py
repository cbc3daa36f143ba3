"""Recording: scenarios and exploration, run in children of the suite's own, streamed to files. Judges nothing.

Called, `colocert.record(...)` records a real run instead: see `colocert.live`, which it hands everything to.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colocert.live.recording import Recording


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Recording:
        from colocert.live import record

        return record(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
