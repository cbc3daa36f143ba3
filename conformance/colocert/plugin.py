"""The pytest plugin: options, and the hooks that lead to the suite's items and to the controller's run.

Knows pytest. Does not know how anything is recorded or judged, and imports that only in a run with `--impl`; without
it, all it does is to say so where somebody collects the suite.

    pytest_cmdline_main          controller: record, before any worker starts, or end here with one line
    pytest_pycollect_makeitem    every process: the items of a profile
    colocert.suite.run.Run       controller: what ran, the verdict, the certificate, the exit code
"""

from __future__ import annotations

from typing import Any

import pytest

from colocert.suite import Profile

EVIDENCE = pytest.StashKey[str]()
"""The evidence folder of this run, on the controller."""

WORKER_EVIDENCE = "colocert_evidence"
"""The same for xdist workers, in `workerinput`."""

EXPECT = pytest.StashKey[str]()
"""The list of expected failures of this run, on the controller; empty where there is none."""

WORKER_EXPECT = "colocert_expect"
"""The same for xdist workers."""

NEEDS_IMPL = "needs-an-implementation"
USAGE = (
    "colocert.suite judges an implementation: give --impl=NAME, an entry point, a module or a .py file "
    "(`colocert new PKG` writes one)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("colocert", "colocert: certify an implementation of the colocated LoRA lifecycle")
    add = group.addoption
    add("--impl", dest="colocert_impl", metavar="IMPL", help="entry point, module, .py file[:attr], or trace:FOLDER")
    add(
        "--profile",
        dest="colocert_profile",
        default="",
        metavar="A,B",
        help="profiles to certify (default: all that IMPL has)",
    )
    add(
        "--level",
        dest="colocert_level",
        default="must",
        choices=("must", "should"),
        help="whether SHOULD rules bind too (default: must)",
    )
    add(
        "--depth",
        dest="colocert_depth",
        type=int,
        default=6,
        metavar="N",
        help="explore every sequence of up to N calls; 0: do not explore (default: 6)",
    )
    add(
        "--faults",
        dest="colocert_faults",
        default="single",
        choices=("none", "single"),
        help="explore with every single fault too (default: single)",
    )
    add(
        "--fault-depth",
        dest="colocert_fault_depth",
        type=int,
        default=0,
        metavar="N",
        help="length of sequences with a fault (default: 6, or 3 where IMPL is costly to build)",
    )
    add("--certificate", dest="colocert_certificate", metavar="FILE", help="write the certificate (JSON) here")
    add("--report", dest="colocert_report", metavar="FILE", help="write the report (one HTML page) here; needs jinja2")
    add(
        "--evidence", dest="colocert_evidence", metavar="DIR", help="record into this folder (default: a temporary one)"
    )
    add(
        "--expect",
        dest="colocert_expect",
        metavar="FILE",
        help="the list of expected failures (default: colocert-expected.toml in the rootdir, where there is one)",
    )
    add(
        "--snapshot-dir",
        dest="colocert_snapshot_dir",
        metavar="DIR",
        help="compare transcripts with those in DIR; --snapshot-update writes them",
    )


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is an xdist worker."""
    return hasattr(config, "workerinput")


def _informs_only(config: pytest.Config) -> bool:
    """Whether pytest was only asked for help, a version or a list."""
    names = ("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow")
    return any(getattr(config.option, name, None) for name in names)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Records before the session begins. A problem ends the run here: an exit code instead of None."""
    if not config.option.colocert_impl or is_worker(config) or _informs_only(config):
        return None
    from colocert.suite.run import Run

    run = Run(config)
    ended = run.record()
    if ended is None:
        config.stash[EVIDENCE] = str(run.folder)
        config.stash[EXPECT] = str(run.expect or "")
        config.pluginmanager.register(run, "colocert-run")
    return ended


def evidence_folder(config: pytest.Config) -> str:
    """The evidence folder of this run, in every process of it; empty without `--impl`."""
    return config.stash.get(EVIDENCE, "") or str(getattr(config, "workerinput", {}).get(WORKER_EVIDENCE, ""))


def expect_file(config: pytest.Config) -> str:
    """The list of expected failures of this run, in every process of it; empty where there is none."""
    return config.stash.get(EXPECT, "") or str(getattr(config, "workerinput", {}).get(WORKER_EXPECT, ""))


class MissingImpl(pytest.Item):
    """Stands where the cases would, so that collecting the suite without `--impl` is noticed."""

    def runtest(self) -> None:
        pytest.fail(USAGE, pytrace=False)


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    if not isinstance(obj, Profile):
        return None
    folder = evidence_folder(collector.config)
    if not folder:
        return [MissingImpl.from_parent(collector, name=NEEDS_IMPL)]
    from colocert.suite.items import collect

    return list(collect(collector, obj.name, folder))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_worker(config) and any(isinstance(item, MissingImpl) for item in items):
        raise pytest.UsageError(USAGE)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if any(nodeid.endswith(f"::{NEEDS_IMPL}") for nodeid in ids):
        raise pytest.UsageError(USAGE)
