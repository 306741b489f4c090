"""A folder with the name of a checkpoint is whole, whenever its writer was killed; what was damaged is passed over."""

import json
import os
import resource
import signal
import threading
from itertools import count
from pathlib import Path

import pytest
from checkpoint_crash import KILLED, Writer, books, crash, write

from hocket.config import CheckpointSection
from hocket.errors import CheckpointError, DataLost
from hocket.run.checkpoint import (
    Checkpoints,
    abandon_after,
    clear_leftovers,
    newest,
    newest_timeline,
    read_checkpoint,
)


def make(folder, *, timeline=0, say=print, **section):
    checkpoints = Checkpoints(folder, CheckpointSection(**section), say=say)
    checkpoints.fence(timeline)
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.glob("step_*"))


def content(saved):
    return (saved.path / "hf" / "weights").read_text()[: len("0 0")]


# --- what is in one -------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_the_books_and_what_waited(tmp_path):
    written = write(tmp_path, 3, timeline=2, reward=0.5)
    found = newest(tmp_path)
    assert found.path == written.path
    assert (found.path.name, found.step, found.timeline, content(found)) == ("step_000003", 3, 2, "3 2")
    assert found.run["metrics"] == {"reward/mean": 0.5}
    assert found.run["prompts_sha256"] == "p"
    back, before = found.books(), books(3, 2)
    assert (back.step, back.timeline, back.accounts, back.dropped) == (3, 2, before.accounts, before.dropped)
    unit, samples = back.buffered[3, 1]
    assert (list(unit.non_tensor_batch["uid"]), unit.meta_info, samples) == (["a", "b"], {"step": 3, "unit": 1}, 2)
    assert found.books(buffered=False).buffered == {}
    assert os.readlink(tmp_path / "latest") == "step_000003"


def test_training_goes_on_while_one_is_written(tmp_path):
    class Slow(Writer):
        gate = threading.Event()

        def save(self, folder, names, units):
            self.gate.wait(10)
            return super().save(folder, names, units)

    checkpoints = make(tmp_path)
    checkpoints.begin(books(1), Slow(), metrics={}, prompts="")
    assert checkpoints.poll() is None
    assert checkpoints.step == 1
    assert newest(tmp_path) is None
    Slow.gate.set()
    assert checkpoints.poll(wait=True).step == 1
    assert checkpoints.poll(wait=True) is None, "each is told once"


def test_experience_that_is_gone_with_its_machine_is_rolled_back(tmp_path):
    class Elsewhere(Writer):
        def save(self, folder, names, units):
            if units:
                raise DataLost("it lay on a node that died")
            return super().save(folder, names, units)

    checkpoints = make(tmp_path)
    checkpoints.begin(books(2), Elsewhere(), metrics={}, prompts="")
    saved = checkpoints.poll(wait=True).books()
    assert (saved.buffered, saved.accounts["rolled_back"]) == ({}, 4 + 2)
    assert sum(saved.accounts.values()) == sum(books(2).accounts.values())


# --- killed while it is written -------------------------------------------------------------------------------------


def every_crash(tmp_path, before, *args, **kwargs):
    """The folder after a crash at each change to the disk in turn; at the end, after none."""
    for at in count():
        folder = tmp_path / f"crash-{at}"
        before(folder)
        code = crash(at, folder, *args, **kwargs)
        assert code in (0, KILLED)
        yield folder
        if code == 0:
            assert at > 20, "the writer was not killed as often as it wrote"
            return


def whole(folder, *steps):
    """What is found is of one of `steps`, and has the content of it; a further one can be written."""
    clear_leftovers(folder)
    found = newest(folder)
    assert found is not None, names(folder)
    assert found.step in steps
    assert (folder / "latest").exists(), "it names one that is there"
    assert names(folder) == [path.name for path in sorted(folder.glob("step_" + "[0-9]" * 6))]
    later = write(folder, 9, timeline=7, keep_last=1)
    assert newest(folder).path == later.path
    assert names(folder) == ["step_000009"]
    return found


def test_a_crash_at_any_change_to_the_disk_costs_at_most_one_checkpoint(tmp_path):
    def before(folder):
        write(folder, 1, reward=1.0)

    found = [whole(folder, 1, 2) for folder in every_crash(tmp_path, before, 2, keep_last=1, best="reward/mean")]
    assert {one.step: one.facts["weights_sha256"] for one in found} == {1: "1 0", 2: "2 0"}
    steps = [one.step for one in found]
    assert steps == sorted(steps), "once it was whole, it stays"


def test_a_crash_while_a_step_is_written_again_leaves_a_whole_one(tmp_path):
    def before(folder):
        write(folder, 1)
        write(folder, 2)

    again = every_crash(tmp_path, before, 2, timeline=1, keep_last=1)
    found = [whole(folder, 2) for folder in again]
    assert {one.timeline for one in found} == {0, 1}
    assert found[-1].timeline == 1, "of two with one step, the later one"


