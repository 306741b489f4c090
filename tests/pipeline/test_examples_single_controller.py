"""The examples of the single controller, run as a reader runs them: a program of its own each."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.ray


def run(name, *options, timeout=300):
    """What the example prints; its Ray cluster and its HOME are its own."""
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as home:  # short, for Ray's sockets
        ran = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *options],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"HOME": home, "RAY_TMPDIR": home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def weights(printed):
    found = re.findall(r"^weights of the (\w+): (\w{64})$", printed, re.MULTILINE)
    assert [role for role, _ in found] == ["actor", "critic"]
    return found


@pytest.mark.timeout(310)
def test_the_article_of_colocation():
    added, subtracted = [0.0] * 5 + [1.0] * 5, [-10.0] * 10
    assert run("colocated_article.py").splitlines() == [
        "the bound class: WorkerDict with base Worker",
        f"before spawn: actor_add {added}",
        f"              critic_sub {subtracted}",
        f"after spawn:  actor.add {added}",
        f"              critic.sub {subtracted}",
        f"the caller's data: {[0.0] * 10}",
        "processes: 2 shared: True",
    ]


@pytest.mark.timeout(620)
@pytest.mark.slow
def test_four_roles_in_one_process_or_apart_learn_the_same():
    together, apart = (run("four_roles.py", "--steps", "2", *layout) for layout in ([], ["--separate"]))
    assert weights(together) == weights(apart)


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_four_roles_learn_to_sort_digits():
    printed = run("four_roles.py", timeout=600)  # 2 minutes where nothing else runs
    first, last = map(float, re.findall(r"tenth (\d\.\d+)", printed))
    assert last - first >= 0.2
