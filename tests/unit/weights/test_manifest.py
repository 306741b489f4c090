"""Weights cut into chunks and put together again, bit for bit; what the digest sees."""

import itertools
import tracemalloc
from dataclasses import replace

import pytest
import torch

from hocket.models.pieces import Pieces, copy_into, whole
from hocket.models.policy import named_weights
from hocket.weights.manifest import cut, digest, layout, unpack, weights_sha256
from hocket.weights.publisher import Publisher
from hocket.weights.transport import InProcess


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(3, 3, generator=generator).bfloat16(),
        "nothing": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(2**40 + 1),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "empty_end": torch.zeros(2, 0, dtype=torch.int64),
    }


def publish(tensors, size, version=1):
    transport = InProcess()
    manifest, handles = Publisher("trainer-0", chunk_bytes=size).send(tensors, version, transport)
    return manifest, [transport.fetch(handle, timeout=1.0).copy() for handle in handles]


def arrived(manifest, chunks):
    return {name: whole(weight) for name, weight in unpack(manifest, chunks)}


@pytest.mark.parametrize("size", [1, 3, 64, 100, 128, 1 << 20])
def test_round_trip_at_any_chunk_size(size):
    manifest, chunks = publish(weights(), size)
    assert tuple(map(len, chunks)) == manifest.chunks
    assert all(0 < len(chunk) <= size for chunk in chunks)
    found = arrived(manifest, chunks)
    assert list(found) == list(weights())
    for name, tensor in weights().items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(0)}, {"a": torch.zeros(0), "b": torch.ones(2)}])
def test_little_or_nothing(tensors):
    manifest, chunks = publish(tensors, 64)
    assert {k: t.tolist() for k, t in arrived(manifest, chunks).items()} == {k: t.tolist() for k, t in tensors.items()}


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_models_weights_reach_another_model(tiny, kind, tied):
    source, target = (tiny(kind, seed=seed, tie_word_embeddings=tied) for seed in (1, 2))
    manifest, chunks = publish(named_weights(source), 1000)
    own = named_weights(target)
    for name, weight in unpack(manifest, chunks):
        copy_into(own.pop(name), weight)
    assert not own
    assert weights_sha256(named_weights(source)) == weights_sha256(named_weights(target))


def test_tensors_are_laid_end_to_end():
    specs = layout(weights())
    assert all(a.offset + a.nbytes == b.offset for a, b in itertools.pairwise(specs))
    assert {spec.name: spec.nbytes for spec in specs}["half"] == 18


def test_the_digest_depends_on_everything():
    manifest, chunks = publish(weights(), 64)
    assert manifest.digest == publish(weights(), 64)[0].digest == digest(manifest.tensors, chunks)
    assert len(manifest.digest) == 32
    changed = weights()
    changed["matrix"][4, 6] = changed["matrix"][4, 6].nextafter(torch.tensor(9.0))
    renamed = {("other" if name == "matrix" else name): tensor for name, tensor in weights().items()}
    reshaped = weights() | {"matrix": weights()["matrix"].reshape(7, 5)}
    others = {publish(tensors, 64)[0].digest for tensors in (changed, renamed, reshaped)}
    others.add(digest(manifest.tensors, [chunks[1], chunks[0], *chunks[2:]]))
    assert len(others | {manifest.digest}) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("own", [torch.zeros(5, 7), torch.zeros(7, 5).t(), torch.zeros(10, 7)[::2]])
def test_a_tensor_in_pieces_is_copied_into_memory_of_any_form(dtype, own):
    sent = torch.randn(5, 7).to(dtype)
    ((_, weight),) = unpack(*publish({"a": sent}, 33))  # cuts in the middle of a number
    assert isinstance(weight, Pieces)
    for other in (weight, sent, sent.t().contiguous().t()):
        copy_into(own.zero_(), other)
        assert torch.equal(own, sent.float())
    assert own.shape == (5, 7)


def test_a_tensor_in_pieces_is_not_put_together_to_copy_it():
    size = 32 << 20
    ((_, weight),) = unpack(*publish({"a": torch.ones(size // 4)}, size // 4))
    own = torch.zeros(size // 4)
    tracemalloc.start()  # numpy tells it what it allocates
    copy_into(own, weight)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < size // 100
    assert own.min() == 1


def test_chunks_are_views_until_they_are_sent():
    tensors = {"a": torch.ones(4), "b": torch.arange(3)}
    (chunk,) = cut(tensors, 64)
    assert [part.ctypes.data for part in chunk.parts] == [tensor.data_ptr() for tensor in tensors.values()]
    manifest, chunks = publish(tensors, 64)
    tensors["a"].zero_()
    assert arrived(manifest, chunks)["a"].tolist() == [1.0] * 4


def test_in_process_memory_is_used_again():
    transport, tensors = InProcess(), weights()
    transport.send(cut(tensors, 64))
    address = transport.fetch(0, 1.0).parts[0].ctypes.data
    transport.clear()
    transport.send(
        cut({name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, 64)
    )
    assert transport.fetch(0, 1.0).parts[0].ctypes.data == address
    assert len(transport.send(cut({"a": torch.ones(2)}, 64))) == 1
    assert len(transport.fetch(0, 1.0)) == 8


def test_sha256_is_of_names_dtypes_shapes_and_bytes_in_order_of_name():
    base = weights()
    assert weights_sha256(base) == weights_sha256(dict(reversed(base.items())))
    others = [
        base | {"matrix": base["matrix"].reshape(7, 5)},
        base | {"scalar": base["scalar"].double()},
        base | {"flags": ~base["flags"]},
        {**base, "more": torch.zeros(1)},
    ]
    assert len({weights_sha256(w) for w in [base, *others]}) == 5
    assert len(weights_sha256(base)) == 64


def test_in_process_chunks_are_found_by_another_transport():
    manifest, handles = Publisher("trainer-0", chunk_bytes=64).send(weights(), 1, InProcess())
    fetched = [InProcess().fetch(handle, timeout=1.0) for handle in handles]
    assert digest(manifest.tensors, fetched) == manifest.digest
    assert replace(manifest, version=2).digest == manifest.digest
