"""The gate of gpu_tests over invented rows: what it may let be green, and in how many words it says no."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import colocert.device  # noqa: F401  (imported once, and not anew in every run)

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
TABLE = """
[G01]
proves = "One."
world = 1
host = "full"
seconds = 30

[G02]
proves = "Two."
world = 1
host = "full"
seconds = 20

[G03]
proves = "Three."
world = 2
host = "reduced"
loses = "something"
seconds = 10

[G04]
proves = "Four."
world = 1
host = "none"
seconds = 10
unseeded = "runs on a GPU only"
"""
ROWS = """
import pytest

@pytest.mark.row("G01")
def test_one(record_property):
    record_property("freed", 64)

@pytest.mark.row("G02")
@pytest.mark.parametrize("n", [1, 2])
def test_two(n):
    pass

@pytest.mark.row("G03")
def test_three():
    pass

@pytest.mark.row("G04")
def test_four(device_name):
    assert device_name == "cuda"
"""
# In place of the machine's own preflight: what a test says that it found.
FOUND = """
import json, os
from . import gate

gate.preflight = lambda kind, world: json.loads(os.environ["COLOCERT_FOUND"])
"""
HERE = {"ok": True, "line": "", "facts": {"cards": [{}], "uuid": "GPU-12345678-1234-1234-1234-123456789abc"}}


class Run:
    """A copy of gpu_tests with invented rows in a folder of its own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.monkeypatch = pytester, monkeypatch
        folder = self.folder = pytester.path
        self.tests = folder / "gpu_tests"
        ignored = shutil.ignore_patterns("test_*.py", "mutants", "scenarios", "__pycache__", "rows.toml")
        shutil.copytree(ROOT / "gpu_tests", self.tests, ignore=ignored)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib --strict-markers\n")
        (self.tests / "rows.toml").write_text(TABLE)
        (self.tests / "conftest.py").open("a").write(FOUND)
        self.write(ROWS)

    def write(self, rows: str) -> None:
        (self.tests / "test_rows.py").write_text(rows)

    def __call__(
        self, *options: str, found: dict[str, Any] = HERE, shard: str = "", folder: str = "gpu_tests"
    ) -> tuple[int, str, str]:
        for name in ("KIND", "WORLD", "REPORT_DIR"):
            self.monkeypatch.setenv(f"COLOCERT_{name}", "")
        self.monkeypatch.setenv("COLOCERT_FOUND", json.dumps(found))
        self.monkeypatch.setenv("COLOCERT_SHARD", shard)
        for module in [name for name in sys.modules if name.split(".")[0] == "gpu_tests"]:
            self.monkeypatch.delitem(sys.modules, module)
        self.monkeypatch.syspath_prepend(self.folder)
        self.monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        spread = "-n" in options
        run = self.pytester.runpytest_subprocess if spread else self.pytester.runpytest_inprocess
        done = run(folder, "-p", "no:cacheprovider", *(["-p", "xdist"] if spread else []), *options)
        return int(done.ret), done.stdout.str(), done.stderr.str()

    def result(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "build" / "gpu" / f"{name}.json").read_text())
        return loaded


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(pytester, monkeypatch)


class TestNothingRequired:
    def test_the_host_is_the_default_and_leaves_out_by_name_what_needs_a_gpu(self, run: Run) -> None:
        code, out, _ = run()
        assert code == 0, out
        assert "4 passed, 1 deselected" in out
        assert "left out: G04: needs a GPU" in out

    def test_a_run_that_comes_from_above_is_one_on_the_host(self, run: Run) -> None:
        (run.folder / "test_other.py").write_text("def test_other():\n    pass\n")
        code, out, _ = run(folder=".")
        assert code == 0, out
        assert "5 passed, 1 deselected" in out

    def test_a_skip_is_a_skip(self, run: Run) -> None:
        run.write(ROWS.replace("def test_three():\n    pass", "def test_three():\n    pytest.skip('not today')"))
        code, out, _ = run()
        assert (code, "no verdict: G03" in out) == (0, True), out

    def test_a_failure_is_a_failure(self, run: Run) -> None:
        run.write(ROWS.replace('"freed", 64)', '"freed", 64)\n    assert False'))
        assert run()[0] == 1


