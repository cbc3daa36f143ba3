"""A shell whose folder and variables outlive a command, as a reader's does who types one command after the other.

Knows bash. Does not know what a page is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 600
"""Seconds after which a command of the docs counts as hung."""

SCRIPT = """
trap 'rc=$?; export -p >"$SHELL_STATE/exported"; pwd >"$SHELL_STATE/folder"; exit $rc' EXIT
set -a -o pipefail
[ ! -e "$SHELL_STATE/exported" ] || . "$SHELL_STATE/exported"
[ ! -e "$SHELL_STATE/folder" ] || cd "$(cat "$SHELL_STATE/folder")"
"""


@dataclass
class Shell:
    """Commands are run in `folder` at first, with `variables`; `state` is a folder of the shell's own."""

    folder: Path
    state: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs one command. What it starts in the background is its own affair; standard input is empty."""
        self.state.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_")) and k != "CI"}
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", SCRIPT + command],
            cwd=self.folder,
            env={**kept, **self.variables, "SHELL_STATE": str(self.state), "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
