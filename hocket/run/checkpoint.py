"""Checkpoints: written aside while training goes on, checksummed, fenced, then renamed.

A folder with its final name is whole at any moment: whoever reads one checks it against its own COMPLETE.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from hocket.config import CheckpointSection
from hocket.data.files import read_batch
from hocket.errors import CheckpointError, DataLost
from hocket.run.flow import Books, Key

SCHEMA = 1


class Saves(Protocol):
    """A trainer, wherever it is."""

    def snapshot(self) -> None:
        """See Trainer.snapshot."""
        ...

    def save(self, folder: str, names: Sequence[str], units: Sequence[Any]) -> dict[str, str]:
        """See Trainer.save."""
        ...


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole."""

    path: Path
    step: int
    timeline: int
    facts: Mapping[str, Any]
    run: Mapping[str, Any]

    def books(self, *, buffered: bool = True) -> Books:
        """The flow as it was, with the experience that waited when it is wanted."""
        samples: dict[str, int] = self.run["buffered"] if buffered else {}
        folder = self.path / "state"
        waiting = {_key(name): (read_batch(folder / name), n) for name, n in samples.items()}
        dropped = tuple((int(step), int(unit)) for step, unit in self.run["dropped"])
        return Books(self.step, self.timeline, self.run["accounts"], {}, waiting, dropped)


