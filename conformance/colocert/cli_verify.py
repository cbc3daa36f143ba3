"""`colocert verify CERT --evidence DIR`: what of a certificate its evidence does not bear out, a line each.

Knows the command's arguments, exit codes and how `--explore` finds the implementation. Does not know what is compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

AGREES, DIFFERS, USAGE = 0, 1, 4


def register(commands: Any) -> None:
    """Adds the command to those of `colocert`."""
    command = commands.add_parser("verify", help="judge the evidence of a certificate again and compare")
    command.add_argument("certificate", type=Path, metavar="CERT")
    command.add_argument("--evidence", type=Path, metavar="DIR", required=True, help="the folder it was recorded into")
    command.add_argument(
        "--explore", action="store_true", help="run the exploration again too; needs the implementation"
    )
    command.add_argument("--impl", metavar="IMPL", default="", help="where it is now (default: as it was certified)")
    command.add_argument("-n", dest="workers", type=int, default=1, metavar="N", help="runner children for --explore")
    command.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from colocert.record.manifest import EvidenceError, read_record
    from colocert.verify import CertificateError, read_certificate, verify

    folder: Path = arguments.evidence
    try:
        stated = read_certificate(arguments.certificate)
        differences = verify(stated, folder)
    except (CertificateError, EvidenceError) as error:
        print("colocert: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    told = ""
    if arguments.explore and not differences:
        record = read_record(folder)
        differences = _explored(record, arguments.impl or record.impl, arguments.workers)
        told = f"; {len(record.explorations)} explorations ran again with the same counts"
    for line in differences:
        print(" ".join(line.split()))
    if differences:
        print(f"colocert: {arguments.certificate} does not agree with {folder}: {len(differences)} differences")
        return DIFFERS
    rules, traces = len(stated["rules"]), len(stated["run"]["traces"])
    print(f"colocert: verified {stated['verdict']}: {rules} rules and {traces} traces agree with {folder}{told}")
    return AGREES


def _explored(record: Any, impl: str, workers: int) -> list[str]:
    import msgspec

    from colocert.record.runner import record as record_again
    from colocert.suite.run import importable
    from colocert.verify import explored_again

    asked = msgspec.structs.replace(
        record.options,
        controls=False,
        scenarios=False,
        workers=max(1, workers),
        fault_depth=record.options.asked_fault_depth,
    )
    with tempfile.TemporaryDirectory(prefix="colocert-verify-") as folder, importable(Path.cwd()):
        return explored_again(record, record_again(impl, Path(folder), asked))
