"""Ranks as Ray actors, one a process, under a local Ray that this process starts and ends.

Knows Ray. Does not know what a rank does, or the group's logic (`group`).

Ray is started once a process, at the first rank, and ends with the process: no server to start by hand, no dashboard,
an object store of the smallest size that Ray accepts, its files under this process's temporary folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from colocert_reference.group import RankLost
from colocert_reference.rank_processes import Build
from colocert_reference.real import ray_reaper
from colocert_reference.real.ray_reaper import MARK

OBJECT_STORE_BYTES = 80 << 20
LONGEST_FOLDER = 40
"""Ray adds some 60 characters to the path of its sockets, which the system limits to 107."""


class RayRank:
    """One actor. A lost process is not restarted: the group replaces it."""

    def __init__(self, rank: int, handle: Any) -> None:
        self.rank, self._handle = rank, handle

    async def call(self, method: str, *args: Any) -> Any:
        """Raises what the rank raised, or `RankLost` once its process has ended."""
        try:
            return await getattr(self._handle, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise RankLost(f"the actor of rank {self.rank} has ended in {method}()") from error

    def kill(self) -> None:
        ray.kill(self._handle, no_restart=True)


class RayRanks:
    """Starts ranks as Ray actors."""

    def __init__(self, build: Build) -> None:
        self._build = build

    async def start(self, rank: int) -> RayRank:
        """Returns once the actor is built in its process."""
        start_ray()
        make, args = self._build(rank)
        actor = ray.remote(make).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        started = RayRank(rank, actor.remote(*args))
        try:
            await started.call("address")
        except BaseException:
            started.kill()
            raise
        return started


def start_ray() -> None:
    """Starts a local Ray unless this process has one; `stop_ray` runs when the process ends."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # otherwise Ray writes a token into the home folder
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="ray-", dir=base if len(base) < LONGEST_FOLDER else "/tmp")
    os.environ[MARK] = folder
    os.environ.setdefault("SPT_NOENV", "1")  # Ray's process titles would otherwise be written over the environment
    _reapers.append(
        subprocess.Popen([sys.executable, ray_reaper.__file__, folder], stdin=subprocess.PIPE, start_new_session=True)
    )
    atexit.register(stop_ray, folder)
    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    del os.environ[MARK]  # Ray's processes have it; what this process starts from here on does not


def stop_ray(folder: str) -> None:
    """Ends Ray with everything it started, and removes its files."""
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    while _reapers:
        reaper = _reapers.pop()
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait()


_reapers: list[subprocess.Popen[bytes]] = []
