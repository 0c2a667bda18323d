import json
import os
import subprocess
import sys
from pathlib import Path


def test_run_that_was_killed_ends_as_if_it_had_not_been(digits, tmp_path):
    """SIGKILL at more than thirty moments, more than ten of them while a checkpoint is written."""
    script = Path(__file__).with_name("kill_trials.py")
    done = subprocess.run(
        [sys.executable, script, digits / "corpus", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["killed"]["inside"] >= 10
    assert sum(result["killed"].values()) >= 30
