"""A batch on disk comes back as it was, and a file that somebody made runs nothing."""

import os
import pickle

import numpy as np
import pytest
import torch

from hocket.data.merge import same
from hocket.data.proto import DataProto
from hocket.errors import BatchError

TENSORS = {
    "x": torch.arange(6.0).reshape(3, 2).bfloat16(),
    "bool": torch.tensor([True, False, True]),
    "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 2, 5])),
    "strided": torch.nested.as_nested_tensor([torch.ones(2, 3), torch.zeros(3, 4), torch.ones(1, 5)]),
}
COLUMNS = {
    "uid": ["a", "ä\ud800", None],
    "turns": [[{"role": "user", "n": np.int64(3)}], (), {"k": (1, {2})}],
    "score": np.array([0.5, float("nan"), -1e300]),
    "text": np.array(["one", "", "three"]),
    "grid": np.arange(6, dtype=np.uint16).reshape(3, 2),
    "ragged": [np.zeros(2), np.ones((1, 0)), np.arange(3)],
}
FACTS = {"step": 7, "inner": {"t": torch.ones(2), (1, "k"): b"bytes"}, "dtype": "float32", "empty": np.zeros((0, 2))}


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def test_everything_comes_back_with_its_type(tmp_path):
    data = DataProto.from_dict(TENSORS, COLUMNS, FACTS)
    data.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch")
    for name, tensor in again.tensors().items():
        assert tensor.dtype == TENSORS[name].dtype
        rows = zip(tensor.unbind(0), TENSORS[name].unbind(0), strict=True)
        assert all(torch.equal(one, other) for one, other in rows)
    for name, column in data.non_tensor_batch.items():
        found = again.non_tensor_batch[name]
        assert (found.dtype, found.shape) == (column.dtype, column.shape)
        assert same(found, column)
    assert type(again.non_tensor_batch["turns"][0][0]["n"]) is np.int64
    assert again.non_tensor_batch["turns"][2] == {"k": (1, {2})}
    assert same(again.meta_info, FACTS)


def test_a_slice_does_not_take_its_whole_batch_along(tmp_path):
    data = DataProto.from_dict({"x": torch.zeros(100_000, 4)})
    data[:10].save_to_disk(tmp_path / "few")
    assert (tmp_path / "few").stat().st_size < 5000


def test_what_is_no_plain_value_is_refused_by_its_place(tmp_path):
    data = DataProto.from_dict({"x": torch.zeros(1)}, {"made": [{"by": Bomb("never")}]})
    with pytest.raises(BatchError, match=r"columns.*Bomb.*cannot be stored"):
        data.save_to_disk(tmp_path / "batch")
    assert not (tmp_path / "batch").exists()


@pytest.mark.parametrize("write", ["pickle", "torch", "inside", "text", "nothing", "cut"])
def test_a_file_of_somebody_else_runs_nothing(tmp_path, write):
    path, mark = tmp_path / "batch", str(tmp_path / "mark")
    if write == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    elif write == "torch":
        torch.save(Bomb(mark), path)
    elif write == "inside":
        torch.save(("hocket batch on disk", 1, {"batch": ("array", "O", [1], Bomb(mark))}), path)
    elif write == "cut":
        DataProto.from_dict({"x": torch.zeros(500)}).save_to_disk(path)
        path.write_bytes(path.read_bytes()[:900])
    else:
        path.write_bytes({"text": b"prompt,answer\n", "nothing": b""}[write])
    with pytest.raises(BatchError, match=r"batch.*save_to_disk"):
        DataProto.load_from_disk(path)
    assert not os.path.exists(mark)


def test_a_newer_format_is_named(tmp_path):
    torch.save(("hocket batch on disk", 2, {}), tmp_path / "batch")
    with pytest.raises(BatchError, match=r"format \('hocket batch on disk', 2\)"):
        DataProto.load_from_disk(tmp_path / "batch")
