import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.errors import DataError
from hocket.observe.metrics import MetricsWriter, diagnose, read_metrics


def test_round_trip_keeps_types_and_turns_what_is_not_finite_into_null(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    computed: dict[str, Any] = {"step": 2, "reward/mean": np.float32(0.5)}
    with MetricsWriter(path) as writer:
        writer.write({"step": 1, "kl/ref": float("nan"), "ratio/max": float("inf"), "note": "é\u2028", "lr": None})
        writer.write(computed)
    assert read_metrics(path) == [
        {"step": 1, "kl/ref": None, "ratio/max": None, "note": "é\u2028", "lr": None},
        {"step": 2, "reward/mean": 0.5},
    ]


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 1})
        assert read_metrics(writer.path) == [{"step": 1}]


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', '{"step": "é'.encode()[:-1].decode("latin-1"), "17"])
def test_a_torn_last_line_is_dropped_and_a_resumed_run_writes_behind_the_whole_ones(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn.encode("latin-1"))
    assert read_metrics(path) == [{"step": 1}]
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]


def test_a_whole_last_line_without_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}')
    with MetricsWriter(path) as writer:
        writer.write({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_damage_that_no_interrupted_write_explains_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n\nbroken\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 3 is no JSON object"):
        read_metrics(path)
    with pytest.raises(DataError, match="no file"):
        read_metrics(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ({"group/zero_std_frac": 0.97}, "group/zero_std_frac 0.97: rewards are the same"),
        ({"len/truncated_frac": 0.9}, "len/truncated_frac 0.90"),
        ({"time/wait_experience": 0.8, "time/step": 1.0}, "80% of the step.*add makers"),
        ({"mismatch/abs_mean": 0.1, "staleness/max": 0}, "mismatch/abs_mean 0.1 at staleness 0"),
        (
            {"mismatch/ratio_mean/0": 0.9, "mismatch/ratio_error/0": 0.002},
            r"0.900: .* chance would give 1.000 \+- 0.002",
        ),
        ({"mismatch/ratio_mean/0": 1.1, "mismatch/ratio_error/0": 0.0}, "mismatch/ratio_mean/0 1.100"),
        ({"correction/kept": 0.49}, "correction/kept 49%: the correction drops more than half"),
        ({"kl/ref": -0.2}, "kl/ref -0.2: a KL cannot be negative"),
        ({"grad_norm": float("nan")}, "grad_norm nan"),
        ({"grad_norm": float("inf")}, "grad_norm inf"),
    ],
)
def test_each_threshold_has_one_sentence(metrics: dict[str, float], sentence: str) -> None:
    found = diagnose(metrics)
    assert len(found) == 1
    assert re.search(sentence, found[0])


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"kl/ref": None, "grad_norm": None, "name": "run"},
        {"group/zero_std_frac": 0.94, "len/truncated_frac": 0.89, "kl/ref": -0.001, "grad_norm": 2.0},
        {"time/wait_experience": 0.69, "time/step": 1.0},
        {"time/wait_experience": 0.0, "time/step": 0.0},
        {"mismatch/abs_mean": 0.1, "staleness/max": 1},
        {"mismatch/abs_mean": 1e-5, "staleness/max": 0},
        {"mismatch/ratio_mean/0": 0.95, "mismatch/ratio_error/0": 0.01},
        {"mismatch/ratio_mean/0": 0.5, "mismatch/ratio_error/0": None},
        {"mismatch/ratio_mean/1": 0.5, "mismatch/ratio_error/1": 0.0, "correction/kept": 0.5},
    ],
)
def test_no_sentence_below_the_thresholds(metrics: dict[str, float]) -> None:
    assert diagnose(metrics) == []
