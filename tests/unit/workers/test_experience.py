"""Experience: the old names as views, and rows that come apart and together again."""

import pickle

import pytest
import torch

from hocket.data.batches import chunk, concat
from hocket.data.experience import Experience, make_experience_batch, split_experience_batch
from hocket.data.proto import DataProto
from hocket.data.schema import EXPERIENCE, check
from hocket.errors import BatchConflict


def data(*, pad=0) -> DataProto:
    """Two rows: 2 prompt and 3 answer tokens, 3 and 1; one column of padding, and `pad` more."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 0, 0]]).bool()
    place = torch.arange(6.0).expand(2, 6)
    tensors = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 1, 0], [5, 6, 9, 1, 0, 0]]),
        "prompt_length": torch.tensor([2, 3]),
        "length": torch.tensor([5, 4]),
        "sample": torch.tensor([0, 1]),
        "response_mask": mask,
        "rollout_logprobs": torch.where(mask, -place, 0.0),
        "reference_logprobs": -1.5 * place,
        "version": torch.where(mask, 4, -1).int(),
        "truncated": torch.tensor([False, True]),
        "score": torch.tensor([1.0, -1.0]),
    }
    wide = {
        key: torch.nn.functional.pad(t, (0, pad), value=-1 if key == "version" else 0) if t.dim() == 2 else t
        for key, t in tensors.items()
    }
    rows = [{"prompt": "p", "answer": "a"}, {"prompt": "q", "answer": "b"}]
    return DataProto.from_dict(wide, {"uid": ["u:0", "u:1"], "row": rows}, {"step": 3})


def test_the_old_names_by_hand():
    experience = Experience.of(data())
    check(experience, EXPERIENCE, "experience")
    assert experience.sequences.tolist() == [[5, 6, 7, 8, 1, 0], [5, 6, 9, 1, 0, 0]]
    assert experience.attention_mask.int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert experience.action_mask.int().tolist() == [[1, 1, 1, 0], [0, 1, 0, 0]]  # from the shortest prompt's end on
    assert experience.action_log_probs.tolist() == [[-2, -3, -4, 0], [0, -3, 0, 0]]
    assert experience.kl.tolist() == [[1, 1.5, 2, 0], [0, 1.5, 0, 0]]
    assert experience.reward.tolist() == [1, -1]
    assert experience.values is None
    assert experience.advantages is None


def test_the_columns_depend_on_the_rows_that_are_there():
    assert Experience.of(data())[1:].action_mask.int().tolist() == [[1, 0, 0]]
    assert Experience.of(data())[:0].action_mask.shape == (0, 6)


def test_what_later_stages_add_is_seen_too():
    experience = Experience.of(data())
    experience.union(DataProto.from_dict({key: torch.arange(12.0).view(2, 6) for key in ("values", "advantages")}))
    for view in (experience.values, experience.advantages):
        assert view.tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    bare = experience.select(["input_ids", "prompt_length", "rollout_logprobs"])
    assert (bare.kl, bare.reward) == (None, None)


def test_views_are_read_only_and_share_the_tensors():
    source = data()
    experience = Experience.of(source)
    for name in ("sequences", "action_mask", "values", "reward", "kl", "advantages"):
        with pytest.raises(AttributeError):
            setattr(experience, name, None)
    assert experience.sequences.data_ptr() == source.tensor("input_ids").data_ptr()
    assert experience.action_log_probs.untyped_storage().data_ptr() == source.batch["rollout_logprobs"].data_ptr()
    experience.meta_info["step"] = 9
    experience.pop(["score"])
    assert source.meta_info == {"step": 3}  # the dicts are its own
    assert "score" in source.keys()  # noqa: SIM118


def test_it_stays_an_experience():
    experience = Experience.of(data())
    parts = [experience[:1], experience[1:], experience.select(["input_ids"]), experience.repeat(2)]
    parts += [*chunk(experience, 2), concat(chunk(experience, 2)), pickle.loads(pickle.dumps(experience, protocol=5))]
    assert all(type(part) is Experience for part in parts)
    assert parts[-1].action_mask.tolist() == experience.action_mask.tolist()


def equal(a, b):
    same = a.tensors().keys() == b.tensors().keys() and all(torch.equal(a.tensor(k), b.tensor(k)) for k in a.tensors())
    columns = [{k: v.tolist() for k, v in side.non_tensor_batch.items()} for side in (a, b)]
    return same and columns[0] == columns[1] and a.meta_info == b.meta_info


def test_rows_come_apart_and_together_again():
    experience = Experience.of(data())
    items = split_experience_batch(experience)
    assert [type(item) for item in items] == [Experience, Experience]
    assert [item.non_tensor_batch["uid"].tolist() for item in items] == [["u:0"], ["u:1"]]
    assert all(item.meta_info == {"step": 3} for item in items)
    back = make_experience_batch(items)
    assert type(back) is Experience
    assert equal(back, experience)


def test_rows_of_different_width_are_padded():
    narrow, wide = split_experience_batch(data())[0], split_experience_batch(data(pad=2))[1]
    wide.meta_info["unit"] = 1
    for items in ([narrow, wide], [wide, narrow]):
        made = make_experience_batch(items)
        assert type(made) is Experience
        assert made.sequences.shape == (2, 8)
        assert made.tensor("version")[:, -2:].tolist() == [[-1, -1], [-1, -1]]
        assert made.non_tensor_batch["uid"].tolist() == [item.non_tensor_batch["uid"][0] for item in items]
        assert made.meta_info == {"step": 3}  # `unit` is a fact of one of them
    assert equal(make_experience_batch([narrow, wide]), Experience.of(data(pad=2)))


def test_items_that_do_not_fit_together():
    with pytest.raises(BatchConflict, match="found no items to make a batch of"):
        make_experience_batch([])
    one, other = split_experience_batch(data())
    other.pop(["score"])
    with pytest.raises(BatchConflict, match="score"):
        make_experience_batch([one, other])
