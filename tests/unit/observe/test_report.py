import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import pytest

from hocket.errors import DataError
from hocket.observe.metrics import read_metrics
from hocket.observe.report import write_report

MakeRun = Callable[..., Path]


class _Page(HTMLParser):
    """The text a reader sees, the scripts, and every address that a tag would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.policy = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.text += data

    def figures(self) -> list[dict[str, Any]]:
        return next((json.loads(script) for script in self.scripts if script.startswith("[{")), [])


def _page(folder: Path) -> _Page:
    path = write_report(folder)
    assert path == folder / "report.html"
    assert path.stat().st_size < 6_000_000
    return _Page(path.read_text(encoding="utf-8"))


def _names(figure: dict[str, Any]) -> list[str]:
    return [trace["name"] for trace in figure["data"]]


def test_a_finished_run_has_every_section(make_run: MakeRun) -> None:
    run = make_run()
    page = _page(run)
    rewards = [r["reward/mean"] for r in read_metrics(run / "metrics.jsonl") if "reward/mean" in r]
    rise = f"{fmean(rewards[:15]):.3f} → {fmean(rewards[-15:]):.3f}"
    for part in ("sums--chars-2M--7", "detached, 2 makers", "150 of 150", rise):
        assert part in page.text
    for part in ("eval/accuracy", "wall time", "Ledger", "First samples · step 1", "Last samples · step 150"):
        assert part in page.text
    assert "It equals the 10,850 samples produced." in page.text
    assert "kind: detached" in page.text
    assert "3.11.7" in page.text
    assert page.text.count("version 149") == 10
    assert "unfinished" not in page.text
    assert "Not drawn" not in page.text


def test_the_figures_hold_the_run(make_run: MakeRun) -> None:
    figures = _page(make_run()).figures()
    for figure in figures:
        go.Figure(figure)  # raises on a property that plotly does not have
    reward, kl, staleness, speed, length, phases, timeline = figures
    assert _names(reward) == ["", "± std", "each step", "mean of 18", "eval/accuracy"]
    assert reward["data"][2]["x"] == list(range(1, 151))
    assert _names(kl) == ["to the reference", "within the update", "maker to trainer"]
    assert (_names(staleness), _names(speed)) == (["max", "mean"], ["tokens/s"])
    assert _names(length) == ["longest", "mean", "cut off (right axis)"]
    assert _names(phases) == ["train", "sync", "generate", "reward", "wait", "whole step"]
    assert timeline["layout"]["yaxis"]["categoryarray"] == ["driver", "trainer-0", "maker-0", "maker-1"]
    train = timeline["data"][_names(timeline).index("train")]
    assert [text.split()[1] for text in train["customdata"]] == ["148", "149", "150"]


def test_the_page_loads_nothing_and_forbids_itself_to(make_run: MakeRun) -> None:
    page = _page(make_run(2))
    assert page.loads == []
    assert "default-src 'none'" in page.policy
    assert len(page.scripts) == 3  # plotly, the figures, and the lines that draw them


def test_what_a_model_or_a_user_wrote_is_shown_as_text(make_run: MakeRun) -> None:
    folder = make_run(1)
    sample = {"prompt": "</script><b>", "completion": "<script>steal()</script>", "answer": 0, "score": None}
    (folder / "samples/step_000001.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "config.resolved.yaml").write_text("placement: '<img src=x>'\n")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 2, "eval/</script><script>x": 1.0}) + "\n")
    page = _page(folder)
    assert page.loads == []
    assert len(page.scripts) == 3
    for part in ("<script>steal()</script>", "</script><b>", "answer 0", "no score", "<img src=x>"):
        assert part in page.text


def test_a_run_without_steps_says_so(make_run: MakeRun) -> None:
    page = _page(make_run(0))
    for part in ("no finished step yet", "0 of 150", "No ledger", "No samples", "kind: detached"):
        assert part in page.text
    assert page.scripts == []


def test_an_empty_folder_gives_a_page(tmp_path: Path) -> None:
    assert "config.resolved.yaml is not in the run folder" in _page(tmp_path).text


def test_a_run_of_one_step_is_drawn_as_points(make_run: MakeRun) -> None:
    folder = make_run(1)
    page = _page(folder)
    assert "stopped, or still goes on, at step 1 of 150" in page.text
    assert "Last samples · step 1" in page.text
    assert "First samples" not in page.text
    assert all("markers" in trace["mode"] for trace in page.figures()[1]["data"])
    (folder / "config.resolved.yaml").unlink()
    assert "one step only" in _page(folder).text


def test_a_chart_without_data_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n')
    page = _page(tmp_path)
    assert [_names(figure) for figure in page.figures()] == [["each step", "mean of 1"]]
    assert page.text.count("Not drawn:") == 6
    assert "because there is no trace" in page.text


def test_a_step_done_again_after_a_resume_counts_once_and_an_evaluation_joins_its_step(
    tmp_path: Path,
) -> None:
    records = [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.2},
        {"step": 2, "reward/mean": 0.3},
        {"step": 2, "eval/accuracy": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = _page(tmp_path)
    (reward,) = page.figures()
    assert reward["data"][0]["y"] == [0.1, 0.3]
    assert "0.100 → 0.300" in page.text


@pytest.mark.parametrize(("produced", "sentence"), [(10, "equals the 10"), (11, "do not add up: 11 samples")])
def test_the_ledger_is_added_up(tmp_path: Path, produced: int, sentence: str) -> None:
    record = {"step": 1, "ledger/trained": 8, "ledger/filtered/zero_std": 2, "ledger/produced": produced}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    page = _page(tmp_path)
    assert "filtered: zero std" in page.text
    assert sentence in page.text


def test_a_long_run_is_thinned_but_keeps_its_last_step(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "reward/mean": step / 7}) for step in range(1, 2502)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    steps = _page(tmp_path).figures()[0]["data"][0]["x"]
    assert len(steps) <= 1000
    assert steps[-1] == 2501


def test_the_last_step_is_diagnosed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "group/zero_std_frac": 0.99}\n')
    assert "Last step: group/zero_std_frac 0.99" in _page(tmp_path).text


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ("placement: colocated\nseed: 1\n", "colocated"),
        (
            "seed: 1\nplacement:\n  kind: detached\n  makers: 3\n  edges: null\nalgo: x\n",
            "detached, 3 makers",
        ),
    ],
)
def test_the_placement_is_read_from_the_config(tmp_path: Path, config: str, shown: str) -> None:
    (tmp_path / "config.resolved.yaml").write_text(config)
    assert re.search(rf"placement\s*{shown}\s*steps", _page(tmp_path).text)


def test_a_damaged_environment_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text('{"python": ')
    with pytest.raises(DataError, match=r"env\.json is no JSON object"):
        write_report(tmp_path)


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder"):
        write_report(tmp_path / "absent")
