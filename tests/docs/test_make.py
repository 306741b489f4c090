"""The two commands of the README, typed in a fresh clone."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_make_demo_in_a_fresh_clone(tmp_path):
    clone = tmp_path / "hocket"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    environment = {key: os.environ[key] for key in os.environ if not key.startswith(("VIRTUAL_ENV", "PYTHON"))}
    done = subprocess.run(
        ["make", "demo", "ARGS=trainer.max_steps=20"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 20/20" in done.stdout
    assert (clone / "runs" / "demo" / "report.html").exists()