class Checkpoints:
    """The checkpoints of one run. One is written at a time; what goes wrong is raised by the next `poll` or `begin`.

    `timeline` counts how often a trainer of this folder was started: only the newest may rename.
    """

    def __init__(self, folder: Path, section: CheckpointSection, *, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._section = section
        self._say = say
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None
        self._size = 0
        self.step = -1
        self.last: Saved | None = None

    def due(self, step: int) -> bool:
        """Whether the first `step` steps are to be saved, though they are not the last."""
        every = self._section.every
        return bool(every) and step % (every or 1) == 0

    def fence(self, timeline: int) -> None:
        """From now on only a writer of `timeline` may finish a checkpoint."""
        self.poll(wait=True, quiet=True)
        _write_text(self.folder / "FENCE", f"{timeline}\n")

    def begin(self, books: Books, trainer: Saves, *, metrics: Mapping[str, float], prompts: str) -> None:
        """Copy the trainer's state now, and write it in the background, after the one before is done."""
        self.poll(wait=True)
        self.step = books.step
        trainer.snapshot()
        about = {"metrics": dict(metrics), "prompts_sha256": prompts}
        self._writing = self._writer.submit(self._write, books, trainer, about)

    def poll(self, *, wait: bool = False, quiet: bool = False) -> Saved | None:
        """The checkpoint that became whole since the last call. Raises what kept it from that, unless `quiet`."""
        writing = self._writing
        if writing is None or not (wait or writing.done()):
            return None
        self._writing = None
        self.step = -1 if writing.exception() is not None else self.step
        if quiet and writing.exception() is not None:
            return None
        self.last = writing.result()
        return self.last

    def _write(self, books: Books, trainer: Saves, about: Mapping[str, Any]) -> Saved:
        final = self.folder / f"step_{books.step:06d}"
        aside = self.folder / f"{final.name}.tmp-{books.timeline}"
        try:
            _demand_room(self.folder, self._size)
            shutil.rmtree(aside, ignore_errors=True)
            (aside / "state").mkdir(parents=True)
            run, facts = self._save(aside, books, trainer)
            _write_text(aside / "state" / "run.json", json.dumps(run | dict(about)))
            files = checksums(aside)
            self._size = sum(entry["size"] for entry in files.values())
            whole = {"schema": SCHEMA, "step": books.step, "timeline": books.timeline, **facts, "files": files}
            _write_text(aside / "COMPLETE", json.dumps(whole, indent=1) + "\n")
            self._rename(aside, final, books.timeline)
            saved = Saved(final, books.step, books.timeline, whole, run | dict(about))
            self._tidy(saved)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write checkpoint {str(final)!r}: {error}; free space or set run.dir"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # there is none any more when it was renamed
        return saved

    def _save(self, aside: Path, books: Books, trainer: Saves) -> tuple[dict[str, Any], dict[str, str]]:
        kept = {_name(key): samples for key, (_, samples) in books.buffered.items()}
        units = [experience for experience, _ in books.buffered.values()]
        accounts = dict(books.accounts)
        try:
            facts = trainer.save(str(aside), list(kept), units)
        except DataLost:  # the machine with some of it is gone: it will be made again
            kept = {}
            facts = trainer.save(str(aside), [], [])
            accounts["rolled_back"] += accounts.pop("buffered")
        return {"accounts": accounts, "buffered": kept, "dropped": books.dropped}, facts

    def _rename(self, aside: Path, final: Path, timeline: int) -> None:
        if (fence := newest_timeline(self.folder)) > timeline:
            raise CheckpointError(
                f"checkpoint {final.name!r} of timeline {timeline} is not renamed: timeline {fence} has begun, and "
                "another trainer writes here now"
            )
        _sync(aside)
        old = final.with_name(f"{final.name}.tmp-old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        aside.rename(final)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        _link(self.folder / "latest", final.name)

    def _tidy(self, newest: Saved) -> None:
        """Keep what the config says, and always the newest and the best."""
        keep_last, keep_every = self._section.keep_last, self._section.keep_every
        found = sorted(self.folder.glob("step_" + "[0-9]" * 6), reverse=True)
        kept = set(found[:keep_last]) | {newest.path}
        kept |= {path for path in found if keep_every and _step(path) % keep_every == 0}
        if (best := self._best(found)) is not None:
            _link(self.folder / "best", best.name)
            kept.add(best)
        for path in set(found) - kept if keep_last else set[Path]():
            gone = path.with_name(f"{path.name}.tmp-gone")
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _best(self, found: list[Path]) -> Path | None:
        if (metric := self._section.best) is None:
            return None
        sign = -1.0 if metric.startswith("-") else 1.0
        scores: dict[Path, float] = {}
        for path in found:
            metrics = json.loads((path / "state" / "run.json").read_text())["metrics"]
            if metric.lstrip("-") in metrics:
                scores[path] = sign * metrics[metric.lstrip("-")]
        return max(scores, key=lambda path: (scores[path], path), default=None)


def newest(folder: Path, *, say: Callable[[str], None] = lambda text: None) -> Saved | None:
    """The newest checkpoint in `folder` that is whole: the highest step, then the latest timeline.

    `say` is told of each one that is passed over, and why.
    """
    for path in sorted(folder.glob("step_" + "[0-9]" * 6), reverse=True):
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            say(f"passed over: {error.message}")
    return None


def read_checkpoint(path: Path) -> Saved:
    """Check every file of a checkpoint against its COMPLETE. Raises CheckpointError naming what is wrong."""
    whole = _json(path / "COMPLETE")
    schema, step, timeline = (whole.get(name) for name in ("schema", "step", "timeline"))
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has schema {schema}, this version of hocket reads up to {SCHEMA}; "
            "resume with the version that wrote it"
        )
    files: Any = whole.get("files")
    if not (isinstance(schema, int) and isinstance(step, int) and isinstance(timeline, int) and _is_list(files)):
        raise CheckpointError(
            f"checkpoint {str(path)!r} has a COMPLETE without schema, step, timeline or files; use another one"
        )
    for name, wanted in files.items():
        _demand_intact(path, name, wanted["size"], wanted["sha256"])
    return Saved(path, step, timeline, whole, _json(path / "state" / "run.json"))


def _is_list(files: Any) -> bool:
    """Whether COMPLETE says of at least one file what it should be."""
    entries: list[Any] = list(files.values()) if isinstance(files, dict) else []
    return bool(entries) and all(isinstance(entry, dict) and {"size", "sha256"} <= entry.keys() for entry in entries)


def _demand_intact(path: Path, name: str, size: int, sha256: str) -> None:
    file = path / name
    if not file.is_file() or file.stat().st_size != size:
        found = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
        raise CheckpointError(f"checkpoint {str(path)!r}: {name} should have {size} bytes, found {found}")
    if (digest := _sha256(file)) != sha256:
        raise CheckpointError(
            f"checkpoint {str(path)!r}: the bytes of {name} changed: SHA-256 {digest[:16]}, wanted {sha256[:16]}"
        )


def newest_timeline(folder: Path) -> int:
    """The newest timeline that may write into `folder`; -1 before the first."""
    try:
        return int((folder / "FENCE").read_text())
    except (OSError, ValueError):
        return -1


def abandon_after(folder: Path, step: int) -> list[str]:
    """Put the checkpoints behind `step` out of the way: the run goes another way from there. Returns their names."""
    later = [path for path in sorted(folder.glob("step_" + "[0-9]" * 6)) if _step(path) > step]
    if later:
        aside = folder / f"abandoned_{newest_timeline(folder):03d}"
        aside.mkdir(exist_ok=True)
        for path in later:
            path.rename(aside / path.name)
    return [path.name for path in later]


def clear_leftovers(folder: Path) -> None:
    """Remove what killed writers left. One that was to make room for another, which never came, is put back."""
    for old in folder.glob("step_*.tmp-old"):
        final = old.with_name(old.name.removesuffix(".tmp-old"))
        if not final.exists():
            old.rename(final)
    for path in folder.glob("step_*.tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of each file, by its path inside `folder`; all are on the disk afterwards."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _sync(path)
        found[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {str(path.parent)!r} has no readable {path.name} ({error}); it was not finished, or is damaged"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} holds no JSON object; the checkpoint is damaged")
    return content


def _write_text(path: Path, text: str) -> None:
    """Write a small file so that it is there whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    _sync(aside)
    aside.replace(path)


def _link(link: Path, target: str) -> None:
    aside = link.with_name(f"{link.name}.tmp")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _demand_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(f"the last one took {size >> 20} MiB, and {free >> 20} MiB are free")


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _name(key: Key) -> str:
    return f"unit_{key[0]}_{key[1]}"


def _key(name: str) -> Key:
    _, step, unit = name.split("_")
    return int(step), int(unit)
