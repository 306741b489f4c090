"""The helpers for TensorDicts: what cutting, joining and metadata mean does not depend on the version of tensordict."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hocket.data import tensordict_utils as tu
from hocket.errors import BatchConflict


def ragged(*lengths, dim=1):
    shape = {1: lambda n: torch.arange(float(n)), 2: lambda n: torch.arange(2.0 * n).reshape(2, n)}[dim]
    return tu.nested_tensor_from_tensor_list([shape(n) for n in lengths])


def batch(**facts):
    entries = {"x": torch.arange(6).reshape(3, 2), "ids": ragged(1, 3, 2), "pos": ragged(1, 3, 2, dim=2)}
    return tu.get_tensordict(entries | {"name": ["a", ["b"], {"c": 1}]}, {"temp": 1.0} | facts)


def test_a_tensordict_of_everything():
    data = batch(grid=np.ones(2))
    assert data.batch_size == torch.Size([3])
    assert tu.get(data, "name") == ["a", ["b"], {"c": 1}]
    assert tu.get(data, "temp") == 1.0
    assert isinstance(tu.get(data, "grid"), np.ndarray)
    assert tu.get_tensordict({}, {"temp": 1.0}).batch_size == torch.Size([])
    assert tu.get_tensordict({"a": np.arange(2), "b": (1, 2)}).batch_size == torch.Size([2])


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: tu.get_tensordict({"a": torch.ones(2), "b": [1]}), "rows per entry {'a': 2, 'b': 1}"),
        (lambda: tu.get_tensordict({"a": torch.tensor(1)}), "{'a': None}"),
        (lambda: tu.get_tensordict({"a": [torch.ones(1)]}), "'a' is a list of tensors"),
        (lambda: tu.get_tensordict({"a": torch.nested.as_nested_tensor([torch.ones(1)])}), "not jagged"),
        (lambda: tu.get_tensordict({"a": [1]}, {"a": 2}), "both per row and for all rows"),
        (lambda: tu.chunk_tensordict(batch(), 2), "3 rows into 2"),
        (lambda: tu.concat_tensordict([]), "empty list"),
        (lambda: tu.concat_nested_tensors([ragged(1), ragged(1, dim=2)]), "nested tensors differ"),
        (lambda: tu.nested_tensor_from_tensor_list([]), "at least one row"),
        (lambda: tu.nested_tensor_from_tensor_list([torch.ones(1, 2), torch.ones(2, 1)]), "differ along axis 1 only"),
        (lambda: tu.nested_tensor_from_tensor_list([torch.ones(1, 2), torch.ones(1, 3)], 1), "along axis 1 only"),
        (lambda: tu.union_tensor_dict(batch(), tu.get_tensordict({"z": [1]})), "cannot join batch sizes"),
        (lambda: tu.get_keys(batch(), ["x", "oops"]), "no ['oops']; it has ['ids', 'name', 'pos', 'temp', 'x']"),
    ],
)
def test_refusals(act, text):
    with pytest.raises(AssertionError) as caught:
        act()
    assert text in caught.value.message


def test_joining_keeps_the_first_value_for_all_rows():
    """tensordict 0.15 turns it into one value per row, 0.10 keeps the first part's."""
    parts = [batch(), batch(temp=2.0)]
    joined = tu.concat_tensordict(parts)
    assert (tu.get(joined, "temp"), tu.get(parts[1], "temp"), len(joined)) == (1.0, 2.0, 6)
    assert tu.get(joined, "name") == ["a", ["b"], {"c": 1}] * 2
    assert joined["pos"]._ragged_idx == 2
    assert [row.shape[-1] for row in joined["pos"].unbind(0)] == [1, 3, 2] * 2


def test_cutting_and_joining_gives_the_whole_and_changes_nothing():
    data, parts = batch(), tu.chunk_tensordict(batch(), 3)
    assert [len(part) for part in parts] == [1, 1, 1]
    tu.assert_tensordict_eq(tu.concat_tensordict(parts), data)
    for index in ([2, 0], torch.tensor([2, 0]), np.array([2, 0]), [True, False, True], slice(0, 3, 2)):
        chosen = tu.index_select_tensor_dict(data, index)
        assert (len(chosen), tu.get(chosen, "temp"), chosen["pos"]._ragged_idx) == (2, 1.0, 2)
    tu.assert_tensordict_eq(data, batch())


def test_padding_and_its_removal():
    data = batch()
    padded, pad = tu.pad_to_divisor(data, 5)
    assert (pad, padded["x"][:, 0].tolist(), tu.get(padded, "name")[3]) == (2, [0, 2, 4, 0, 2], "a")
    tu.assert_tensordict_eq(tu.unpad(padded, pad), data)
    assert tu.pad_to_divisor(data, 3) == (data, 0)
    assert tu.unpad(data, 0) is data


