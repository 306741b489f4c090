"""A model's weights arrive bit by bit, whatever their dtype and however they are cut."""

import copy

import pytest
import torch
from torch import nn

from hocket.errors import WeightSyncError
from hocket.models.policy import copy_weights, named_weights, register_weight_loader, wanted_shapes
from hocket.weights.publisher import Publisher
from hocket.weights.receiver import Receiver
from hocket.weights.transport import InProcess


def arrive(source, target, chunk_bytes):
    transport = InProcess()
    manifest, handles = Publisher("trainer_0", chunk_bytes=chunk_bytes).send(named_weights(source), 1, transport)
    receiver = Receiver(wanted_shapes(target), name="maker_0")
    receiver.begin(manifest)
    for i in reversed(range(len(handles))):
        receiver.chunk(manifest.key, i, transport.fetch(handles[i], timeout=1))
    receiver.commit(manifest.key)
    with torch.no_grad():
        receiver.swap(
            lambda weights, version: copy_weights(target, dict(weights), what=f"version {version}"),
            at_least=(0, 1),
            current=(0, 0),
            timeout=1,
        )


def largest(model):
    return max(tensor.nbytes for tensor in named_weights(model).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", ["one tensor", "default", "odd"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_bit_arrives(tiny, kind, dtype, cut):
    """D19, the old trap: everything was cast to fp16, integers included, and large values became infinite."""
    source = tiny(kind, seed=1, tie_word_embeddings=True).to(dtype)
    with torch.no_grad():
        next(source.parameters()).view(-1)[:2] = torch.tensor([1e30, -7e4], dtype=dtype)
    source.register_buffer("counts", torch.tensor([2**60 + 1, -3], dtype=torch.int64))
    source.register_buffer("flags", torch.tensor([True, False]))
    target = copy.deepcopy(source)
    with torch.no_grad():
        for tensor in named_weights(target).values():
            tensor.zero_()
    arrive(source, target, {"one tensor": largest(source), "default": 64 << 20, "odd": 1001}[cut])
    sent, got = source.state_dict(), target.state_dict()
    assert sent.keys() == got.keys()
    for name in sent:
        assert torch.equal(sent[name], got[name]), name
    assert target.get_input_embeddings().weight is target.get_output_embeddings().weight


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: setattr(m.config, "none", 0) or m.register_buffer("more", torch.ones(1)),
            r"unknown, e.g. \['more'\]",
        ),
        (lambda m: m.model.layers[0].mlp.__delattr__("gate_proj"), r"missing, e.g. \['model.layers.0.mlp.gate_proj"),
        (lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(3))), r"shapes than maker_0 .*norm.weight"),
    ],
)
def test_what_does_not_match_is_named(tiny, change, text):
    source, target = tiny(), tiny()
    change(source)
    with pytest.raises(WeightSyncError, match=text):
        arrive(source, target, 1 << 20)


class Quantized(nn.Module):
    """A user's own module, which holds its weights in another form."""

    def __init__(self):
        super().__init__()
        self.register_buffer("packed", torch.zeros(4, dtype=torch.int8))


def test_a_module_with_a_loader_of_its_own_takes_what_comes():
    def load(model, weights):
        model.packed.copy_(torch.round(weights["weight"][0]).to(torch.int8))

    register_weight_loader(Quantized, load)
    source, target = nn.Linear(4, 1, bias=False), Quantized()
    with torch.no_grad():
        source.weight.copy_(torch.tensor([[1.2, -3.7, 100.0, 0.4]]))
    arrive(source, target, 1 << 20)
    assert target.packed.tolist() == [1, -4, 100, 0]
    assert wanted_shapes(target) is None
