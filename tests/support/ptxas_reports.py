"""What ptxas reports of the kernels that Mosaic compiles."""

from __future__ import annotations

import re


def keep_reports(folder, monkeypatch):
    """From here on, the reports of compiled kernels are files in the folder."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))


def check_reports(folder):
    """Fails unless there are reports and no kernel spills registers or runs its wgmma one after the other."""
    reports = [path.read_text() for path in folder.glob("*.ptxas")]
    assert reports
    for report in reports:
        assert re.search(r"Used \d+ registers", report) and " 0 bytes spill stores, 0 bytes spill loads" in report
        assert "serialized" not in report, "ptxas lets each wgmma wait for the one before"
