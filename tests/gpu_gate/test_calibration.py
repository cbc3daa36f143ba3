"""What --calibrate measures on the stand-in, what is pinned from it, and what a row goes by where nothing is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from colocert.device.kinds import KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
MEASURED = {
    "page-table leftovers": {"bytes": 3 * MIB // 2, "lag": 0.0123456},
    "groups": {"spread": 64 * MIB, "bytes": 1, "leftover": 2},
    "pinned": {"class": "retained"},
    "touch of released memory": {"ends as": "failed", "said": 'CUDA error: an "illegal" access'},
}
FACTS = {"cards": [{"name": "NVIDIA B300 SXM6 AC"}] * 8, "driver": {"version": "580.95.05"}}


@pytest.fixture(scope="module")
def calibration() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests_calibrate", ROOT / "gpu_tests" / "calibrate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPinned:
    @pytest.fixture
    def table(self, calibration: ModuleType, tmp_path: Path) -> Path:
        found = {"kind": "b300", "measured": MEASURED, "preflight": {"facts": FACTS}}
        path: Path = calibration.pin(found, tmp_path, today="2026-12-01")
        return path

    def test_the_table_holds_machine_values_and_measurements(self, table: Path) -> None:
        found = tomllib.loads(table.read_text())
        assert found["machine"]["device"] == "NVIDIA B300 SXM6 AC"
        assert found["machine"]["driver"] == "580.95.05"
        assert found["measured"]["touch of released memory"] == MEASURED["touch of released memory"]

    def test_a_tolerance_is_twice_what_was_seen_and_no_wider_than_its_default(
        self, calibration: ModuleType, table: Path
    ) -> None:
        values = {name: calibration.value(name, "b300", table.parent) for name in calibration.DEFAULTS}
        assert values == {
            "page tables": 3 * MIB,
            "spread of groups": 16 * MIB,
            "left of a disabled block": None,
            "pinned host memory after a wake": "retained",
        }

    def test_another_kind_goes_by_the_wide_defaults(
        self, calibration: ModuleType, table: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert calibration.value("page tables", "b200", table.parent) is None
        monkeypatch.setenv("COLOCERT_KIND", "any")
        assert calibration.value_or_default("page tables") == 8 * MIB

    def test_a_name_that_nobody_pins_is_refused(self, calibration: ModuleType) -> None:
        with pytest.raises(AssertionError, match="is not one of"):
            calibration.value("something", "b300")


def test_no_gpu_has_a_table_that_no_gpu_wrote() -> None:
    """A table of a kind names the device and the driver that it was measured with."""
    for path in (ROOT / "gpu_tests" / "calibration").glob("*.toml"):
        machine = tomllib.loads(path.read_text())["machine"]
        assert path.stem == "host" or (path.stem in KINDS and machine["device"] and machine["driver"])


@pytest.mark.slow
def test_the_stand_in_measures_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_memory_saver")
    monkeypatch.setenv("COLOCERT_REPORT_DIR", str(tmp_path))
    command = [sys.executable, "-m", "pytest", "gpu_tests", "--device=host", "--calibrate", "-q", "-n", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    measured = json.loads((tmp_path / "calibration-host.json").read_text())["measured"]
    assert measured["page-table leftovers"]["bytes"] == 0
    assert measured["context"]["bytes"] == 0
    assert measured["pinned"]["class"] == "returned"
    assert measured["touch of released memory"]["ends as"] == "SIGSEGV"
    assert measured["pinning"]["seconds"] > 0
    pinned = tomllib.loads((ROOT / "gpu_tests" / "calibration" / "host.toml").read_text())
    assert set(pinned["measured"]) == set(measured)
