"""`hocket submit`, the page about it and the job script against a real job server that wants a token."""

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
SMALL = ["trainer.max_steps=1", "trainer.prompts_per_step=2", "rollout.group_size=2", "model.warm_start.steps=1"]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.extra, pytest.mark.ray, pytest.mark.timeout(180)]

# RAY_TMPDIR and not temp_dir: the job server tells its jobs of the cluster that it finds there.
HEAD = """
import sys
from ray.cluster_utils import Cluster
ports = {"dashboard_port": int(sys.argv[1]), "dashboard_agent_listen_port": 0}
local = {"include_dashboard": True, "dashboard_host": "127.0.0.1", **ports}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 0, **local})
print("ready", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


class Head:
    """A cluster of one node, its job server at `address`, its token in the file `token`."""

    def __init__(self, home):
        self.home, self.token = home, home / "cluster.token"
        self.token.write_text(secrets.token_hex(32))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        mine = {"HOME": str(home), "RAY_TMPDIR": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.environment = kept | quiet | mine
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", HEAD, str(port)]
        self.process = subprocess.Popen(command, env=self.environment | token, cwd=home, **pipes)
        assert self.process.stdout.readline() == "ready\n"

    def start(self, *words, env=None, cwd=None):
        """`hocket submit` with the address and these words, in a process of its own."""
        command = [sys.executable, "-m", "hocket", "submit", "--address", self.address, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environment | (env or {}), cwd=cwd or self.home, **pipes)

    def submit(self, *words, **options):
        """The same with the token, until it ends: exit code, stdout, stderr."""
        process = self.start("--token-file", str(self.token), *words, **options)
        out, errors = process.communicate(timeout=150)
        return process.returncode, out, errors

    def shell(self, line, env=None):
        """A line that people paste into a shell; what it prints."""
        own = self.environment | (env or {})
        ran = subprocess.run(["bash", "-c", line], env=own, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def end(self):
        """Close the cluster; all its processes are gone afterwards."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.communicate(timeout=60)
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()


@pytest.fixture(scope="module")
def head():
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as home:  # short, for Ray's sockets
        head = Head(Path(home))
        yield head
        head.end()


def job_of(out, head):
    """The job's id, from the line that also has its page."""
    found = re.match(rf"job (hocket-\w+): {re.escape(head.address)}/#/jobs/\1\n", out)
    assert found, out
    return found[1]


def test_a_job_has_its_folder_and_its_variables_and_nothing_else_of_ours(head, tmp_path):
    (tmp_path / "here.txt").write_text("from the folder\n")
    script = 'cat here.txt; echo "<$OURS> <$SECRET>"; echo "to stderr" >&2; exit 7'
    secret = {"SECRET": "do not send", "RAY_ADDRESS": "http://127.0.0.1:1"}
    words = ["--working-dir", str(tmp_path), "--env", "OURS=a  b=c", "--", "bash", "-c", script]
    code, out, errors = head.submit(*words, env=secret)
    job = job_of(out, head)
    assert code == 7, errors
    assert "\nfrom the folder\n" in out
    assert "\n<a  b=c> <>\n" in out
    assert "\nto stderr\n" in out
    assert out.endswith(f"\njob {job} failed: exit code 7\n")
    assert errors == ""


