"""Says what works on this machine, what does not, and the command that mends it. Exit code 1 if something must be mended."""

from __future__ import annotations

import argparse

from ..core.reading import printable

SUMMARY = "what works on this machine and what does not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    from .checkup import FAIL, examine

    findings = []
    for finding in examine():
        findings.append(finding)
        print(printable(f"{finding.status:<5} {finding.subject:<17} {finding.text}"), flush=True)
    return 1 if any(finding.status == FAIL for finding in findings) else 0
