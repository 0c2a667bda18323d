import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import digits_corpus, write_digits


def test_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path):
    """SIGKILL at more than thirty moments, more than ten of them while a checkpoint is written."""
    script = Path(__file__).with_name("kill_trials.py")
    train, valid = write_digits(tmp_path / "train.txt", 300, seed=1), write_digits(tmp_path / "valid.txt", 5, seed=2)
    digits_corpus(train, valid, tmp_path / "corpus")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "corpus", tmp_path / "runs"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    assert result["killed"]["inside"] >= 10
    assert sum(result["killed"].values()) >= 30
