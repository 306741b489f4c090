"""The short form of benchmarks/soak.py: that it runs, and that what it can find out in a minute holds."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*options):
    done = subprocess.run([sys.executable, SOAK, *options], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_files_and_threads_stay_as_they_are():
    lines = soak("--steps", "300", "--every", "0.5").stdout.splitlines()
    rows = {words[0]: words for words in map(str.split, lines[2:])}
    assert set(rows) == {"driver", "maker-0", "maker-1", "trainer-0"}
    for role, (_, _, _, fewest, _, most, few, _, many) in rows.items():
        assert int(most) - int(fewest) < 12, f"files of {role}"
        assert int(many) - int(few) < 12, f"threads of {role}"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_kill_costs_one_restart():
    text = soak("--minutes", "0.8", "--kill-every", "12").stdout
    kills, restarts = (int(words.split()[0]) for words in (text.splitlines()[1], text.splitlines()[1].split(", ")[-1]))
    assert kills >= 2
    assert restarts == kills, text
    assert "auditor: 0 violations" in text
