"""The chaos run as a soak: half an hour (ENGINE_ACTORS_CHAOS_S seconds) in all, with and without recovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHAOS_S = float(os.environ.get("ENGINE_ACTORS_CHAOS_S", 1800))


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize("recovery", ["none", "replay"])
def test_no_call_hangs_and_no_token_is_lost_or_wrong(
    smollm2_dir: Path, tmp_path: Path, recovery: str, layout: str
) -> None:
    report_file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.system.chaos", str(smollm2_dir), "--recovery", recovery]
    command += ["--layout", layout, "--duration", str(CHAOS_S / 4), "--report", str(report_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    log = tmp_path / "chaos.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=file, stderr=subprocess.STDOUT)
    assert done.returncode == 0, log.read_text()[-5000:]
    report = json.loads(report_file.read_text())
    print(json.dumps(report, indent=1))
    assert report["events"], "nothing happened"
    assert report["finished"] > 0
    assert report["hung"] == 0
    assert report["wrong"] == []
    assert report["late"] == []
    assert report["engine is empty at the end"]
    if recovery == "replay":
        assert report["recovery_s"] is not None, "nothing was recovered"
