"""How a child starts and how it ends: every way in which a hook is not live has a name, and none is silence."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch_memory_saver")

from colocert.device import (
    ExpandableSegments,
    HookNotLive,
    LatePreload,
    LibraryNotFound,
    Machine,
    NoCompiler,
    NoPreload,
    NothingFreed,
    PreloadNotFound,
    TorchMode,
    WrongRuntime,
    run,
    start,
)
from colocert.device import build as building
from colocert.device.machine import ALLOCATOR_CONF, find_preload

from . import scenarios

MEGATRON = "megatron.core"


class TestEndings:
    def test_a_value_comes_back(self) -> None:
        assert run(scenarios.nothing).expect() == "here"

    def test_an_exception_is_a_failure_with_its_traceback(self) -> None:
        outcome = run(scenarios.raises)
        assert outcome.kind == "failed"
        assert "KeyError: 'not there'" in outcome.traceback
        with pytest.raises(AssertionError, match="must end as 'ok', got 'failed'"):
            outcome.expect()

    def test_exit_1_without_a_verdict_is_a_hook_abort_and_exit_0_is_not_a_success(self) -> None:
        assert run(scenarios.exits, code=1).kind == "hook-abort"
        assert run(scenarios.exits, code=0).kind == "vanished"

    def test_a_hang_ends_at_its_deadline_with_its_whole_process_group(self) -> None:
        with start(scenarios.hangs_with_a_child, deadline=2) as child:
            helper = child.listen()
            assert child.wait().kind == "hang"
        for _ in range(500):
            if not Path(f"/proc/{helper}").exists() or ") Z" in Path(f"/proc/{helper}/stat").read_text():
                return
            time.sleep(0.01)
        raise AssertionError(f"process {helper} must end with its group")


class TestEnvironment:
    def test_is_made_from_scratch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_PRELOAD", "")
        monkeypatch.setenv("TMS_INIT_ENABLE", "1")
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
        monkeypatch.setenv("SOME_SECRET", "1")
        env = run(scenarios.environment).expect()
        assert env["LD_PRELOAD"] == str(find_preload())
        assert env["LD_LIBRARY_PATH"].split(":")[0] == str(building.build().folder)
        assert not env.keys() & {"TMS_INIT_ENABLE", "PYTORCH_ALLOC_CONF", "SOME_SECRET"}

    @pytest.mark.parametrize("name", ALLOCATOR_CONF)
    @pytest.mark.parametrize(
        "value", ["expandable_segments:True", "expandable_segments: True", "a:1,Expandable_Segments : 1"]
    )
    def test_refuses_expandable_segments_in_any_spelling(
        self, name: str, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ExpandableSegments, match=name):
            run(scenarios.nothing, env={name: value})
        monkeypatch.setenv(name, value)
        with pytest.raises(ExpandableSegments, match=name):
            run(scenarios.nothing)


class TestHookNotLive:
    def test_no_preload(self) -> None:
        with pytest.raises(NoPreload, match=r"colocert\.device\.run"):
            run(scenarios.nothing, machine=Machine(preload="none"))

    def test_a_second_wait_says_the_same(self) -> None:
        with start(scenarios.nothing, machine=Machine(preload="none")) as child:
            for _ in range(2):
                with pytest.raises(NoPreload):
                    child.wait()

    def test_a_preload_set_after_the_process_started(self) -> None:
        code = f"import os; os.environ['LD_PRELOAD'] = {str(find_preload())!r}\nfrom colocert.device.probe import probe"
        assert _probes(f"{code}\nprobe('host')", Machine(preload="none")) == LatePreload.__name__

    def test_a_preload_path_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(PreloadNotFound, match="did not load"):
            run(scenarios.nothing, machine=Machine(preload=tmp_path / find_preload().name))

    def test_a_library_path_without_libcudart(self, tmp_path: Path) -> None:
        with pytest.raises(LibraryNotFound, match=r"libcuda|libcudart"):
            run(scenarios.nothing, machine=Machine(libraries=tmp_path))

    def test_another_runtime_in_place_of_the_stand_in(self, tmp_path: Path) -> None:
        """A copy of the stand-in elsewhere is what a toolkit's libcudart would be: loaded, and not ours."""
        elsewhere = tmp_path / "cuda"
        elsewhere.mkdir()
        for library in building.build().folder.iterdir():
            (elsewhere / library.name).write_bytes(library.read_bytes())
        with pytest.raises(WrongRuntime, match="cudaMemGetInfo"):
            run(scenarios.nothing, env={"LD_LIBRARY_PATH": str(elsewhere)})

    def test_a_saver_that_an_import_switched_to_torch_mode(self) -> None:
        pytest.importorskip("torch")
        with pytest.raises(TorchMode, match="Import megatron first"):
            run(scenarios.imports_torch_mode)

    @pytest.mark.slow
    def test_importing_megatron_and_the_order_that_repairs_it(self) -> None:
        pytest.importorskip(MEGATRON)
        with pytest.raises(TorchMode):
            run(scenarios.imports_megatron, repaired=False)
        assert run(scenarios.imports_megatron, repaired=True).expect() == "imported"

    def test_a_pause_that_frees_nothing(self) -> None:
        code = (
            "from colocert.device import hook, probe\n"
            "hook.Hook.pause = lambda self, tag=None: None\n"
            "probe.probe('host')"
        )
        assert _probes(code, Machine()) == NothingFreed.__name__


def _probes(code: str, machine: Machine) -> str:
    """The class of the error that ends `code`."""
    done = subprocess.run([sys.executable, "-c", code], env=machine.environment(), capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    name = last.split(":")[0].rpartition(".")[2]
    assert any(kind.__name__ == name for kind in HookNotLive.__subclasses__()), done.stderr
    return name


class TestBuild:
    def test_without_a_compiler_there_is_one_clear_line(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(NoCompiler) as caught:
            building.build()
        assert "\n" not in str(caught.value)
        assert "pip install ziglang" in str(caught.value)

    def test_two_builds_at_once_leave_one_result(self, tmp_path: Path) -> None:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(building.SOURCES.parents[2])}
        code = "from colocert.device.build import build; print(build().folder)"
        both = [
            subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"
        ]
        folders = {process.communicate()[0].strip() for process in both}
        assert len(folders) == 1
        assert [path.name for path in (tmp_path / "colocert").iterdir()] == [Path(folders.pop()).name]
