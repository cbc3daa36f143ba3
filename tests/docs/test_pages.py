"""Each command in the docs is run, or one list says why it is not; links lead somewhere; files that are shown exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from colocert.expected import parse

from . import follow, world
from .blocks import ROOT, SHELL, Block, blocks, commands, pages

PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}
BLOCKS = [block for path in pages() for block in blocks(path)]
FOLLOWED_ELSEWHERE = {"docs/tutorial.md": "tests/newcomer/test_newcomer.py"}
"""Pages that are followed from an empty folder, with a wheel."""

WITHOUT_TORCH = (
    () if importlib.util.find_spec("torch") else (r"colocert_reference\b", r"make demo", r"pytest gpu_tests")
)
LANGUAGES = ("", "text", "diff", "json", "mermaid", "yaml", "toml", "python", *SHELL)
needs_make_docs = pytest.mark.skipif(not importlib.util.find_spec("markdown"), reason="needs mkdocs")


def of(page: str) -> list[Block]:
    return [block for block in BLOCKS if block.page == page]


def test_every_language_is_one_that_is_tested() -> None:
    assert {b.language for b in BLOCKS} <= set(LANGUAGES)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python" and not b.includes], ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml" and not b.includes], ids=str)
def test_a_workflow_has_steps(block: Block) -> None:
    yaml = pytest.importorskip("yaml")
    found = list(follow.steps(yaml.safe_load(block.text)))
    assert found
    assert all(("run" in step) != ("uses" in step) for step in found)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml" and not b.includes], ids=str)
def test_a_list_of_known_failures_can_be_read(block: Block) -> None:
    assert parse(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.includes], ids=str)
def test_what_is_included_is_there(block: Block) -> None:
    for name in re.findall(r'--8<-- "([^"]+)"', block.text):
        path, _, section = name.partition(":")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not section or f"[start:{section}]" in text


def test_every_exemption_is_used_and_a_mark_says_why() -> None:
    """A list that is longer than it has to be hides what is not run."""
    given = [c.text for b in BLOCKS if b.language in SHELL for c in commands(b.text)]
    assert all(any(re.match(e.pattern, follow.bare(c)) for c in given) for e in follow.EXEMPT if not e.optional)
    assert all(e.reason for e in follow.EXEMPT)
    assert all(b.value for b in BLOCKS if b.mark in ("shown", "file"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p not in FOLLOWED_ELSEWHERE and any(map(follow.to_do, of(p)))])
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkout"
    folder.mkdir()
    shell = world.make(folder, PAGES[page].read_text(encoding="utf-8"))
    done = list(follow.follow(shell, of(page), WITHOUT_TORCH, world.AROUND.get(page, ("", ""))))
    print(*done, sep="\n")


@pytest.mark.slow
def test_the_example_of_the_contract_conforms() -> None:
    example = ROOT / "tests" / "docs" / "smallest_impl.py"
    words = [sys.executable, "-m", "colocert.cli", "certify", str(example), "--profile", "lifecycle"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1].startswith("colocert: conformant (lifecycle)")


def anchors(path: Path) -> set[str]:
    """The anchors of a page: its headings as mkdocs makes them, which for plain headings is GitHub's way too."""
    from markdown import Markdown
    from markdown.extensions.toc import TocExtension

    page = Markdown(extensions=[TocExtension(), "attr_list", "fenced_code"])
    html = page.convert(path.read_text(encoding="utf-8"))
    return set(re.findall(r'<h[1-6] id="([^"]+)"', html))


@needs_make_docs
@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    prose = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {target}"
