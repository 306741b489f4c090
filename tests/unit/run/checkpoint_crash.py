"""A child process that writes a checkpoint and dies at the n-th thing that it does to the disk."""

import os
import sys
from multiprocessing import get_context
from pathlib import Path

from hocket.config import CheckpointSection
from hocket.data.files import write_batch
from hocket.data.proto import DataProto
from hocket.run.checkpoint import Checkpoints
from hocket.run.flow import Books

KILLED = 9
_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
_CONTEXT = get_context("forkserver")  # its children are forked from a process without threads
_CONTEXT.set_forkserver_preload(["hocket.run.checkpoint"])


class Writer:
    """A trainer as far as checkpoints see one. What it writes tells which step and timeline it is of."""

    def __init__(self, content: str = ""):
        self.content = content

    def snapshot(self):
        """Nothing to copy: the content is a constant."""

    def save(self, folder, names, units):
        """Two files of a model, and what waits."""
        path = Path(folder)
        (path / "hf").mkdir()
        with (path / "hf" / "weights").open("w") as weights:
            weights.write(self.content * 4000)
            (path / "hf" / "config.json").write_text("{}")  # while the other one is half on the disk
        for name, unit in zip(names, units, strict=True):
            write_batch(path / "state" / name, unit)
        return {"weights_sha256": self.content, "optimizer_sha256": ""}


def books(step, timeline=0):
    """The flow behind `step` steps, with a unit that waits."""
    waiting = {(step, 1): (DataProto.from_dict({}, {"uid": ["a", "b"]}, {"step": step, "unit": 1}), 2)}
    accounts = {"trained": 8 * step, "buffered": 2, "in_flight": 4, "rolled_back": 0}
    accounts["rolled_back"] += accounts.pop("in_flight")
    return Books(step, timeline, accounts, {}, waiting, ((step + 1, 0),))


def write(folder, step, *, timeline=0, reward=0.0, content=None, **section):
    """Write one checkpoint, and wait until it is whole."""
    checkpoints = Checkpoints(Path(folder), CheckpointSection(**section), say=lambda text: None)
    checkpoints.fence(timeline)
    trainer = Writer(f"{step} {timeline}" if content is None else content)
    checkpoints.begin(books(step, timeline), trainer, metrics={"reward/mean": reward}, prompts="p")
    return checkpoints.poll(wait=True)


def crash(at, folder, *args, **kwargs):
    """`write` in a child that is killed before its change number `at` in `folder`; its exit code."""
    child = _CONTEXT.Process(target=_write_until, args=(at, str(folder), args, kwargs))
    child.start()
    child.join(60)
    return child.exitcode


def _write_until(at, folder, args, kwargs):
    changes = iter(range(at))

    def die_in_time(event, details):
        if event in _CHANGES and _inside(details[0], folder) and next(changes, None) is None:
            os._exit(KILLED)

    sys.addaudithook(die_in_time)
    write(folder, *args, **kwargs)
    os._exit(0)


def _inside(path, folder):
    return isinstance(path, (str, os.PathLike)) and str(path).startswith(folder)
