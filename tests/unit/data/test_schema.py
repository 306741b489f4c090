"""Stages are checked at the borders; rows of different width meet through one padding."""

import pytest
import torch

from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, PROMPTS, ROLLOUTS, TRAIN_BATCH, check, collate, positions
from hocket.errors import BatchError


def prompts(**changes):
    tensors = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "prompt_length": torch.tensor([2, 3])} | changes
    return DataProto.from_dict(
        {k: t for k, t in tensors.items() if t is not None}, {"uid": ["a", "b"], "row": [{}, {}]}
    )


def rollouts(lengths, width):
    length = torch.tensor(lengths)
    mask = positions(length, width)
    return DataProto.from_dict(
        {
            "input_ids": torch.where(mask, 5, 0),
            "prompt_length": torch.zeros_like(length),
            "length": length,
            "sample": torch.arange(len(lengths)),
            "response_mask": mask,
            "rollout_logprobs": torch.where(mask, -1.0, 0.0),
            "version": torch.where(mask, 3, -1).int(),
            "truncated": torch.zeros(len(lengths), dtype=torch.bool),
        },
        {"uid": [f"{width}:{n}" for n in lengths], "row": [{} for _ in lengths]},
        {"step": 2},
    )


def test_a_whole_stage_passes_and_more_is_allowed():
    assert check(prompts(), PROMPTS, "here") is not None
    check(rollouts([2, 4], 4).union(DataProto.from_dict({"extra": torch.zeros(2)})), ROLLOUTS, "here")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (lambda: prompts(prompt_length=None), "the batch lacks ['prompt_length']; it has ['input_ids', 'row', 'uid']"),
        (lambda: prompts(prompt_length=torch.ones(2)), "prompt_length is torch.float32 with shape (2,); wanted"),
        (lambda: prompts(input_ids=torch.ones(2, dtype=torch.int64)), "wanted torch.int64 with axes (B, T): prompt"),
        (lambda: prompts(prompt_length=torch.ones(2, 1, dtype=torch.int64)), "wanted torch.int64 with axes (B)"),
        (lambda: prompts(input_ids=torch.ones(2, 3, 1, dtype=torch.int64)), "shape (2, 3, 1)"),
    ],
)
def test_what_is_wrong_is_named(data, text):
    with pytest.raises(BatchError) as caught:
        check(data(), PROMPTS, "unit 3")
    assert caught.value.message.startswith("unit 3: ")
    assert text in caught.value.message


def test_token_tensors_have_one_width():
    data = rollouts([2], 4)
    wide = DataProto.from_dict(data.tensors() | {"version": torch.full((1, 5), -1).int()}, data.non_tensor_batch)
    with pytest.raises(BatchError, match=r"different widths .*'version': 5"):
        check(wide, ROLLOUTS, "x")


def test_each_stage_holds_the_one_before():
    assert set(PROMPTS) < set(ROLLOUTS) < set(EXPERIENCE)
    assert set(EXPERIENCE) - {"row"} < set(TRAIN_BATCH)


def test_positions_come_from_lengths():
    assert positions(torch.tensor([0, 2, 3]), 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_collate_pads_on_the_right():
    joined = collate([rollouts([2], 2), rollouts([1, 4], 4), rollouts([3], 3)])
    assert joined.tensor("length").tolist() == [2, 1, 4, 3]
    assert joined.tensor("version").tolist() == [[3, 3, -1, -1], [3, -1, -1, -1], [3] * 4, [3, 3, 3, -1]]
    assert joined.tensor("input_ids")[0].tolist() == [5, 5, 0, 0]
    assert joined.tensor("response_mask").sum(-1).tolist() == [2, 1, 4, 3]
    assert joined.tensor("rollout_logprobs").sum(-1).tolist() == [-2.0, -1.0, -4.0, -3.0]
    assert joined.non_tensor_batch["uid"].tolist() == ["2:2", "4:1", "4:4", "3:3"]
    check(joined, ROLLOUTS, "joined")


def test_collate_copies_nothing_into_its_parts_and_needs_one():
    part = rollouts([2], 2)
    collate([part, rollouts([4], 4)])
    assert part.tensor("input_ids").shape == (1, 2)
    with pytest.raises(BatchError, match="empty list"):
        collate([])
