"""The wire: every dtype and layout bit for bit, nothing copied before it is looked at, nobody's memory written to."""

import copy
import pickle
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hocket.data.merge import same
from hocket.data.proto import DataProto
from hocket.data.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list
from hocket.data.wire import WIRE, FrozenTensor, private
from hocket.errors import BatchError

MIB = 1 << 20


def is_open(data, key):
    return not isinstance(data.leaves()[key], FrozenTensor)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool]
DTYPES = [*FLOATS, *INTS, torch.complex64]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_every_dtype_shape_and_layout_travels_bit_for_bit(store, data, dtype, shape):
    values = 2 if dtype == torch.bool else 256
    tensor = torch.randint(0, values, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
    tensor = tensor[:: data.draw(st.integers(1, 2))]
    tensor = tensor.transpose(1, -1) if data.draw(st.booleans()) and tensor.dim() > 2 else tensor
    got = store.put(DataProto.from_dict({"x": tensor}))().tensor("x")
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    sent = tensor.clone(memory_format=torch.contiguous_format)
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
    assert got.is_contiguous()
    assert got.data_ptr() % 64 == 0 or not got.numel()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2, requires_grad=True),
        torch.nn.Parameter(torch.randn(3)),
        torch.randn(2, 1).expand(2, 5),
        torch.view_as_complex(torch.randn(3, 2)).conj(),
        torch.randn(3, 2).to_sparse(),
    ],
    ids=["grad", "parameter", "expanded", "conjugate", "sparse"],
)
def test_unusual_tensors_travel_too(store, tensor):
    got = store.put(DataProto.from_dict({"x": tensor}))().tensor("x")
    assert got.layout == tensor.layout
    assert torch.equal(got.to_dense() if got.is_sparse else got, tensor.to_dense() if tensor.is_sparse else tensor)


