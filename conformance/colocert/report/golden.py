"""Golden transcripts: the syrupy extension that keeps one scenario a text file under `--snapshot-dir`.

Knows where a scenario's transcript lies. Does not know how it is made or what a difference means.

    SNAPSHOT_DIR/PROFILE/SCENARIO.txt
"""

from __future__ import annotations

from typing import Any

from syrupy.assertion import SnapshotAssertion
from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation
from syrupy.terminal import disable_color


class TranscriptExtension(SingleFileSnapshotExtension):
    """One scenario a file, named by the scenario. The test location's item is a `TranscriptItem`.

    A module-level class with a root of its own: xdist workers have to import it, and syrupy's default root belongs to
    the folder of a test file.
    """

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        item: Any = test_location.item
        return str(item.golden.parent)

    def discover_snapshots(
        self, *, test_location: PyTestLocation, ignore_extensions: list[str] | None = None
    ) -> SnapshotCollections:
        """None: whether a file is left over is asked of the record (`StaleTranscript`), not of which items ran."""
        return SnapshotCollections()

    @classmethod
    def get_file_basename(cls, *, test_location: PyTestLocation, index: int | str) -> str:
        item: Any = test_location.item
        return str(item.golden.stem)

    @classmethod
    def matches_test_location(cls, *, test_location: PyTestLocation, snapshot_location: str) -> bool:
        item: Any = test_location.item
        return str(item.golden) == snapshot_location


def compare(item: Any, text: str) -> list[str]:
    """Compares a transcript with its golden file, or writes it under `--snapshot-update`; the difference, if any."""
    option = item.config.option
    snapshot = SnapshotAssertion(
        session=item.config._syrupy,
        extension_class=TranscriptExtension,
        test_location=PyTestLocation(item),
        update_snapshots=option.update_snapshots,
        update_new_snapshots_only=option.update_new_snapshots_only,
    )
    if snapshot == text:
        return []
    with disable_color():
        return snapshot.get_assert_diff()