def test_a_crash_of_the_very_first_leaves_nothing_that_looks_like_one(tmp_path):
    for folder in every_crash(tmp_path, lambda folder: folder.mkdir(), 1):
        found = newest(folder)
        assert (found is None) == (not any(folder.glob("step_" + "[0-9]" * 6)))


# --- who may write --------------------------------------------------------------------------------------------------


def test_a_writer_whose_timeline_is_over_may_not_finish(tmp_path):
    old = make(tmp_path, timeline=3)
    new = make(tmp_path, timeline=4)
    old.begin(books(5, 3), Writer("old"), metrics={}, prompts="")
    with pytest.raises(CheckpointError, match=r"'step_000005' of timeline 3 is not renamed: timeline 4 has begun"):
        old.poll(wait=True)
    assert newest(tmp_path) is None
    new.begin(books(5, 4), Writer("new"), metrics={}, prompts="")
    assert new.poll(wait=True).timeline == 4
    assert newest_timeline(tmp_path) == 4


@pytest.mark.parametrize("text", ["", "three\n", None])
def test_a_fence_that_is_unreadable_keeps_nobody_out(tmp_path, text):
    if text is not None:
        (tmp_path / "FENCE").write_text(text)
    assert newest_timeline(tmp_path) == -1


# --- which are kept -------------------------------------------------------------------------------------------------


def save_all(folder, *rewards, **section):
    checkpoints = make(folder, **section)
    for step, reward in enumerate(rewards, 1):
        checkpoints.begin(books(step), Writer(), metrics={"reward/mean": reward}, prompts="")
    checkpoints.poll(wait=True)
    return [int(name.removeprefix("step_")) for name in names(folder)]


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep_last": 1, "best": "reward/mean"}, [3, 6]),
        ({"keep_last": 1, "best": "-reward/mean"}, [1, 6]),
        ({"keep_last": 1, "best": "no/such"}, [6]),
    ],
)
def test_what_is_kept(tmp_path, section, kept):
    assert save_all(tmp_path, 0.1, 0.2, 0.9, 0.3, 0.4, 0.5, **section) == kept
    if "reward/mean" in section.get("best", ""):
        assert os.readlink(tmp_path / "best") == f"step_00000{kept[0]}"


def test_of_equally_good_ones_the_latest_is_best(tmp_path):
    assert save_all(tmp_path, 0.5, 0.5, 0.1, keep_last=1, best="reward/mean") == [2, 3]


def test_when_it_is_due(tmp_path):
    assert [step for step in range(10) if make(tmp_path, every=3).due(step)] == [0, 3, 6, 9]
    assert not any(make(tmp_path, every=None).due(step) for step in range(10))


# --- damage ---------------------------------------------------------------------------------------------------------


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def complete(change):
    def damage(folder):
        path = folder / "COMPLETE"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return damage


