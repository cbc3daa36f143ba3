"""Follows `docs/tutorial.md` in an empty folder, as a reader would, and tells how long each step took.

    python tests/newcomer/walk.py FOLDER

colocert is built as a wheel and installed into a fresh virtual environment. What the kit needs beside it (pytest,
msgspec, rich …) is taken from the interpreter that runs this script, so that no index is asked. Each command of the
page is run in turn and has to end, and print, as the page says. Last, the job's step is done as a runner would do it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.docs.blocks import blocks  # noqa: E402
from tests.docs.follow import follow  # noqa: E402
from tests.docs.shell import Shell  # noqa: E402

PAGE = ROOT / "docs" / "tutorial.md"


def wheel(folder: Path) -> Path:
    """colocert, built from this checkout."""
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    _quietly(words)
    (made,) = folder.glob("*.whl")
    return made


def environment(folder: Path, built: Path) -> Path:
    """A virtual environment with the wheel in it, and this interpreter's packages behind that."""
    _quietly([sys.executable, "-m", "venv", str(folder)])
    _quietly([str(folder / "bin" / "pip"), "install", "--quiet", "--no-index", "--no-deps", str(built)])
    (packages,) = folder.glob("lib/python*/site-packages")
    # Paths and no `site.addsitedir`: a checkout that is installed here for editing is not behind the wheel.
    outer = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    (packages / "outer.pth").write_text("".join(f"{path}\n" for path in outer))
    # pip would have made this one beside the package.
    script = folder / "bin" / "pytest"
    script.write_text(
        f"#!{folder / 'bin' / 'python'}\nimport sys\n\nimport pytest\n\nsys.exit(pytest.console_main())\n"
    )
    script.chmod(0o755)
    return folder


def walk(folder: Path) -> Iterator[str]:
    """Does all that the page says; yields each command when it is done."""
    made = environment(folder / "venv", wheel(folder / "wheel"))
    first = folder / "first"
    first.mkdir()
    variables = {"PATH": f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}", "COLOCERT": str(ROOT), "PYTHONPATH": ""}
    shell = Shell(first, folder / "state", variables)
    where = shell.run("python -c 'import colocert; print(colocert.__file__)'").stdout.strip()
    assert Path(where).is_relative_to(made), f"the wheel must be what is imported (got {where})"
    yield "wheel and environment"
    yield from follow(shell, blocks(PAGE))
    yield f"the action's step: {job(shell, first / '.github' / 'workflows' / 'colocert.yml')}"


def job(shell: Shell, workflow: Path) -> str:
    """Does the job's step that uses this repository's action, as a runner does; the verdict that the action puts out.

    Checking out and installing are the runner's affair: both are done here.
    """
    import yaml

    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (step,) = [
        step
        for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
        if step.get("uses", "").startswith("OWNER/colocert@")
    ]
    unknown = set(step["with"]) - set(action["inputs"])
    assert not unknown, f"inputs of the action must be of {sorted(action['inputs'])} (got {sorted(unknown)})"
    inputs = {name: facts.get("default", "") for name, facts in action["inputs"].items()} | step["with"]
    certify = next(s for s in action["runs"]["steps"] if s.get("id") == "certify")
    told = shell.folder / "told"
    env = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], v) for name, v in certify["env"].items()
    }
    env |= {"GITHUB_OUTPUT": str(told), "GITHUB_STEP_SUMMARY": os.devnull}
    done = shell.run("".join(f"{k}={shlex.quote(v)}\n" for k, v in env.items()) + certify["run"])
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split("=", 1) for line in told.read_text(encoding="utf-8").splitlines())["verdict"]


def _quietly(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    where.mkdir(parents=True, exist_ok=True)
    assert not any(where.iterdir()), f"FOLDER must be empty (got {where})"
    begun = time.monotonic()
    for step in walk(where):
        print(f"{time.monotonic() - begun:7.1f} s  {step.splitlines()[0]}", flush=True)
