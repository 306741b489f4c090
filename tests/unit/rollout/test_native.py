"""The decode loop's edges; `tests/contract` holds it against `generate` for four architectures."""

import pytest
import torch

from hocket.data.proto import DataProto
from hocket.data.schema import positions, swap_points
from hocket.errors import BatchError, DataError, HocketError
from hocket.models.policy import named_weights
from hocket.rollout.engine import Refresh, Sampling
from hocket.rollout.native import NativeEngine


def prompts(*rows):
    length = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return DataProto.from_dict(
        {"input_ids": ids, "prompt_length": length},
        {"uid": [f"p:{i}:0" for i in range(len(rows))], "row": [{"n": i} for i in range(len(rows))]},
        {"step": 3},
    )


UNIT = prompts([5, 6, 7], [8], [9, 1, 4, 4])  # one prompt holds the end token: masks come from lengths


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bloom", "llama"])
def test_padding_may_be_the_end_token(tiny, kind):
    """L17: the same answers and the same masks, whether the padding token is a token of its own or EOS."""
    stop = tuple(range(1, 20))
    model = tiny(kind)
    own, shared = (
        NativeEngine(model, stop_ids=stop, pad_id=pad).generate(UNIT, Sampling(8), samples=3, seed=1) for pad in (0, 1)
    )
    for key in ("length", "response_mask", "truncated", "rollout_logprobs", "version"):
        assert torch.equal(own.tensor(key), shared.tensor(key))
    real = positions(own.tensor("length"), own.tensor("input_ids").shape[1])
    assert torch.equal(own.tensor("input_ids")[real], shared.tensor("input_ids")[real])
    ended = ~own.tensor("truncated")
    assert bool(ended.any())
    last = shared.tensor("input_ids").gather(1, shared.tensor("length")[:, None] - 1).squeeze(1)
    assert bool(torch.isin(last[ended], torch.tensor(stop)).all())
    assert bool(shared.tensor("response_mask").gather(1, shared.tensor("length")[:, None] - 1).all())


def test_every_end_token_ends(tiny):
    """L20: a response that stops at a second end token is not truncated, and its mask ends there."""
    model = tiny(sharp=1.0)
    both = NativeEngine(model, stop_ids=(5, 7), pad_id=0).generate(UNIT, Sampling(40), samples=16, seed=0)
    ids, length = both.tensor("input_ids"), both.tensor("length")
    last = ids.gather(1, length[:, None] - 1).squeeze(1)
    assert {5, 7} <= set(last.tolist())
    assert torch.equal(both.tensor("truncated"), (last != 5) & (last != 7))
    assert torch.equal(both.tensor("response_mask").sum(-1), length - both.tensor("prompt_length"))