DAMAGE = {
    "a flipped bit": (lambda folder: flip(folder / "hf" / "weights"), r"the bytes of hf/weights changed: SHA-256"),
    "a flipped bit in what waits": (lambda folder: flip(next(folder.glob("state/unit*.safetensors"))), "changed"),
    "a flipped bit in the books": (lambda folder: flip(folder / "state" / "run.json"), r"state/run.json changed"),
    "cut off": (lambda folder: os.truncate(folder / "hf" / "weights", 5), r"12000 bytes, found 5 bytes"),
    "a file is gone": (lambda folder: (folder / "hf" / "config.json").unlink(), r"config.json .*found nothing"),
    "COMPLETE is gone": (lambda folder: (folder / "COMPLETE").unlink(), r"no readable COMPLETE .*not finished"),
    "COMPLETE is empty": (lambda folder: (folder / "COMPLETE").write_text(""), r"no readable COMPLETE"),
    "COMPLETE is a list": (lambda folder: (folder / "COMPLETE").write_text("[]"), r"no JSON object"),
    "COMPLETE is an empty object": (
        lambda folder: (folder / "COMPLETE").write_text("{}"),
        r"without schema, step",
    ),
    "COMPLETE is no text": (lambda folder: (folder / "COMPLETE").write_bytes(b"\xff\xfe"), r"no readable COMPLETE"),
    "no step": (complete({"step": "two"}), r"without schema, step"),
    "no files": (complete({"files": {}}), r"without schema, step"),
    "a file is a number": (complete({"files": {"hf/weights": 1}}), r"without schema, step"),
    "files is a list": (complete({"files": [1]}), r"without schema, step"),
    "a file without its size": (complete({"files": {"hf/weights": {}}}), r"without schema, step"),
    "no timeline": (complete({"timeline": None}), r"without schema, step"),
    "from a newer hocket": (complete({"schema": 2}), r"has schema 2, this version of hocket reads up to 1; resume"),
    "schema is no number": (complete({"schema": "new"}), r"without schema, step"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_named_and_passed_over(tmp_path, how):
    damage, words = DAMAGE[how]
    write(tmp_path, 1)
    last = write(tmp_path, 2)
    damage(last.path)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_checkpoint(last.path)
    assert "step_000002" in str(caught.value)
    said = []
    assert newest(tmp_path, say=said.append).step == 1
    assert said == [f"passed over: {caught.value.message}"]
    damage(tmp_path / "step_000001")
    assert newest(tmp_path) is None


@pytest.mark.parametrize("latest", ["text", "folder", "dangling", None])
def test_what_latest_points_to_does_not_matter(tmp_path, latest):
    write(tmp_path, 1)
    link = tmp_path / "latest"
    link.unlink()
    if latest == "text":
        link.write_text("step_000099")
    elif latest == "dangling":
        link.symlink_to("step_000099")
    elif latest == "folder":
        link.mkdir()
    (tmp_path / "step_000099.tmp-3").mkdir()
    (tmp_path / "step_abc").mkdir()
    assert newest(tmp_path).step == 1
    if latest != "folder":  # which nobody but the user can have made
        write(tmp_path, 2)
        assert os.readlink(link) == "step_000002"


# --- what goes wrong in the background ------------------------------------------------------------------------------


class Fails(Writer):
    """Its disk is full."""

    def save(self, folder, names, units):
        super().save(folder, names, units)
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "ask",
    [
        lambda checkpoints: checkpoints.poll(wait=True),
        lambda checkpoints: checkpoints.begin(books(3, 1), Writer("x"), metrics={}, prompts=""),
    ],
)
def test_an_error_of_the_writer_comes_at_the_next_question(tmp_path, ask):
    checkpoints = make(tmp_path, timeline=1)
    write(tmp_path, 1, timeline=1)
    checkpoints.begin(books(2, 1), Fails("x"), metrics={}, prompts="")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*step_000002.*No space left.*free space"):
        ask(checkpoints)
    assert checkpoints.step == -1, "so that it is tried again"
    assert names(tmp_path) == ["step_000001"], "nothing is left of it"
    assert checkpoints.poll(wait=True) is None
    checkpoints.begin(books(2, 1), Writer("x"), metrics={}, prompts="")
    assert checkpoints.poll(wait=True).step == 2


def test_one_that_fails_while_all_goes_back_is_nobody_s_concern(tmp_path):
    checkpoints = make(tmp_path)
    checkpoints.begin(books(2), Fails("x"), metrics={}, prompts="")
    assert checkpoints.poll(wait=True, quiet=True) is None
    assert checkpoints.poll(wait=True) is None
    checkpoints.begin(books(2), Fails("x"), metrics={}, prompts="")
    checkpoints.fence(1)
    assert checkpoints.poll(wait=True) is None


def test_a_disk_that_is_full_while_a_file_is_written(tmp_path):
    """Stands for it: no file may be larger than 5,000 bytes, and the model's is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write(tmp_path, 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, before[1]))
        with pytest.raises(CheckpointError, match=r"step_000002.*File too large.*free space or set run.dir"):
            write(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert newest(tmp_path).step == 1
    assert names(tmp_path) == ["step_000001"]


def test_what_will_not_fit_is_not_begun(tmp_path):
    huge = Path(tmp_path / "huge")
    checkpoints = make(tmp_path)

    class Sparse(Writer):
        def save(self, folder, names, units):
            facts = super().save(folder, [], [])
            huge.touch()
            return facts

    checkpoints.begin(books(1), Sparse("x" * 1000), metrics={}, prompts="")
    assert checkpoints.poll(wait=True).step == 1
    huge.unlink()
    checkpoints._size = 1 << 60
    checkpoints.begin(books(2), Sparse("x"), metrics={}, prompts="")
    with pytest.raises(CheckpointError, match=r"the last one took 1099511627776 MiB, and \d+ MiB are free"):
        checkpoints.poll(wait=True)
    assert not huge.exists(), "the trainer was not even asked"


def test_a_folder_that_may_not_be_written(tmp_path):
    checkpoints = make(tmp_path / "c")
    (tmp_path / "c" / "step_000001.tmp-0").write_text("a file where a folder should be")
    checkpoints.begin(books(1), Writer("x"), metrics={}, prompts="")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        checkpoints.poll(wait=True)


def test_a_run_that_goes_back_puts_later_checkpoints_aside(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step_{step:06d}").mkdir()
    (tmp_path / "FENCE").write_text("4\n")
    assert abandon_after(tmp_path, 1) == ["step_000002", "step_000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FENCE", "abandoned_004", "step_000001"]
    assert abandon_after(tmp_path, 1) == []