def test_values_are_unwrapped_and_taken_out():
    data = batch()
    assert tu.get(data, "oops", 3) == tu.get_non_tensor_data(data, "oops", 3) == tu.pop(data, "oops", 3) == 3
    assert tu.pop(data, "name") == ["a", ["b"], {"c": 1}]
    out = tu.pop_keys(data, ["x", "temp"])
    assert (sorted(out.keys()), sorted(data.keys())) == (["temp", "x"], ["ids", "pos"])
    with pytest.raises(KeyError):
        tu.pop_keys(data, ["ids", "x"])
    assert sorted(data.keys()) == ["ids", "pos"]
    assert tu.unwrap_non_tensor_data(NonTensorData([1])) == [1]
    assert tu.unwrap_non_tensor_data(torch.ones(1)).item() == 1


def test_assigning_values():
    data = tu.assign_non_tensor(batch(), per_row=[1, [2], None], all_rows={"k": [1]}, wrapped=NonTensorData("v"))
    assert tu.get(data, "per_row") == [1, [2], None]
    assert tu.get(data, "all_rows") == {"k": [1]}
    assert data["wrapped"] == "v"
    with pytest.raises(RuntimeError):
        tu.assign_non_tensor_stack(data, "short", [1])


def test_union_is_all_or_nothing_and_takes_nan_for_nan():
    nan = {"x": torch.tensor([float("nan")])}
    first = tu.get_tensordict(nan, {"temp": 1.0})
    assert tu.union_tensor_dict(first, tu.get_tensordict(nan | {"new": ["a"]})) is first
    assert sorted(first.keys()) == ["new", "temp", "x"]
    for other in ({"x": torch.ones(1)}, {"x": torch.tensor([0])}, {"new": ["b"]}, {"temp": torch.ones(1)}):
        with pytest.raises(AssertionError, match="are not the same object"):
            tu.union_tensor_dict(first, tu.get_tensordict({"more": [1]} | other))
    with pytest.raises(AssertionError, match="`temp` in tensor_dict1"):
        tu.union_tensor_dict(first, tu.get_tensordict({"more": [1]}, {"temp": 2.0}))
    assert sorted(first.keys()) == ["new", "temp", "x"]


def test_equality_names_what_differs():
    tu.assert_tensordict_eq(batch(grid=np.ones(2)), batch(grid=np.ones(2)))
    other = batch()
    other["pos"] = ragged(1, 2, 3, dim=2)
    for wrong in (other, batch(temp=2.0), batch(more=1), tu.get_tensordict({"x": torch.ones(1)})):
        with pytest.raises(BatchConflict, match="the batches"):
            tu.assert_tensordict_eq(batch(), wrong)


def test_contiguous_is_a_new_tensordict():
    wide = torch.arange(6).reshape(2, 3)[:, ::2]
    data = TensorDict({"x": wide, "deep": TensorDict({"y": wide}, [2])}, [2])
    data["o"] = NonTensorStack.from_list([NonTensorData({"p": wide}), NonTensorData(None)])
    out = tu.contiguous(data)
    assert out is not data
    assert not data["x"].is_contiguous()
    assert all(t.is_contiguous() for t in (out["x"], out["deep", "y"], tu.get(out, "o")[0]["p"]))
    tu.assert_tensordict_eq(out, data)


def test_rows_of_dicts():
    rows = [{"x": torch.ones(2), "ids": torch.ones(n), "name": str(n)} for n in (1, 2)]
    data = tu.list_of_dict_to_tensordict(rows)
    assert data["x"].shape == (2, 2)
    assert [row.tolist() for row in data["ids"].unbind(0)] == [[1.0], [1.0, 1.0]]
    assert tu.get(data, "name") == ["1", "2"]
    assert len(tu.list_of_dict_to_tensordict([])) == 0


def test_position_ids_that_forgot_their_ragged_axis():
    data, rows = batch(), batch()["pos"].unbind(0)
    data["position_ids"] = ragged(1, 3, 2, dim=2)
    for _ in range(2):  # forgotten, then as it should be
        tu.maybe_fix_3d_position_ids(data)
        assert data["position_ids"]._ragged_idx == 2
        assert all(map(torch.equal, data["position_ids"].unbind(0), rows))
        data["position_ids"]._ragged_idx = 1
    data["position_ids"] = first = tu.nested_tensor_from_tensor_list([torch.ones(n, 2) for n in (1, 3, 2)])
    tu.maybe_fix_3d_position_ids(data)
    assert data["position_ids"] is first
    tu.maybe_fix_3d_position_ids(batch())


def test_pieces_of_the_wire():
    tensor = torch.randn(2, 3).bfloat16()
    assert torch.equal(tu.deserialize_single_tensor(tu.serialize_single_tensor(tensor)), tensor)
    data = TensorDict({"x": torch.ones(2, 3, 4), "o": torch.zeros(2, 3, 0)}, [2, 3], device="cpu")
    again = tu.deserialize_tensordict(tu.serialize_tensordict(data))
    assert (again.batch_size, again.device) == (data.batch_size, data.device)
    again["x"].zero_()
    assert data["x"].sum() == 24
