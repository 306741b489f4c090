"""Trains the digits recipe in every placement and writes the weights' SHA-256 into the table of README.md.

Five steps, seed 0, staleness 0, through the command line, in temporary run folders. Exits with 1 when two
placements end with different weights.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

HOCKET = str(Path(sys.executable).parent / "hocket")
README = Path(__file__).resolve().parent.parent / "README.md"
PLACEMENTS = ("local", "colocated", "detached(makers=1)", "detached(makers=2)")
STEPS = 5
_BLOCK = re.compile(r"(?<=<!-- invariance -->\n).*?(?=<!-- /invariance -->)", re.DOTALL)


def main() -> None:
    """Run, rewrite the table, and fail when the promise does not hold."""
    with tempfile.TemporaryDirectory() as scratch:
        hashes = {placement: train(placement, Path(scratch)) for placement in PLACEMENTS}
    README.write_text(rewritten(README.read_text(encoding="utf-8"), table(hashes)), encoding="utf-8")
    print(table(hashes))
    if len(set(hashes.values())) != 1:
        raise SystemExit("the placements do not agree")


def train(placement: str, scratch: Path) -> str:
    """The SHA-256 of the weights that `placement` ends with."""
    folder = scratch / re.sub(r"\W+", "-", placement)
    settings = [f"placement={placement}", f"trainer.max_steps={STEPS}", "seed=0", f"run.dir={folder}"]
    subprocess.run([HOCKET, "train", *settings], check=True)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return str(summary["weights_sha256"])


def table(hashes: dict[str, str]) -> str:
    """The table in markdown, with the libraries that the bits depend on."""
    rows = [f"| `placement={placement}` | `{digest[:16]}` |" for placement, digest in hashes.items()]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    return "\n".join(
        [
            f"| `hocket train seed=0 trainer.max_steps={STEPS}` with | SHA-256 of the weights, first 16 digits |",
            "|---|---|",
            *rows,
            "",
            f"Written by `benchmarks/invariance.py` on {platform.system()} {platform.machine()} with {versions}.",
            "",
        ]
    )


def rewritten(page: str, text: str) -> str:
    """`page` with `text` between the marks of the table."""
    if not _BLOCK.search(page):
        raise SystemExit(f"{README.name} has no <!-- invariance --> ... <!-- /invariance --> block to write into")
    return _BLOCK.sub(lambda _: text, page)


if __name__ == "__main__":
    main()
