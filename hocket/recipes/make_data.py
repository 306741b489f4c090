"""Makes the prompt files of the recipes; `python -m hocket.recipes.make_data` writes them anew.

digits: sort 3 to 6 digits, as many prompts of each length. sums: add two numbers from 1 to 50. No prompt
occurs twice, and no evaluation prompt is a training prompt; a sum is not one in the other order either.
"""

import csv
import io
import random
from pathlib import Path

Row = tuple[str, str]
_SEED = 20240607
_LENGTHS = (3, 4, 5, 6)
_LARGEST_ADDEND = 50


def make_tables() -> dict[str, str]:
    """The text of each file, by its name."""
    digits = _digits(random.Random(_SEED), train=2048, evaluation=256)
    sums = _sums(random.Random(_SEED), train=512, evaluation=64)
    return {
        f"{task}_{split}.csv": _csv(rows)
        for task, splits in (("digits", digits), ("sums", sums))
        for split, rows in splits.items()
    }


def _digits(rng: random.Random, *, train: int, evaluation: int) -> dict[str, list[Row]]:
    splits: dict[str, list[Row]] = {"train": [], "eval": []}
    for length in _LENGTHS:
        share = train // len(_LENGTHS)
        chosen = rng.sample(range(10**length), share + evaluation // len(_LENGTHS))
        rows = [_sort_row(f"{value:0{length}d}") for value in chosen]
        splits["train"] += rows[:share]
        splits["eval"] += rows[share:]
    for rows in splits.values():
        rng.shuffle(rows)
    return splits


def _sort_row(digits: str) -> Row:
    return f"sort {digits}:", "".join(sorted(digits))


def _sums(rng: random.Random, *, train: int, evaluation: int) -> dict[str, list[Row]]:
    largest = _LARGEST_ADDEND
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1)]
    rows = [_sum_row(*rng.sample(pair, 2)) for pair in rng.sample(pairs, train + evaluation)]
    return {"train": rows[:train], "eval": rows[train:]}


def _sum_row(a: int, b: int) -> Row:
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("prompt", "answer"), *rows])
    return text.getvalue()


def main() -> None:
    """Write the files beside this module."""
    for name, text in make_tables().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8", newline="")


if __name__ == "__main__":
    main()
