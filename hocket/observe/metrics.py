"""One record per step in `metrics.jsonl`, and the sentences that say when its numbers look wrong."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hocket.errors import DataError
from hocket.observe.closing import Closing

Value = float | int | str | None
Record = Mapping[str, Value]


class MetricsWriter(Closing):
    """Appends records to a JSON Lines file; each is on disk, whole, when `write` returns.

    A file that a killed run left with half a line is mended first, so that a resumed run goes on behind it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _mend_tail(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one record. NaN and infinities become null, which every JSON reader accepts."""
        plain = {name: _plain(value) for name, value in record.items()}
        self._file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def append_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append free-form records, such as samples, to a JSON Lines file; what JSON has no form for becomes text."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a JSON Lines file of objects, in order; a torn last line is dropped.

    Raises:
        DataError: the file is missing, or a line that is not the last one is no JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"no file {path}; wanted one JSON object per line, as a run writes them.")
    # Only "\n" ends a line: a sampled answer may hold other line separators, and half a character at the end.
    lines = path.read_bytes().rstrip().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif line.strip() and number < len(lines):
            raise DataError(
                f"{path}: line {number} is no JSON object, and no interrupted write explains it, as more "
                "lines follow; mend or remove that line."
            )
    return records


def diagnose(metrics: Record) -> list[str]:
    """One sentence per threshold that this step's metrics pass; no sentence when all is well."""
    numbers = _Numbers(metrics)
    return [sentence.format_map(numbers) for passes, sentence in _ALARMS if passes(numbers)]


class _Numbers(dict[str, float]):
    """The numbers of a record; what is missing or is no number reads as NaN, which passes no threshold."""

    def __init__(self, record: Record) -> None:
        super().__init__({k: float(v) for k, v in record.items() if isinstance(v, int | float)})
        self["wait_share"] = self["time/wait_experience"] / (self["time/step"] or math.nan)

    def __missing__(self, name: str) -> float:
        return math.nan


_ALARMS: tuple[tuple[Callable[[_Numbers], bool], str], ...] = (
    (
        lambda m: m["group/zero_std_frac"] >= 0.95,
        "group/zero_std_frac {group/zero_std_frac:.2f}: rewards are the same within almost every group, so "
        "an algorithm that compares the answers to one prompt learns nothing; use other prompts, or larger groups.",
    ),
    (
        lambda m: m["len/truncated_frac"] >= 0.9,
        "len/truncated_frac {len/truncated_frac:.2f}: almost every answer is cut off before it ends; allow "
        "longer answers, or check the stop token.",
    ),
    (
        lambda m: m["wait_share"] > 0.7,
        "time/wait_experience {wait_share:.0%} of the step: the trainer waits for experience; add makers.",
    ),
    (
        lambda m: m["mismatch/abs_mean"] > 1e-4 and m["staleness/max"] == 0,
        "mismatch/abs_mean {mismatch/abs_mean:.2g} at staleness 0: maker and trainer disagree about the same "
        "weights; check top_k and top_p (off unless wanted), model.dtype, temperature, dropout.",
    ),
    (
        # A hundredth is what bfloat16 may do to few tokens; five standard errors are no chance.
        lambda m: abs(m["mismatch/ratio_mean/0"] - 1) > 0.01 + 5 * m["mismatch/ratio_error/0"],
        "mismatch/ratio_mean/0 {mismatch/ratio_mean/0:.3f}: tokens that the trainer's own weights made are not as "
        "likely to it as they were to the maker, and chance would give 1.000 +- {mismatch/ratio_error/0:.2g}; check "
        "top_k and top_p (off unless wanted), temperature, the tokens, and that the makers have the right weights.",
    ),
    (
        lambda m: m["correction/kept"] < 0.5,
        "correction/kept {correction/kept:.0%}: the correction drops more than half of the tokens, so a step learns "
        "from few; widen algo.correction_low and correction_high, lower placement.max_staleness, or use token_tis.",
    ),
    (
        # An unbiased estimate dips a little below zero by chance; only what is beyond that is a fault.
        lambda m: m["kl/ref"] < -0.01,
        "kl/ref {kl/ref:.3g}: a KL cannot be negative; check that answers are sampled from the whole "
        "distribution (no top-p, no top-k) and that the reference is the right model.",
    ),
    (
        lambda m: math.isinf(m["grad_norm"]) or ("grad_norm" in m and math.isnan(m["grad_norm"])),
        "grad_norm {grad_norm}: this step's weights cannot be trusted; lower the learning rate.",
    ),
)


def _plain(value: Value) -> Value:
    if value is None or isinstance(value, str | int):
        return value
    number = float(value)  # also takes numpy's scalars, which json refuses
    return number if math.isfinite(number) else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # both broken JSON and broken UTF-8
        return None
    return record if isinstance(record, dict) else None


def _mend_tail(path: Path) -> None:
    content = path.read_bytes() if path.is_file() else b""
    tail = content.rpartition(b"\n")[2]
    if not tail:
        return
    with path.open("r+b") as file:
        if _parse(tail) is None:
            file.truncate(len(content) - len(tail))
        else:
            file.seek(0, 2)
            file.write(b"\n")
