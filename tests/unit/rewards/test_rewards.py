"""Reward functions in both styles: what they are given, what they may return, and how they travel."""

import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from hocket.errors import ConfigError, RewardError
from hocket.rewards.adapters import Reward, Scores, load_reward
from hocket.rewards.builtin import digits, exact, number

FILE = """
from dataclasses import dataclass

BONUS = 10


@dataclass
class Verdict:
    right: bool


def helper(completion: str, answer: str) -> Verdict:
    return Verdict(completion == answer)


def other(completion):
    return 1


def reward_fn(completion, answer):
    return BONUS if helper(completion, answer).right else 0
"""


def score(reward: Reward, *completions: str, **columns: list[Any]) -> Scores:
    """Score completions of prompts p0, p1, ...; a column not given is `answer`, all a."""
    columns = {"answer": ["a"] * len(completions), **columns}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    numbers = range(len(completions))
    return reward([f"p{i}" for i in numbers], completions, rows, [f"u{i}" for i in numbers])


def write(folder: Path, text: str, name: str = "my_reward.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# --- styles ---


def test_per_sample_gets_prompt_completion_and_columns_by_name() -> None:
    def f(prompt: str, completion: str, answer: str, level: int, weight: float = 0.5) -> float:
        assert prompt == {"x": "p0", "y": "p1"}[completion]
        return level + (completion == answer) * weight

    assert score(Reward(f), "x", "y", answer=["x", "x"], level=[1, 2]) == Scores([1.5, 2.0], {})
    assert score(Reward(f), "x", answer=["x"], level=[1], weight=[4]) == Scores([5.0], {})


def test_per_batch_gets_lists_and_all_columns_as_keywords() -> None:
    seen: dict[str, Any] = {}

    def f(prompts: list[str], completions: list[str], solution: list[str], **kwargs: Any) -> list[bool]:
        seen.update(kwargs, prompts=prompts)
        return [c == s for c, s in zip(completions, solution, strict=True)]

    assert score(Reward(f), "x", "y", solution=["x", "x"], level=[1, 2]) == Scores([1.0, 0.0], {})
    assert seen == {"prompts": ["p0", "p1"], "answer": ["a", "a"], "level": [1, 2]}


def test_per_sample_keywords_get_all_columns() -> None:
    def f(completion: str, **columns: Any) -> int:
        return len(columns)

    assert score(Reward(f), "x", level=[1]).values == [3.0]  # prompt, answer, level


@pytest.mark.parametrize(
    "function",
    [lambda text: 1, lambda completion, completions: 1, lambda *args: 1, lambda completion, /: 1, min],
    ids=["neither", "both", "star", "positional", "builtin"],
)
def test_a_signature_of_no_style_is_refused_with_both_styles(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Reward(function, name="f")
    for part in ("reward f", "def reward(completion, answer)", "def reward(completions, answer)"):
        assert part in caught.value.message


def test_the_refusal_shows_the_signature_and_async_is_one() -> None:
    async def f(completion: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"`async def f\(completion: str\) -> float`"):
        Reward(f)
    with pytest.raises(ConfigError, match=r"`def <lambda>\(text, answer=3\)`"):
        Reward(lambda text, answer=3: 1)


def test_check_names_the_column_that_is_missing() -> None:
    def f(completions: list[str], solution: list[str], level: object = None) -> list[float]:
        return [1.0 for _ in completions]

    Reward(f).check(["prompt", "solution"])
    with pytest.raises(ConfigError, match="reward f needs column solution; the file has prompt, answer"):
        Reward(f).check(["prompt", "answer"])
    Reward(exact).check(["question"])  # `answer` always exists


def test_a_row_without_a_required_column_is_an_error_of_that_row() -> None:
    def f(completion: str, level: int) -> float:
        return level

    with pytest.raises(RewardError, match=r"reward f on sample v .*no column level, only answer"):
        Reward(f)(["p", "p"], ["x", "x"], [{"level": 1}, {"answer": "a"}], ["u", "v"])


def test_columns_that_only_some_rows_have_are_none_in_a_batch() -> None:
    def f(completions: list[str], level: list[Any] | None = None) -> list[float]:
        return [0.0 if one is None else one for one in level or []]

    assert Reward(f)(["p", "p"], ["x", "x"], [{"level": 1}, {}], ["u", "v"]).values == [1.0, 0.0]


def test_no_samples_give_no_scores() -> None:
    assert score(load_reward("exact")) == Scores([], {})


# --- results ---


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), Decimal(1)],
    ids=repr,
)
def test_anything_that_is_one_number_is_a_score(value: object) -> None:
    for reward in (
        Reward(lambda completion: value),
        Reward(lambda completions: [value for _ in completions]),
    ):
        scores = score(reward, "x", "y")
        assert scores == Scores([1.0, 1.0], {})
        assert {type(one) for one in scores.values} == {float}