@pytest.mark.parametrize(
    "options", [["--require-gpu=b300"], ["--device=host", "--require-world=2"]], ids=["gpu", "host"]
)
class TestRequired:
    def test_all_rows_pass(self, run: Run, options: list[str]) -> None:
        code, out, _ = run(*options)
        assert code == 0, out
        left_out = "G03: needs 2 devices, this run has 1" if "gpu" in options[0] else "G04: needs a GPU"
        assert f"left out: {left_out}" in out

    @pytest.mark.parametrize(
        ("was", "becomes"),
        [
            ('record_property("freed", 64)', 'pytest.skip("not today")'),
            ('@pytest.mark.row("G01")', '@pytest.mark.row("G01")\n@pytest.mark.skip("not today")'),
            ('@pytest.mark.row("G01")', '@pytest.mark.row("G01")\n@pytest.mark.skipif(True, reason="not today")'),
            ('record_property("freed", 64)', 'pytest.xfail("not today")'),
            ('@pytest.mark.row("G01")', '@pytest.mark.row("G01")\n@pytest.mark.xfail(reason="not today")'),
            ('record_property("freed", 64)', 'pytest.importorskip("no_such_module_not_today")'),
        ],
        ids=["skip", "mark.skip", "skipif", "xfail", "mark.xfail that passes", "importorskip"],
    )
    def test_nothing_is_skipped_or_expected_to_fail(self, run: Run, options: list[str], was: str, becomes: str) -> None:
        run.write(ROWS.replace(was, becomes))
        code, out, _ = run(*options)
        assert code == 1, out
        assert "1 failed" in out or "1 error" in out
        assert "G01 is required in this run and may not be" in out
        assert "today" in out

    def test_a_mark_that_expects_a_failure_saves_no_row_that_fails(self, run: Run, options: list[str]) -> None:
        run.write(ROWS.replace("def test_one(record_property):", "@pytest.mark.xfail\ndef test_one(nothing):"))
        code, out, _ = run(*options)
        assert (code, "1 failed" in out or "1 error" in out) == (1, True), out

    @pytest.mark.parametrize(
        "rows",
        [
            ROWS.replace("def test_one", "def no_test_one"),
            ROWS.replace("import pytest", "import pytest\npytest.skip('all of it', allow_module_level=True)", 1),
        ],
        ids=["deleted", "module skipped"],
    )
    def test_a_row_without_a_verdict(self, run: Run, options: list[str], rows: str) -> None:
        run.write(rows)
        code, out, _ = run(*options)
        assert code in (1, 5), out
        assert "no verdict: G01" in out

    def test_a_selection_leaves_rows_without_a_verdict(self, run: Run, options: list[str]) -> None:
        code, out, _ = run(*options, "-k", "test_two")
        assert code == 1, out
        assert "no verdict: G01" in out

    def test_nothing_selected(self, run: Run, options: list[str]) -> None:
        assert run(*options, "-k", "no_such_test")[0] == 5

    @pytest.mark.parametrize("mark", ["", '@pytest.mark.row("G77")\n', "@pytest.mark.row\n"])
    def test_a_test_of_no_known_row_is_an_error(self, run: Run, options: list[str], mark: str) -> None:
        run.write(f"{ROWS}\n{mark}def test_other():\n    pass\n")
        code, _, err = run(*options)
        assert code == 4
        assert "every test of gpu_tests names a row of rows.toml" in err


class TestShards:
    def test_the_parts_are_disjoint_and_the_whole(self, run: Run) -> None:
        judged = []
        for shard in ("1/2", "2/2"):
            code, out, _ = run("--require-gpu=b300", "--require-world=2", shard=shard)
            assert code == 0, out
            assert f"is not in shard {shard}" in out
            judged.append(set(run.result(f"b300-w2-{shard.replace('/', 'of')}")["rows"]))
        assert judged[0] | judged[1] == {"G01", "G02", "G03", "G04"}
        assert not judged[0] & judged[1]

    def test_a_row_of_the_other_part_is_not_missed_and_one_of_this_is(self, run: Run) -> None:
        run.write(ROWS.replace("def test_one", "def no_test_one"))
        codes = [run("--require-gpu=b300", "--require-world=2", shard=shard)[0] for shard in ("1/2", "2/2")]
        assert sorted(codes) == [0, 1]

    @pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/0"])
    def test_no_such_part(self, run: Run, shard: str) -> None:
        code, _, err = run(shard=shard)
        assert (code, "COLOCERT_SHARD must be INDEX/COUNT" in err) == (4, True)