def test_packages_and_requirements_are_there_for_the_job(head, tmp_path):
    wheel = tmp_path / "hk_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "hk_tiny-1.0.dist-info"
        archive.writestr("hk_tiny.py", "NUMBER = 41\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hk-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"hk_tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    (tmp_path / "needs.txt").write_text(f"# the wheel\n\nhk-tiny @ {wheel.as_uri()}\n")
    needs = ["--pip", str(tmp_path / "needs.txt")]
    code, out, errors = head.submit(*needs, "--", "python", "-c", "import hk_tiny; print(hk_tiny.NUMBER + 1)")
    assert (code, "\n42\n" in out) == (0, True), out + errors


def test_a_job_that_cannot_start_says_why(head):
    code, out, errors = head.submit("--pip", "hk-none @ file:///not/there-1.0-py3-none-any.whl", "--", "true")
    assert code == 1
    assert "/not/there-1.0-py3-none-any.whl" in out.partition(f"job {job_of(out, head)} failed: ")[2], out
    assert errors == ""


@pytest.mark.timeout(400)
def test_the_commands_of_the_page_and_the_job_script(head, tmp_path):
    files = dict(re.findall(r"^```yaml file=(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "cluster.token").write_text(head.token.read_text())
    own = {"RAY_AUTH_TOKEN_PATH": str(head.token)}
    printed = []
    for words in page_commands():
        ran = subprocess.run(
            [word.replace("/data/runs", str(tmp_path / "runs")) for word in small(words, head.address)],
            env=head.environment | own,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        printed.append(ran.stdout)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["local", "script", "sort"]
    for run in ("local", "script", "sort"):
        assert json.loads((tmp_path / "runs" / run / "summary.json").read_text())["finished"]
    assert f"attached to the Ray cluster at {'auto'}" in printed[0]
    log = next(line for line in printed[3].splitlines() if line.startswith("its log: "))
    assert "seed: 7" in head.shell(log.removeprefix("its log: "), own)


def page_commands():
    """Every command of the page but those that install."""
    text = "\n".join(re.findall(r"^```bash no-run\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines()]
    return [words for words in commands if words and words[0] in ("hocket", "python")]


def small(words, address):
    """A command of the page with the test's address, and settings for a run of seconds."""
    words = [*words, *(SMALL if any("sort.yaml" in word for word in words) else [])]
    if words[0] == "python":
        return [sys.executable, str(ROOT / words[1]), *[address if "://" in word else word for word in words[2:]]]
    assert words[:2] == ["hocket", "submit"], words
    own = words[2:4] == ["--address", "http://127.0.0.1:8265"]
    return [str(BIN / "hocket"), "submit", "--address", address, *words[4 if own else 2 :]]


@pytest.mark.parametrize("stop", [False, True])
def test_ctrl_c_leaves_the_job_or_stops_it(head, stop):
    words = ["--stop-on-interrupt"] if stop else []
    process = head.start("--token-file", str(head.token), *words, "--", "bash", "-c", "echo begun; sleep 1000")
    out = ""
    while "begun\n" not in out.replace("echo begun", ""):
        out += (line := process.stdout.readline())
        assert line, process.stderr.read()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=30)
    job = job_of(out, head)
    assert process.returncode == 130
    assert errors == ""
    look = f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={head.token} ray job status --address {head.address} {job}"
    if stop:
        assert f"interrupted; job {job} was told to stop" in rest
        deadline = time.monotonic() + 20
        while "was stopped" not in head.shell(look):
            assert time.monotonic() < deadline
    else:
        assert f"interrupted; job {job} goes on" in rest
        assert "RUNNING" in head.shell(look)
        stop_it = next(line for line in rest.splitlines() if line.startswith("stop it: "))
        assert f"{job}' was stopped" in head.shell(stop_it.removeprefix("stop it: "))


def test_a_wrong_token_or_none_is_said_in_words(head, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text(secrets.token_hex(32))
    for words, message in ([], "none was sent"), (["--token-file", str(wrong)], "not that of the cluster"):
        process = head.start(*words, "--", "true")
        errors = process.communicate(timeout=30)[1]
        assert process.returncode == 2
        assert errors.startswith(f"PlacementError: {head.address} refused us: ")
        assert message in errors


def test_a_listener_that_never_answers_is_given_up_within_seconds(head):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        words = ["--address", f"http://127.0.0.1:{silent.getsockname()[1]}", "--", "true"]
        code, _, errors = head.submit(*words)
    assert code == 2
    assert "no Ray job server answers" in errors
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_server_that_is_gone_or_hangs_under_a_job_is_said_in_words(number):
    """With a cluster of its own; a job that is silent for longer than we wait for a sign of life is followed on."""
    seconds = 35 if number == signal.SIGSTOP else 0
    with tempfile.TemporaryDirectory(prefix="hk-", ignore_cleanup_errors=True) as home:
        head = Head(Path(home))
        try:
            script = f"sleep {seconds}; echo awake; sleep 1000"
            process = head.start("--token-file", str(head.token), "--", "bash", "-c", script)
            job = job_of(process.stdout.readline() or process.stderr.read(), head)
            while process.stdout.readline() != "awake\n":
                assert process.poll() is None, process.stderr.read()
            family = psutil.Process(head.process.pid).children()
            (dashboard,) = [one for one in family if any("dashboard/dashboard.py" in word for word in one.cmdline())]
            dashboard.send_signal(number)
            _, errors = process.communicate(timeout=60)
            dashboard.send_signal(signal.SIGKILL)
        finally:
            head.end()
    assert process.returncode == 1
    assert errors.startswith(f"HocketError: lost {head.address} while job {job} ran ("), errors
    assert "ray job logs --follow" in errors
