"""A checkpoint: written aside, then renamed, so that a folder with its final name is always whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from hocket.errors import CheckpointError


def write_checkpoint(checkpoints: Path, step: int, save: Callable[[str], None], *, sha256: str) -> Path:
    """`save` fills a folder (hf/, critic/); it becomes `step_<step>` with the mark COMPLETE, and `latest`.

    Raises CheckpointError when the disk refuses.
    """
    final = checkpoints / f"step_{step:06d}"
    aside = checkpoints / f"step_{step:06d}.tmp"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save(str(aside))
        (aside / "COMPLETE").write_text(json.dumps({"step": step, "weights_sha256": sha256}) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        latest = checkpoints / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(final.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write checkpoint {str(final)!r}: {error}; free space or set run.dir") from error
    return final
