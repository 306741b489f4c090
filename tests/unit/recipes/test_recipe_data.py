"""The prompt files of the recipes are what their generator makes, and what they claim to be."""

import re
from collections import Counter
from pathlib import Path

import pytest

from hocket.data.prompts import read_prompts
from hocket.recipes import make_data
from hocket.rewards.adapters import load_reward

FOLDER = Path(make_data.__file__).parent


def rows(name: str) -> dict[str, str]:
    table = read_prompts(FOLDER / name)
    pairs = {str(row.prompt): row.answer for row in table.rows}
    assert len(pairs) == len(table.rows), "a prompt occurs twice"
    return pairs


def test_the_files_are_what_the_generator_makes() -> None:
    tables = make_data.make_tables()
    assert tables == make_data.make_tables()
    assert {name: (FOLDER / name).read_bytes() for name in tables} == {
        name: text.encode() for name, text in tables.items()
    }
    assert sorted(tables) == sorted(path.name for path in FOLDER.glob("*.csv"))


@pytest.mark.parametrize(("name", "count"), [("digits_train.csv", 2048), ("digits_eval.csv", 256)])
def test_digits_are_sorted_and_balanced_over_lengths(name: str, count: int) -> None:
    pairs = rows(name)
    given = {prompt: re.fullmatch(r"sort (\d{3,6}):", prompt) for prompt in pairs}
    assert all(match and "".join(sorted(match[1])) == pairs[prompt] for prompt, match in given.items())
    assert Counter(len(answer) for answer in pairs.values()) == dict.fromkeys((3, 4, 5, 6), count // 4)


@pytest.mark.parametrize(("name", "count"), [("sums_train.csv", 512), ("sums_eval.csv", 64)])
def test_sums_are_right(name: str, count: int) -> None:
    pairs = rows(name)
    assert len(pairs) == count
    for prompt, answer in pairs.items():
        match = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with the number only\.", prompt)
        assert match
        a, b = int(match[1]), int(match[2])
        assert 1 <= min(a, b) <= max(a, b) <= 50
        assert a + b == int(answer)


@pytest.mark.parametrize("task", ["digits", "sums"])
def test_no_evaluation_task_is_trained_on(task: str) -> None:
    def key(prompt: str) -> str:
        """A sum in the other order is the same sum; digits in another order are another prompt."""
        return str(sorted(re.findall(r"\d+", prompt)))

    train, held_out = ({key(prompt) for prompt in rows(f"{task}_{split}.csv")} for split in ("train", "eval"))
    assert not train & held_out


@pytest.mark.parametrize(("name", "reward"), [("digits_eval.csv", "digits"), ("sums_eval.csv", "number")])
def test_the_right_answers_score_one_under_the_reward_of_the_recipe(name: str, reward: str) -> None:
    table = read_prompts(FOLDER / name)
    columns = [row.reward_columns for row in table.rows]
    load_reward(reward).check(table.columns)
    uids = [f"{table.source}:{row.row}" for row in table.rows]
    scores = load_reward(reward)(uids, [row.answer for row in table.rows], columns, uids)
    assert set(scores.values) == {1.0}