@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple], ids=["numpy", "torch", "tuple"])
def test_a_batch_may_come_as_an_array(make: Callable[[list[float]], Any]) -> None:
    assert score(Reward(lambda completions: make([0.5, 2.0])), "x", "y").values == [0.5, 2.0]


def test_other_keys_are_metrics_in_both_styles() -> None:
    def one(completion: str) -> dict[str, float]:
        return {"length": len(completion), "score": 1}

    want = Scores([1.0, 1.0], {"length": [1.0, 2.0]})
    assert score(Reward(one), "x", "yy") == want
    assert score(Reward(lambda completions: [one(c) for c in completions]), "x", "yy") == want


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1, 2], torch.ones(2), {}, {"accuracy": 1}], ids=repr)
def test_anything_else_is_refused_with_sample_and_completion(value: object) -> None:
    for reward in (
        Reward(lambda completion: 1 if completion == "x" else value, name="f"),
        Reward(lambda completions: [1, value], name="f"),
    ):
        with pytest.raises(RewardError, match=r"reward f on sample u1 .completion 'yyy'. returned "):
            score(reward, "x", "yyy")


def test_a_metric_that_is_no_number_is_named() -> None:
    with pytest.raises(RewardError, match=r"returned why 'because' \(str\); wanted one finite number"):
        score(Reward(lambda completion: {"score": 1, "why": "because"}), "x")


def test_metrics_must_be_the_same_for_every_sample() -> None:
    with pytest.raises(RewardError, match=r"the keys \['a', 'score'\] and \['score'\]"):
        score(Reward(lambda completions: [{"score": 1, "a": 1}, 1]), "x", "y")


@pytest.mark.parametrize("value", [1.0, "ab", {"score": [1, 1]}, None], ids=repr)
def test_a_batch_must_give_a_list(value: object) -> None:
    with pytest.raises(RewardError, match="wanted a list of 2 scores"):
        score(Reward(lambda completions: value), "x", "y")


def test_a_batch_of_another_length_names_both_numbers() -> None:
    with pytest.raises(RewardError, match="returned 1 scores for 2 completions"):
        score(Reward(lambda completions: [1.0]), "x", "y")


def test_an_exception_carries_function_sample_completion_and_cause() -> None:
    def f(completion: str) -> float:
        return float(completion)

    with pytest.raises(RewardError) as caught:
        score(Reward(f), "1", "z" * 300)
    message = caught.value.message
    where = re.escape(f"reward f on sample u1 (completion '{'z' * 200}')")
    assert re.match(rf"{where} raised ValueError in line \d+: could not convert", message)
    assert isinstance(caught.value.__cause__, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).message == message


def test_an_exception_in_a_batch_says_how_many_samples() -> None:
    with pytest.raises(RewardError, match=r"on sample u0 .* and the 2 samples after it raised ZeroDivisionError"):
        score(Reward(lambda completions: 1 / 0), "x", "y", "z")


# --- loading ---


def test_a_built_in_name_and_a_callable() -> None:
    assert load_reward("exact").name == "exact"
    assert score(load_reward("exact"), " a\n", "b") == Scores([1.0, 0.0], {"accuracy": [1.0, 0.0]})
    assert score(load_reward(partial(exact, answer="b")), "b", answer=["b"]).values == [1.0]
    assert score(load_reward("hocket.rewards.builtin:exact"), "a").values == [1.0]


def test_a_file_gives_the_named_function_or_the_first_known_name(tmp_path: Path) -> None:
    path = write(tmp_path, FILE)
    assert load_reward(str(path)).name == "reward_fn"
    assert score(load_reward(str(path)), "a", "b").values == [10.0, 0.0]
    assert score(load_reward(f"{path}:other"), "a").values == [1.0]
    both = write(tmp_path, "def reward(completion): return 1\ndef compute_score(completion): return 2\n", "b.py")
    assert load_reward(str(both)).name == "compute_score"