class TestBeforeTheRows:
    def test_another_gpu_ends_the_run_in_one_line(self, run: Run) -> None:
        found = {"ok": False, "line": "1 x b300 must be here: kind: got NVIDIA H200", "facts": {"cards": [{}]}}
        code, out, err = run("--require-gpu=b300", found=found)
        assert (code, out) == (1, "")
        assert err == "gpu_tests: 1 x b300 must be here: kind: got NVIDIA H200"

    def test_without_a_requirement_it_is_said_and_the_rows_run(self, run: Run) -> None:
        found = {"ok": False, "line": "host: memlock", "facts": {"cards": [{}]}}
        code, out, _ = run("--device=cuda", found=found)
        assert (code, "preflight, not required here: host: memlock" in out) == (0, True), out

    def test_cuda_without_any_device_runs_nothing(self, run: Run) -> None:
        code, out, err = run("--device=cuda", found={"ok": False, "line": "driver: none", "facts": {"cards": []}})
        assert (code, out, err) == (1, "", "gpu_tests: driver: none")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--device=host", "--require-gpu=b300"], "--require-gpu=b300 needs a GPU, got --device=host"),
            (["--require-gpu=any", "-n", "2"], "rows on a GPU need it to themselves"),
            (["--require-world=0"], "--require-world must be 1 or more"),
            (["--require-gpu=b3000"], "invalid choice"),
        ],
    )
    def test_what_contradicts_itself_is_a_wrong_usage(self, run: Run, options: list[str], said: str) -> None:
        code, _, err = run(*options)
        assert (code, said in err) == (4, True), err

    def test_this_machine_without_a_gpu(self) -> None:
        """The command of the acceptance, on the real folder."""
        if ctypes_cuda():
            pytest.skip("this machine has a driver")
        command = [sys.executable, "-m", "pytest", "gpu_tests", "--require-gpu=b300"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("gpu_tests: 1 x b300 must be here: driver: ")


def ctypes_cuda() -> bool:
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class TestResult:
    def test_says_what_ran_and_identifies_no_device(self, run: Run) -> None:
        assert run("--require-gpu=b300", "--require-world=2")[0] == 0
        found = run.result("b300-w2")
        assert (found["kind"], found["world"], found["required"]) == ("b300", 2, True)
        assert {row: entry["outcome"] for row, entry in found["rows"].items()} == dict.fromkeys(
            ["G01", "G02", "G03", "G04"], "passed"
        )
        assert found["rows"]["G01"]["measured"] == {"freed": 64}
        assert found["versions"]["pytest"] == pytest.__version__
        assert "12345678-1234" not in json.dumps(found)

    def test_a_row_without_a_calibrated_value_says_so(self, run: Run) -> None:
        run.write(ROWS.replace('"freed", 64)', '"wide_defaults", ["page tables"])'))
        _, out, _ = run("--require-gpu=b300")
        assert "G01 ran with the wide default of page tables: no calibrated value for b300" in out

    def test_workers_of_xdist_report_to_the_controller(self, run: Run) -> None:
        code, out, _ = run("--device=host", "--require-world=2", "-n", "2")
        assert code == 0, out
        assert set(run.result("host-w2")["rows"]) == {"G01", "G02", "G03"}
        run.write(ROWS.replace('"freed", 64)', '"freed", 64)\n    pytest.skip("not today")'))
        assert run("--device=host", "--require-world=2", "-n", "2")[0] == 1


class TestReportCheck:
    """`python -m gpu_tests.report check`, the last step of a job."""

    def check(self, run: Run, kind: str, world: int, *names: str) -> tuple[int, list[str]]:
        files = [str(run.folder / "build" / "gpu" / f"{name}.json") for name in names]
        command = [sys.executable, "-m", "gpu_tests.report", "check", *files, "--kind", kind, "--world", str(world)]
        done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    def test_a_complete_run(self, run: Run) -> None:
        run("--require-gpu=b300", "--require-world=2")
        assert self.check(run, "b300", 2, "b300-w2") == (0, ["report: all 4 rows of b300, world 2, passed"])

    def test_two_shards_are_one_run_and_one_is_not(self, run: Run) -> None:
        for shard in ("1/2", "2/2"):
            run("--require-gpu=b300", "--require-world=2", shard=shard)
        assert self.check(run, "b300", 2, "b300-w2-1of2", "b300-w2-2of2")[0] == 0
        code, lines = self.check(run, "b300", 2, "b300-w2-1of2")
        assert code == 1
        assert all("must have a verdict, got none" in line for line in lines)

    def test_a_run_of_something_else(self, run: Run) -> None:
        run("--require-gpu=b300", "--require-world=1")
        code, lines = self.check(run, "b300", 2, "b300-w1")
        assert code == 1
        assert lines == ["report: `world` must be 2, got 1", "report: G03 must have a verdict, got none"]
        assert self.check(run, "h200", 1, "b300-w1") == (1, ["report: `kind` must be 'h200', got 'b300'"])

    def test_a_run_that_required_nothing_failed_or_is_no_file(self, run: Run) -> None:
        run("--device=cuda", "-k", "test_two or test_four")
        code, lines = self.check(run, "any", 1, "any-w1")
        assert code == 1
        assert "report: `required` must be True, got False" in lines
        assert "report: G01 must have a verdict, got none" in lines
        run.write(ROWS.replace('"freed", 64)', '"freed", 64)\n    assert False'))
        run("--require-gpu=any")
        assert self.check(run, "any", 1, "any-w1") == (1, ["report: G01 must be passed, got failed"])
        assert self.check(run, "any", 1, "absent")[0] == 1


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests_table", ROOT / "gpu_tests" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestTable:
    def test_is_the_designs(self, table: ModuleType) -> None:
        rows = table.load()
        assert list(rows) == [f"G{n:02}" for n in range(26)]
        by_host = {how: [row.id for row in rows.values() if row.host == how] for how in ("reduced", "none")}
        assert by_host == {"reduced": ["G14", "G15", "G16", "G20", "G22", "G24"], "none": ["G21", "G23"]}
        worlds = {row.id: row.world for row in rows.values() if row.world != 1}
        assert worlds == {"G14": 2, "G15": 8}
        assert (rows["G15"].least_world("gb300"), rows["G15"].least_world("host")) == (4, 4)

    def test_rows_that_need_torch_are_left_out_by_name_where_there_is_none(self, table: ModuleType) -> None:
        found = table.split(table.load().values(), device="host", kind="host", world=4, torch=False)
        without = [row for row, reason in found.left_out.items() if "torch" in reason]
        assert without == ["G11", "G12", "G14", "G15"]
        assert not {row.id for row in found.required} & set(without)

    @pytest.mark.parametrize("kind", ["b300", "gb300"])
    def test_two_shards_of_one_device_stay_under_five_minutes(self, table: ModuleType, kind: str) -> None:
        for index in (1, 2):
            part = table.split(table.load().values(), device="cuda", kind=kind, world=1, shard=table.Shard(index, 2))
            assert sum(row.seconds for row in part.required) < 300

    @pytest.mark.parametrize(
        ("was", "becomes", "said"),
        [
            ('host = "full"', 'host = "some"', "`host` of G01 must be full, reduced or none"),
            ("seconds", "secs", "unknown keys"),
            ('loses = "something"\n', "", "must say with `loses`"),
        ],
    )
    def test_a_wrong_table(self, table: ModuleType, tmp_path: Path, was: str, becomes: str, said: str) -> None:
        (tmp_path / "rows.toml").write_text(TABLE.replace(was, becomes))
        with pytest.raises(ValueError, match=said):
            table.load(tmp_path / "rows.toml")