def test_rows_keep_their_prompt_identity_and_facts(tiny):
    engine = NativeEngine(tiny(), stop_ids=(1,), pad_id=0)
    engine.version = 4
    out = engine.generate(UNIT, Sampling(5), samples=2, seed=0)
    assert out.non_tensor_batch["uid"].tolist() == ["p:0:0"] * 2 + ["p:1:0"] * 2 + ["p:2:0"] * 2
    assert [row["n"] for row in out.non_tensor_batch["row"]] == [0, 0, 1, 1, 2, 2]
    assert out.tensor("sample").tolist() == [0, 1] * 3
    assert out.meta_info == {"step": 3}
    for i in range(6):
        start = int(out.tensor("prompt_length")[i])
        assert out.tensor("input_ids")[i, :start].tolist() == UNIT.tensor("input_ids")[i // 2, :start].tolist()
    mask = out.tensor("response_mask")
    assert set(out.tensor("version")[mask].tolist()) == {4}
    assert set(out.tensor("version")[~mask].tolist()) <= {-1}


def test_one_token_is_the_shortest_answer(tiny):
    everything = tuple(range(99))
    out = NativeEngine(tiny(), stop_ids=everything, pad_id=0).generate(UNIT, Sampling(8), samples=2, seed=0)
    assert (out.tensor("length") - out.tensor("prompt_length")).tolist() == [1] * 6
    assert not bool(out.tensor("truncated").any())
    cut = NativeEngine(tiny(), stop_ids=(1,), pad_id=0).generate(UNIT, Sampling(1, greedy=True), samples=1, seed=0)
    assert (cut.tensor("length") - cut.tensor("prompt_length")).tolist() == [1] * 3


def test_refusals(tiny):
    engine = NativeEngine(tiny(), stop_ids=(1,), pad_id=0)
    with pytest.raises(BatchError, match="prompts given to the engine: the batch lacks"):
        engine.generate(UNIT.select(["input_ids", "prompt_length"], []), Sampling(5), samples=1, seed=0)
    with pytest.raises(DataError, match=r"a prompt of 4 tokens and rollout.max_new_tokens=61 exceed .* 64 positions"):
        engine.generate(UNIT, Sampling(61), samples=1, seed=0)


def test_weights_that_are_not_finite_stop_the_run(tiny):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(HocketError, match="not finite"):
        NativeEngine(model, stop_ids=(1,), pad_id=0).generate(UNIT, Sampling(5), samples=1, seed=0)


def swapping(engine, weights, *, after, every):
    """A refresh that loads `weights` as version 7 at its `after`-th call, and the calls."""
    calls = []

    def look():
        calls.append(len(calls) + 1)
        if len(calls) == after:
            engine.load(weights.items(), 7)

    return Refresh(every, look), calls


@torch.no_grad()
def by_hand(old, new, row, start, swap):
    """Log-probs of a row's response: `old` reads and writes the first `swap` tokens, `new` goes on in its cache."""
    out = old(input_ids=row[None, : start + swap - 1], use_cache=True)
    logits = [*out.logits[0, start - 1 :]]
    for t in range(start + swap - 1, len(row) - 1):
        out = new(input_ids=row[None, t : t + 1], cache=out.past_key_values, use_cache=True)
        logits.append(out.logits[0, -1])
    return torch.log_softmax(torch.stack(logits), -1).gather(-1, row[start:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_weights_swapped_in_flight(tiny, kind):
    """Half of each answer before the swap, half after: log-probs by hand, with both weights and the kept cache."""
    old, new = tiny(kind), tiny(kind, seed=9)
    weights = {name: t.clone() for name, t in named_weights(new).items()}
    engine = NativeEngine(tiny(kind), stop_ids=(1, 2, 3), pad_id=0)
    engine.version = 5
    refresh, calls = swapping(engine, weights, after=2, every=4)
    out = engine.generate(UNIT, Sampling(16), samples=4, seed=1, refresh=refresh)
    assert calls == [1, 2, 3]
    assert swap_points(out) == [(0, 5), (8, 7)]
    crossed = 0
    for i in range(len(out)):
        start, end = int(out.tensor("prompt_length")[i]), int(out.tensor("length")[i])
        row = out.tensor("input_ids")[i, :end]
        versions = out.tensor("version")[i].tolist()
        assert versions[start:end] == ([5] * 8 + [7] * 8)[: end - start]
        assert set(versions[:start] + versions[end:]) <= {-1}
        wanted = by_hand(old, new, row, start, min(8, end - start))
        torch.testing.assert_close(out.tensor("rollout_logprobs")[i, start:end], wanted, atol=2e-5, rtol=0)
        crossed += end - start == 16
    assert crossed, "some answers have tokens of both versions"


def test_a_swap_changes_what_comes_after_it_alone(tiny):
    engine, still = (NativeEngine(tiny(), stop_ids=(1,), pad_id=0) for _ in range(2))
    weights = {name: t.clone() for name, t in named_weights(tiny(seed=9)).items()}
    refresh, _ = swapping(engine, weights, after=3, every=2)
    swapped = engine.generate(UNIT, Sampling(12), samples=4, seed=1, refresh=refresh)
    whole = still.generate(UNIT, Sampling(12), samples=4, seed=1)
    for i in range(len(whole)):
        start = int(whole.tensor("prompt_length")[i])
        a, b = (out.tensor("input_ids")[i, start:].tolist() for out in (swapped, whole))
        assert a[:6] == b[:6]
    assert not torch.equal(swapped.tensor("input_ids"), whole.tensor("input_ids"))


def test_a_refresh_that_finds_nothing_changes_nothing(tiny):
    engine = NativeEngine(tiny(), stop_ids=(1, 2, 3), pad_id=0)
    plain = engine.generate(UNIT, Sampling(12), samples=4, seed=1)
    looked = engine.generate(UNIT, Sampling(12), samples=4, seed=1, refresh=Refresh(1, lambda: None))
    assert all(torch.equal(tensor, looked.tensor(key)) for key, tensor in plain.tensors().items())
