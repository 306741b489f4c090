"""Supervised steps: the loss falls, the answer comes out, and it ends."""

import copy

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from hocket.config import WarmStart
from hocket.data.schedule import Prompt
from hocket.errors import DataError
from hocket.roles.warm_start import _append, warm_start
from hocket.rollout.engine import Sampling
from hocket.rollout.native import NativeEngine


def greedy(model, units):
    out = NativeEngine(model, stop_ids=(1,), pad_id=0).generate(units, Sampling(8, greedy=True), samples=1, seed=0)
    spans = zip(*(out.tensor(key).tolist() for key in ("input_ids", "prompt_length", "length")), strict=True)
    return [ids[start:end] for ids, start, end in spans]


def test_the_loss_falls_and_answers_end(tiny, tokenizer, prompts, units):
    """L22: end tokens are learned, so that a greedy answer is the row's answer and then EOS."""
    model = tiny(sharp=1.0)
    first = warm_start(copy.deepcopy(model), tokenizer, prompts, WarmStart(steps=1, rows=4), stop_id=1, seed=0)
    last = warm_start(model, tokenizer, prompts, WarmStart(steps=80, rows=4, lr=2e-2), stop_id=1, seed=0)
    assert last < 0.1 * first
    unit = units(per_unit=4)[0]
    wanted = [[*tokenizer.encode(row["answer"]), 1] for row in unit.non_tensor_batch["row"]]
    assert greedy(model, unit) == wanted


def test_a_tokenizer_that_adds_special_tokens_does_not_put_them_into_the_answer(tiny, tokenizer, prompts, units):
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=[("<unk>", 2), ("<eos>", 1)]
    )
    assert other.encode("3")[0] == 2
    model = tiny(sharp=1.0)
    warm_start(model, other, prompts[:1], WarmStart(steps=25, rows=1, lr=2e-2), stop_id=1, seed=0)
    ids = torch.tensor([prompts[0].ids])
    unit = units(per_unit=4)[0][:1]
    unit.tensor("input_ids")[:, : ids.shape[1]] = ids
    unit.tensor("prompt_length")[:] = ids.shape[1]
    assert greedy(model, unit) == [[*tokenizer.encode("3"), 1]]


def test_the_last_supervised_label_is_the_stop_token():
    prompt = torch.tensor([[5, 6, 7], [8, 0, 0]])
    ids, start, end = _append(prompt, torch.tensor([3, 1]), [[9], [4, 4, 4]], 1)
    assert ids.tolist() == [[5, 6, 7, 9, 1], [8, 4, 4, 4, 1]]
    assert (start.tolist(), end.tolist()) == ([3, 1], [5, 5])
    ids, _, end = _append(prompt, torch.tensor([3, 1]), [[], [4]], 1)
    assert ids.tolist() == [[5, 6, 7, 1], [8, 4, 1, 0]]
    assert end.tolist() == [4, 3]


def test_no_steps_change_nothing_and_the_seed_decides(tiny, tokenizer, prompts):
    model, same = tiny(), tiny()
    assert warm_start(model, tokenizer, prompts, WarmStart(steps=0), stop_id=1, seed=0) == 0.0
    assert torch.equal(model.lm_head.weight, same.lm_head.weight)
    losses = [
        warm_start(tiny(), tokenizer, prompts, WarmStart(steps=3, rows=2), stop_id=1, seed=seed) for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_without_answers_there_is_nothing_to_learn(tiny, tokenizer):
    prompts = [Prompt("p:0", (5, 6), {"prompt": "ab", "answer": ""})]
    with pytest.raises(DataError, match=r"prompt file has none; set data.answer_key, or model.warm_start.steps=0"):
        warm_start(tiny(), tokenizer, prompts, WarmStart(steps=1), stop_id=1, seed=0)
