"""`--impl` takes every form that it promises, and each way to get it wrong is one line with its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from colocert.record.manifest import Options
from colocert.record.runner import record

MINIMAL = """
class Trainer:
    def __init__(self, rig):
        self.rig, self.out = rig, False
    def sleep(self):
        if not self.out:
            self.rig.saver.pause()
            self.out = True
    def wake_up(self):
        if self.out:
            self.rig.saver.resume()
            self.out = False
            self.rig.data("grad_buffer", "zero")
    def train(self):
        self.wake_up()
        self.rig.data("default", "read")
    def update_weights(self):
        pass
    def close(self):
        pass

class Impl:
    name, version = "minimal", "1"
    claims = dict(
        lora=False, multi_lora=False, full_parameter=True, early_grad_release=False, offload_train_optional=False,
        rematerialize=False, group_teardown=False, peak_device=set(), gpu_peak_with_critic=False,
        engine_releases=set(), resident_while_released=set(), adapter_source="host", file_backed_frozen=False,
        versions=False, base_requests_in_lora_mode=False, sync_strategies={"full"}, disaggregated=False,
        replacement=False, retained_backup=False, gradients_traced=False,
    )
    def trainer(self, rig):
        return Trainer(rig)
"""


def problem_of(impl: str, folder: Path) -> tuple[int, str, str]:
    options = Options(profiles=("lifecycle",), depth=0, controls=False)
    problem = record(impl, folder / "evidence", options).problem
    if problem is None:
        return 0, "", ""
    assert "\n" not in problem.message
    return problem.exit_code, problem.stage, problem.message


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("impl_a.py", "", "{path}/impl_a.py"), id="file"),
        pytest.param(("impl_b.py", "", "{path}/impl_b.py:Impl"), id="file-attribute"),
        pytest.param(("impl_c.py", "", "impl_c"), id="module"),
        pytest.param(("impl_d.py", "", "impl_d:Impl"), id="module-attribute"),
        pytest.param(("pkg_e/colocert_impl.py", "pkg_e/__init__.py", "pkg_e"), id="package"),
    ],
)
def test_takes_the_form(place: Path, layout: tuple[str, str, str]) -> None:
    file, package, impl = layout
    (place / file).parent.mkdir(exist_ok=True)
    if package:
        (place / package).touch()
    (place / file).write_text(MINIMAL + "\nimplementation = Impl()\n")
    assert problem_of(impl.format(path=place), place) == (0, "", "")


def test_an_entry_point_is_found_by_its_name(place: Path) -> None:
    (place / "impl_ep.py").write_text(MINIMAL + "\nimplementation = Impl()\n")
    info = place / "impl_ep-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: impl-ep\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[colocert.implementations]\nmy-trainer = impl_ep\n")
    assert problem_of("my-trainer", place) == (0, "", "")


WRONG = {
    "no-such-file": (None, "{path}/nothing.py", 4, "exists"),
    "no-such-module": (None, "no_such_module_at_all", 4, "no module no_such_module_at_all"),
    "not-a-name": (None, "no-such-name", 4, "entry point"),
    "folder": (None, "{path}", 4, "folder"),
    "no-attribute": (MINIMAL, "{file}:Nothing", 4, "Nothing"),
    "no-implementation": ("x = 1", "{file}", 4, "implementation"),
    "syntax-error": ("def (:", "{file}", 4, "syntax error"),
    "missing-claim": (MINIMAL.replace("lora=False, ", "", 1) + "\nimplementation = Impl()", "{file}", 4, "lora"),
    "unknown-claim": (MINIMAL.replace("lora=False", "lora=False, sparkle=True", 1), "{file}:Impl", 4, "sparkle"),
    "claim-of-a-wrong-type": (MINIMAL.replace("lora=False", "lora='yes'", 1), "{file}:Impl", 4, "lora"),
    "unknown-member": (MINIMAL.replace("peak_device=set()", "peak_device={'tpu'}"), "{file}:Impl", 4, "tpu"),
    "claims-misspelt": ("from colocert import Claims\nCLAIMS = Claims(loar=True)\n", "{file}", 4, "unknown loar"),
    "abstract-method": (
        "import abc\nclass Impl(abc.ABC):\n    @abc.abstractmethod\n    def trainer(self, rig): ...\n",
        "{file}:Impl",
        4,
        "abstract",
    ),
    "no-name": ("class Impl:\n    version = '1'\n    claims = {}\n", "{file}:Impl", 4, "no name"),
    "factory-is-not-callable": (MINIMAL + "\nImpl.trainer = 3\n", "{file}:Impl", 4, "callable"),
    "missing-package": ("import no_such_package_at_all\n", "{file}", 11, "no_such_package_at_all"),
    "error-at-import": ("raise OSError('no device')\n", "{file}", 11, "no device"),
    "exit-at-import": ("import sys\nsys.exit(3)\n", "{file}", 11, "exit code 3"),
    "os-exit-at-import": ("import os\nos._exit(5)\n", "{file}", 11, "exit code 5"),
    "crash-at-import": ("import os\nos.kill(os.getpid(), 11)\n", "{file}", 11, "SIGSEGV"),
    "factory-raises": (MINIMAL + "\nImpl.trainer = lambda self, rig: 1 / 0\n", "{file}:Impl", 11, "ZeroDivisionError"),
    "factory-returns-none": (MINIMAL + "\nImpl.trainer = lambda self, rig: None\n", "{file}:Impl", 11, "got None"),
    "no-wake-up": (MINIMAL + "\ndel Trainer.wake_up\n", "{file}:Impl", 11, "wake_up()"),
    "abstract-trainer": (
        MINIMAL + "\nimport abc\nclass T(abc.ABC):\n    @abc.abstractmethod\n    def sleep(self): ...\n"
        "Impl.trainer = lambda self, rig: T()\n",
        "{file}:Impl",
        4,
        "abstract",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_impl_is_one_line(place: Path, case: str) -> None:
    source, impl, exit_code, says = WRONG[case]
    file = place / f"wrong_{case.replace('-', '_')}.py"
    if source is not None:
        file.write_text(source)
    got, _, message = problem_of(impl.format(path=place, file=file), place)
    assert got == exit_code, message
    assert says in message


def test_a_hang_at_import_ends_at_the_deadline(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colocert.record.process.IMPORT_DEADLINE", 2.0)
    (place / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    exit_code, stage, message = problem_of(f"{place}/hangs.py", place)
    assert (exit_code, stage) == (11, "import")
    assert "hung" in message