def test_two_files_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    rewards: list[Reward] = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        text = f"def value(): return {value}\ndef reward(completion): return value()\n"
        rewards.append(load_reward(str(write(folder, text))))
    assert [score(reward, "x").values for reward in rewards] == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "my_reward.py:rewardfn",
            r"no function rewardfn; it has helper, other, reward_fn; did you mean reward_fn",
        ),
        ("my_reward.py:BONUS", "no function BONUS"),
        ("my_rewrd.py", r"my_rewrd\.py does not exist; did you mean my_reward\.py"),
        ("empty.py", "no function reward_func or compute_score or reward_fn or reward; it has none"),
        ("raises.py", "raised on import, line 2: ZeroDivisionError"),
        ("syntax.py", "raised on import, line 3: SyntaxError"),
    ],
)
def test_a_file_that_does_not_serve_says_why(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, FILE)
    write(tmp_path, "", "empty.py")
    write(tmp_path, "def f():\n    return 1 / 0\n\n\n1 / 1\nf()\n", "raises.py")
    write(tmp_path, "x = 1\n\ndef f(:\n", "syntax.py")
    with pytest.raises(ConfigError, match=message):
        load_reward(str(tmp_path / name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exakt", "no reward 'exakt'; did you mean exact.; wanted a built-in name"),
        ("no_such_module:f", "no_such_module cannot be imported .ModuleNotFoundError"),
        ("hocket.rewards.builtin:exakt", "it has exact, digits, number"),
        ("hocket.rewards.builtin:", "no reward"),
    ],
)
def test_a_name_that_means_nothing_says_what_would(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(spec)


# --- travelling ---


def travelling(tmp_path: Path) -> dict[str, Reward]:
    threshold = 10

    def closure(completion: str) -> int:
        return threshold if completion == "a" else 0

    return {
        "file": load_reward(str(write(tmp_path, FILE))),
        "lambda": load_reward(lambda completion: 10 * (completion == "a")),
        "closure": load_reward(closure),
    }


def test_rewards_run_in_a_process_that_cannot_import_them(tmp_path: Path) -> None:
    rewards = travelling(tmp_path)
    (tmp_path / "rewards.pickle").write_bytes(pickle.dumps(rewards))
    (tmp_path / "my_reward.py").unlink()
    program = """
import pickle
rewards = pickle.load(open("rewards.pickle", "rb"))
rewards = pickle.loads(pickle.dumps(rewards))  # and they travel on from there
for name, reward in rewards.items():
    rows = [{"answer": "a"}] * 2
    assert reward(["p", "p"], ["a", "b"], rows, ["u", "v"]).values == [10.0, 0.0], name
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_arrives_scores_alike_and_keeps_its_name(tmp_path: Path) -> None:
    for reward in travelling(tmp_path).values():
        copy = cloudpickle.loads(cloudpickle.dumps(reward))
        assert copy.name == reward.name
        assert score(copy, "a", "b") == score(reward, "a", "b")


# --- built-in rewards ---


@pytest.mark.parametrize(
    ("completion", "answer", "want"),
    [
        (" 12568\n", "12568", 1.0),
        ("12586", "12568", 0.3),
        ("1256", "12568", 0.4),
        ("125689", "12568", 0.5 * 5 / 6),
        ("", "12568", 0.0),
        ("", "", 1.0),
    ],
)
def test_digits_grades_by_place(completion: str, answer: str, want: float) -> None:
    assert digits(completion, answer) == {"score": pytest.approx(want), "accuracy": float(want == 1)}


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("68", "68", True),
        ("23 + 45 = 68.", "68", True),
        ("68.0", "68", True),
        ("It is 1,068", "1068", True),
        ("It is 1068", "1,068.00", True),
        ("x=-3", "-3", True),
        ("x = \N{MINUS SIGN}3", "-3", True),
        ("10-3", "3", True),
        ("2, 3", "3", True),
        (".5", "0.5", True),
        ("0.1", "0.10", True),
        ("68 or 69", "68", False),
        ("no idea", "68", False),
        ("", "68", False),
        ("1,0680", "1068", False),
        ("so 42", "6 * 7 = 42\n#### 42", True),
    ],
)
def test_number_compares_the_last_number(completion: str, answer: str, right: bool) -> None:
    assert number(completion, answer) == {"score": float(right), "accuracy": float(right)}


@pytest.mark.parametrize("answer", ["", "abc", "NaN", "inf"])
def test_number_refuses_an_answer_that_is_none(answer: str) -> None:
    with pytest.raises(
        RewardError, match=r"raised ValueError in line \d+: the answer .* is not a number; use reward=exact"
    ):
        score(load_reward("number"), "3", answer=[answer])


def test_a_reward_that_exits_is_an_error_and_not_the_end_of_the_run() -> None:
    def leave(completion: str) -> float:
        raise SystemExit(0)

    with pytest.raises(RewardError, match=r"raised SystemExit in line \d+"):
        score(Reward(leave), "x")


def test_a_metric_may_not_take_the_name_of_the_score() -> None:
    with pytest.raises(RewardError, match="a metric named 'reward'"):
        score(Reward(lambda completion: {"score": 0.2, "reward": 7.0}), "x")


@pytest.mark.parametrize("name", ["exact", "digits", "number"])
def test_a_reward_that_compares_needs_answers(name: str) -> None:
    load_reward(name).check(["prompt"])
    with pytest.raises(ConfigError, match=rf"reward {name} needs answers.*data.answer_key"):
        load_reward(name).check(["prompt"], answers=False)
