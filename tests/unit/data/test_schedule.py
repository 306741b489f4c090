"""Which prompts a step has: decided by seed and step alone."""

import itertools

import pytest
import torch

from hocket.data.prompts import read_prompts
from hocket.data.schedule import Prompt, PromptSchedule, tokenize
from hocket.errors import DataError


def prompts(count):
    return [Prompt(f"f.csv:{i}", tuple(range(5, 6 + i % 3)), {"prompt": str(i), "answer": ""}) for i in range(count)]


def schedule(count=10, *, seed=0, per_step=4, per_unit=4, shuffle=True):
    return PromptSchedule(
        prompts(count), seed=seed, prompts_per_step=per_step, prompts_per_unit=per_unit, shuffle=shuffle
    )


def uids(plan, steps):
    return [uid for step in steps for unit in plan.units(step) for uid in unit.non_tensor_batch["uid"]]


def test_the_same_whoever_asks_and_in_whatever_order():
    plan = schedule()
    later_first = {step: uids(plan, [step]) for step in (7, 0, 3)}
    assert all(uids(schedule(), [step]) == found for step, found in later_first.items())


@pytest.mark.parametrize("per_unit", [1, 2, 3, 4, 9])
def test_units_only_cut_the_same_sequence(per_unit):
    plan = schedule(per_unit=per_unit)
    assert uids(plan, range(6)) == uids(schedule(), range(6))
    units = plan.units(2)
    assert len(units) == -(-4 // per_unit)
    assert [unit.meta_info for unit in units] == [{"step": 2, "unit": i} for i in range(len(units))]


def test_an_epoch_visits_every_prompt_once_and_may_end_inside_a_step():
    visits = uids(schedule(10, per_step=4), range(5))  # 20 visits: two epochs, the first ends in step 2
    assert sorted(visits[:10]) == sorted(f"f.csv:{i}:0" for i in range(10))
    assert sorted(visits[10:]) == sorted(f"f.csv:{i}:1" for i in range(10))


def test_a_step_may_hold_several_epochs():
    visits = uids(schedule(3, per_step=8), range(3))
    assert len(set(visits)) == 24  # no two visits share an identity
    for epoch in range(8):
        assert sorted(visits[3 * epoch : 3 * epoch + 3]) == [f"f.csv:{i}:{epoch}" for i in range(3)]


def test_the_order_differs_by_epoch_and_seed():
    def order(seed, epoch):
        return tuple(uid.split(":")[1] for uid in uids(schedule(16, seed=seed, per_step=16), [epoch]))

    orders = {order(seed, epoch) for seed, epoch in itertools.product(range(3), range(3))}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_the_files():
    assert uids(schedule(3, per_step=2, shuffle=False), range(3)) == [
        *("f.csv:0:0", "f.csv:1:0", "f.csv:2:0"),
        *("f.csv:0:1", "f.csv:1:1", "f.csv:2:1"),
    ]


def test_a_unit_holds_padded_prompts_and_rows_of_its_own():
    (unit,) = schedule(3, per_step=3, shuffle=False).units(0)
    assert unit.tensor("prompt_length").tolist() == [1, 2, 3]
    assert unit.tensor("input_ids").tolist() == [[5, 0, 0], [5, 6, 0], [5, 6, 7]]
    assert unit.tensor("input_ids").dtype == torch.int64
    plan = schedule(3, per_step=3, shuffle=False)
    plan.units(0)[0].non_tensor_batch["row"][0]["answer"] = "changed"
    assert plan.units(0)[0].non_tensor_batch["row"][0]["answer"] == ""


def test_a_step_of_a_large_file_is_quick():
    plan = PromptSchedule(prompts(1) * 200_000, seed=0, prompts_per_step=512, prompts_per_unit=512, shuffle=True)
    assert len(uids(plan, [1000])) == 512  # drawing the order anew for each visit would take seconds


def test_tokenize_counts_what_is_too_long(tmp_path, tokenizer):
    path = tmp_path / "p.csv"
    path.write_text("prompt,answer\nab,1\nabcdef,2\nabc,3\n")
    table = read_prompts(path)
    kept, dropped = tokenize(table, tokenizer, template="auto", system=None, max_tokens=3)
    assert [(p.key, len(p.ids)) for p in kept] == [("p.csv:0", 2), ("p.csv:2", 3)]
    assert dropped == 1
    assert kept[0].row == {"prompt": "ab", "answer": "1"}
    with pytest.raises(DataError, match=r"all 3 prompts of p.csv are longer .*=1; the shortest has 2 tokens"):
        tokenize(table, tokenizer, template="auto", system=None, max_tokens=1)
