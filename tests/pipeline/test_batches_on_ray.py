"""The wire through a real Ray actor: what a worker changes, nobody else sees; TensorDicts take the wire as well.

It runs before the tests that start private clusters: after one, actors of another cluster die in the same process.
"""

import gc

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from hocket.data import batches
from hocket.data.merge import same
from hocket.data.proto import DataProto
from hocket.data.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list
from hocket.data.wire import register_serializers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def changer_class():
    """Made here, so that it travels by value: workers cannot import this file."""

    class Changer:
        """Changes its input in place, as the workers of the article's example do."""

        def change(self, data):
            data.batch["x"].add_(1)
            data.non_tensor_batch["n"] += 1
            return data

        def change_tensordict(self, data):
            register_serializers(ray.util.register_serializer)
            data["x"].add_(1)
            data["inner", "y"].add_(1)
            return {"kind": data["pos"]._ragged_idx, "back": [data]}

        def form(self, data):
            return type(data.leaves()["x"]).__name__

    return Changer


@pytest.fixture(scope="module")
def changer(ray_address):
    gc.collect()  # handles of groups of an earlier session: to Ray, dropping them later may look like dropping ours
    ray.init(address=ray_address, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(changer_class()).remote()
    ray.get(actor.__ray_ready__.remote(), timeout=60)
    yield actor
    ray.shutdown()


def batch():
    tensors = {
        "x": torch.zeros(4, 50_000),
        "empty": torch.zeros(4, 0),
        "mask": torch.tensor([True, False, True, True]),
        "half": torch.ones(4, 2).bfloat16(),
        "pos": nested_tensor_from_tensor_list([torch.arange(3 * n).reshape(3, n) for n in (2, 1, 4, 2)]),
    }
    return DataProto.from_dict(tensors, {"n": np.zeros(4), "text": list("abcd")}, {"step": 1})


def test_workers_change_their_own_copy(changer):
    sent = batch()
    ref = ray.put(sent)
    first, second = ray.get([changer.change.remote(ref), changer.change.remote(ref)])
    for got in (first, second):
        assert got.tensor("x").unique().tolist() == [1]
        assert got.non_tensor_batch["n"].tolist() == [1] * 4
        assert got.non_tensor_batch["text"].tolist() == list("abcd")
        rest = ["empty", "mask", "half", "pos"]
        assert all(same(got.tensor(key), sent.tensor(key)) for key in rest)
    assert ray.get(ref).tensor("x").any().item() is sent.tensor("x").any().item() is False


def test_a_batch_arrives_unopened_and_outlives_its_reference(changer):
    assert ray.get(changer.form.remote(batch())) == "FrozenTensor"
    ref = ray.put(batch())
    part = ray.get(ref)[1:3]
    del ref
    gc.collect()
    ray.put(np.ones(1_000_000))
    assert not part.tensor("x").any()


def test_a_tensordict_on_its_own_takes_the_wire(changer):
    register_serializers(ray.util.register_serializer)
    register_serializers(ray.util.register_serializer)
    data = get_tensordict({"x": torch.zeros(4, 50_000), "s": ["a", {"b": 1}, None, [2]]}, {"temp": 1.0})
    data["pos"] = batch().tensor("pos")
    data["inner"] = TensorDict({"y": torch.ones(4)}, [4])
    before = data.clone()
    ref = ray.put(data)
    answers = ray.get([changer.change_tensordict.remote(value) for value in (ref, ref, data)])
    for answer in answers:
        back = answer["back"][0]
        assert (answer["kind"], back["pos"]._ragged_idx) == (2, 2)
        assert back["x"].unique().tolist() == [1]
        assert back["inner", "y"].tolist() == [2] * 4
        back["x"].zero_()
        back["inner", "y"].sub_(1)
        assert same(back, before)
    assert same(data, before)
    assert same(ray.get(ref), before)
    chunks = ray.get([ray.put(chunk) for chunk in batches.chunk(data, 2)])
    assert same(batches.concat(chunks), before)