NESTED = {
    "2-D": nested_tensor_from_tensor_list([torch.arange(3.0), torch.arange(0.0), torch.arange(5.0)]),
    "3-D, ragged last": nested_tensor_from_tensor_list([torch.randn(4, n) for n in (2, 5, 3)]),
    "3-D, equal lengths": nested_tensor_from_tensor_list([torch.randn(4, 2) for _ in range(3)]),
    "3-D, ragged first": nested_tensor_from_tensor_list([torch.randn(n, 4).bfloat16() for n in (2, 5, 3)]),
    "4-D": nested_tensor_from_tensor_list([torch.randn(2, 3, n) for n in (2, 5, 3)]),
    "strided": torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(3, 4), torch.randn(1, 5)]),
    "with holes": torch.nested.nested_tensor_from_jagged(
        torch.arange(12.0), torch.tensor([0, 4, 8, 12]), torch.tensor([2, 4, 1])
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors_travel_whole_and_in_parts(store, kind):
    nested, rows = NESTED[kind], NESTED[kind].unbind(0)
    arrive = store.put(DataProto.from_dict({"x": nested, "i": torch.arange(3)}))
    assert same(arrive().tensor("x"), nested)
    for index, wanted in (
        (slice(1, 3), [1, 2]),
        (slice(0, 3, 2), [0, 2]),
        ([2, 0, 2], [2, 0, 2]),
        (slice(1, 1), []),
    ):
        for part in (arrive()[index], DataProto.from_dict({"x": nested})[index]):  # frozen and live alike
            got = part.tensor("x")
            assert got.size(0) == len(part) == len(wanted)
            assert all(torch.equal(row, rows[i]) for row, i in zip(got.unbind(0), wanted, strict=True))
            if nested.layout == torch.jagged and wanted:
                assert got._ragged_idx == nested._ragged_idx
    parts = arrive().split(2)
    assert same(DataProto.concat(parts).tensor("x"), nested)
    parts[0].tensor("x")  # one open, one not
    assert same(DataProto.concat([*parts, arrive()[:0]]).tensor("x"), nested)
    assert store.untouched()


def test_a_batch_inside_a_batch_and_python_values_travel(store):
    inner = TensorDict({"a": torch.arange(6).reshape(3, 2), "deep": TensorDict({"b": torch.ones(3)}, [3])}, [3])
    batch = get_tensordict({"x": torch.zeros(3), "s": ["q", {"k": [1]}, None]}, {"temp": {"top_p": 1.0}})
    batch["inner"] = inner
    arrive = store.put(DataProto(batch))
    got = arrive().batch
    assert got["inner", "deep", "b"].tolist() == [1, 1, 1]
    assert got["s"] == ["q", {"k": [1]}, None]
    assert got["temp"] == {"top_p": 1.0}
    part = DataProto.concat([arrive()[[2]], arrive()[:1]]).batch
    assert part["inner", "a"].tolist() == [[4, 5], [0, 1]]
    assert part["s"] == [None, "q"]
    assert part["temp"] == {"top_p": 1.0}
    live = DataProto.concat(DataProto(batch).split(2)).batch
    assert live["inner", "a"].tolist() == inner["a"].tolist()
    assert live["s"] == ["q", {"k": [1]}, None]


def big(rows=8, mib=4):
    return DataProto.from_dict(
        {"x": torch.rand(rows, mib * MIB // 4 // rows)}, {"uid": list("abcdefgh"[:rows])}, {"m": 1}
    )


def added(act):
    """(result, peak of memory that Python and numpy took meanwhile, in bytes)."""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_arrived_is_handled_without_being_copied(store):
    data, peak = added(store.put(big()))
    assert peak < MIB / 4

    def handle():
        assert len(data) == 8
        parts = [*data.chunk(2), *data.split(3), data[2:4], data.select(["x"], []), data[:6].pop(["x"])]
        assert data.rename("x", "y").rename("y", "x") is data
        assert data.non_tensor_batch["uid"].tolist() == list("abcdefgh")
        assert data.meta_info == {"m": 1}
        repr(data)
        return parts

    parts, peak = added(handle)
    assert peak < MIB / 4
    assert not any(is_open(part, "x") for part in [data, *parts])
    _, peak = added(lambda: parts[0].batch)  # only its own rows
    assert 2 * MIB <= peak < 2.5 * MIB


def test_an_unopened_slice_sends_only_its_rows_on(store):
    data = store.put(big())()
    again = store.put(data[2:4])()
    assert MIB <= store.sent < 1.1 * MIB
    assert not is_open(data, "x")
    assert torch.equal(again.tensor("x"), data[2:4].tensor("x"))
    store.put(data[::4])
    assert MIB <= store.sent < 1.1 * MIB


def test_parts_are_joined_in_one_copy(store):
    whole = big()
    arrived = [store.put(part)() for part in whole.chunk(4)]
    joined, peak = added(lambda: DataProto.concat(arrived))
    assert torch.equal(joined.tensor("x"), whole.tensor("x"))
    assert peak < 4.3 * MIB
    arrived[0].tensor("x").zero_()  # one part was looked at
    mixed, peak = added(lambda: DataProto.concat(arrived))
    assert mixed.tensor("x")[:2].abs().sum() == 0
    assert torch.equal(mixed.tensor("x")[2:], whole.tensor("x")[2:])
    assert peak < 4.3 * MIB


def test_only_the_tensor_that_is_asked_for_is_copied(store):
    data = store.put(DataProto.from_dict({"x": torch.ones(4, 2), "y": torch.ones(4)}))()
    assert data.tensor("y") is data.tensor("y")
    assert (is_open(data, "x"), is_open(data, "y")) == (False, True)
    assert data.batch["y"] is data.tensor("y")


def test_receivers_write_into_memory_of_their_own(store):
    """The old trap: torch.from_numpy of what a store hands out writes into the store, for all readers."""
    frozen = np.arange(3.0)
    objects = [{"image": np.ones((2, 2))}, [np.ones(2), ("t", np.ones(3))], np.ones(1)]
    sent = DataProto.from_dict({"x": torch.ones(3)}, {"n": frozen, "o": objects}, {"m": {"w": np.ones(2)}})
    arrive = store.put(sent)
    first = arrive()
    first.tensor("x").add_(1)
    for array in (
        first.non_tensor_batch["n"],
        first.non_tensor_batch["o"][0]["image"],
        first.non_tensor_batch["o"][1][0],
        first.non_tensor_batch["o"][1][1][1],
        first.non_tensor_batch["o"][2],
        first.meta_info["m"]["w"],
    ):
        torch.from_numpy(array).add_(41)
    first.non_tensor_batch["o"][1].append("more")
    second = arrive()
    assert store.untouched()
    assert (sent.tensor("x").tolist(), second.tensor("x").tolist()) == ([1, 1, 1], [1, 1, 1])
    assert second.non_tensor_batch["o"][0]["image"].tolist() == [[1, 1], [1, 1]]
    assert len(second.non_tensor_batch["o"][1]) == 2
    assert same(second.non_tensor_batch, sent.non_tensor_batch)


def test_private_ends_at_cycles():
    ring: list = [np.ones(1)]
    ring[0].flags.writeable = False
    ring.append(ring)
    assert private(ring)[1] is ring
    assert ring[0].flags.writeable


def test_two_threads_open_a_batch_once(store):
    data = store.put(big(mib=32))()
    found, barrier = [], threading.Barrier(2)

    def look():
        barrier.wait()
        found.append(data.batch)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]


class Tagged(DataProto):
    """A batch that knows where it came from."""

    source = "nowhere"


def test_a_subclass_and_what_it_adds_survive(store):
    data = Tagged.from_dict({"x": torch.arange(4)}, {"u": list("abcd")}, {"m": 1})
    data.source = "maker"
    made = [data[1:3], data.chunk(2)[0], DataProto.concat(data.chunk(2)), data.select(), data.pop()]
    for got in [store.put(data)(), *made]:
        assert (type(got), got.source) == (Tagged, "maker")


def test_the_state_says_what_it_is_and_another_version_is_refused():
    state = DataProto.from_dict({"x": torch.ones(2)}).__getstate__()
    assert state["wire"] == WIRE
    with pytest.raises(BatchError, match=r"wire tag \('hocket batch', 99\), wanted .* one version on both sides"):
        DataProto().__setstate__(state | {"wire": ("hocket batch", 99)})
    with pytest.raises(BatchError, match="wire tag None"):
        DataProto().__setstate__({})


def test_the_wire_uses_no_torch_serialization():
    nested = nested_tensor_from_tensor_list([torch.ones(2)] * 2)
    state = pickle.dumps(DataProto.from_dict({"x": torch.ones(2), "n": nested}), protocol=5)
    assert b"torch" not in state


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_any_pickle_protocol_will_do(protocol):
    data = DataProto.from_dict({"x": torch.arange(4.0)}, {"u": list("abcd")})
    again = pickle.loads(pickle.dumps(data, protocol=protocol))
    again.tensor("x").zero_()
    assert data.tensor("x").tolist() == [0, 1, 2, 3]


def test_copies_in_one_process(store):
    data = DataProto.from_dict({"x": torch.ones(2)}, {"u": [[1], [2]]}, {"m": [1]})
    deep, flat = copy.deepcopy(data), copy.copy(data)
    deep.tensor("x").zero_()
    deep.non_tensor_batch["u"][0].append(9)
    assert (data.tensor("x").tolist(), data.non_tensor_batch["u"][0]) == ([1, 1], [1])
    assert flat.tensor("x") is data.tensor("x")
    assert copy.deepcopy(store.put(data)()).tensor("x").tolist() == [1, 1]


def test_a_worker_that_only_handles_tensors_never_loads_tensordict():
    code = (
        "import pickle, sys, torch\nfrom hocket.data.proto import DataProto\nfrom hocket.data import batches\n"
        "data = DataProto.from_dict({'x': torch.ones(4, 2)}, {'u': list('abcd')})\n"
        "data = pickle.loads(pickle.dumps(data, protocol=5))\n"
        "data = batches.concat(batches.chunk(data, 2)).to('cpu').union(data.select())\n"
        "data.tensor('x').add_(1); data.repeat(2); batches.nbytes(data)\n"
        "print('tensordict' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.split() == ["False"]


def test_non_tensor_leaves_are_private(store):
    stack = NonTensorStack.from_list([NonTensorData({"pixels": np.ones(2)}) for _ in range(2)])
    arrive = store.put(DataProto(TensorDict({"s": stack}, [2])))
    torch.from_numpy(arrive().batch["s"][0]["pixels"]).add_(1)
    assert store.untouched()
