"""The store's fault drill, in short: `make drill-store` has the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_kills_of_harvesters_and_server_at_random_points_lose_and_double_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.drills.store", "--kills", "4", "--server-kills", "2", "--seed", "7"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "drill.json")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    drill = json.loads((tmp_path / "drill.json").read_text())["drill"]
    assert (drill["kills"], drill["server_kills"]) == (4, 2)
    assert (drill["lost"], drill["doubled"], drill["incomplete"]) == (0, 0, 0)
