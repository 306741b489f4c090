"""The stages of a batch and the names each one promises, checked where a batch crosses a border.

PROMPTS -> ROLLOUTS -> EXPERIENCE -> TRAIN_BATCH. Axes: B rows (samples), T token positions, prompt first,
then response, right padded. Every mask derives from `prompt_length` and `length`, never from comparing
token ids, because the padding token may be the end token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.data.merge import same
from hocket.data.proto import DataProto
from hocket.errors import BatchError


@dataclass(frozen=True)
class Field:
    """One name of a stage: its axes ("B" or "BT"), its dtype (None: a Python column), its meaning."""

    axes: str
    dtype: torch.dtype | None
    meaning: str


Stage = Mapping[str, Field]

PROMPTS: Stage = {
    "uid": Field("B", None, "identity of the prompt's visit: source:row:epoch; groups are made by it"),
    "input_ids": Field("BT", torch.int64, "prompt tokens, right padded"),
    "prompt_length": Field("B", torch.int64, "number of prompt tokens"),
    "row": Field("B", None, "the row of the data file as a dict of columns, `answer` and `prompt` among them"),
}

ROLLOUTS: Stage = PROMPTS | {
    "sample": Field("B", torch.int64, "index within the group of samples of one prompt"),
    "input_ids": Field("BT", torch.int64, "prompt then response, right padded, ids exactly as sampled"),
    "length": Field("B", torch.int64, "number of prompt and response tokens"),
    "response_mask": Field("BT", torch.bool, "tokens that the policy produced, end token included"),
    "rollout_logprobs": Field("BT", torch.float32, "log-probs as sampled, after temperature; 0 elsewhere"),
    "version": Field("BT", torch.int32, "weights version of each response token; -1 elsewhere"),
    "truncated": Field("B", torch.bool, "ended by the length limit instead of an end token"),
}

EXPERIENCE: Stage = ROLLOUTS | {
    "score": Field("B", torch.float32, "outcome score of the reward"),
}

TRAIN_BATCH: Stage = {name: field for name, field in EXPERIENCE.items() if name != "row"} | {
    "minibatch": Field("B", torch.int64, "number of the optimizer step, within a pass, that the row belongs to"),
    "group": Field("B", torch.int64, "number of the row's group, in order of first appearance"),
    "proximal_logprobs": Field("BT", torch.float32, "trainer weights at the start of the step"),
    "advantages": Field("BT", torch.float32, "what the policy loss weighs each token by"),
}

# What a padded position holds. Everything else pads with zero.
_PADDING = {"version": -1}


def check(data: DataProto, stage: Stage, name: str) -> DataProto:
    """Return `data` if it has all names of `stage` with their dtypes and axes; else raise BatchError."""
    names = set(data.keys())
    if missing := sorted(set(stage) - names):
        raise BatchError(f"{name}: the batch lacks {missing}; it has {sorted(names)}")
    for key, spec in stage.items():
        if spec.dtype is None:
            continue
        tensor = data.tensor(key)
        if tensor.dtype != spec.dtype or tensor.dim() != len(spec.axes):
            raise BatchError(
                f"{name}: {key} is {tensor.dtype} with shape {tuple(tensor.shape)}; "
                f"wanted {spec.dtype} with axes ({', '.join(spec.axes)}): {spec.meaning}"
            )
    widths = {key: data.tensor(key).shape[1] for key, spec in stage.items() if spec.axes == "BT"}
    if len(set(widths.values())) > 1:
        raise BatchError(f"{name}: token tensors have different widths {widths}; pad them to one width")
    return data


def positions(length: Tensor, width: int) -> Tensor:
    """Bool (B, width): true before each row's `length` (B,)."""
    return torch.arange(width, device=length.device)[None, :] < length[:, None]


def collate(parts: Sequence[DataProto]) -> DataProto:
    """Join rows of different width: every (B, T) tensor is right padded to the widest part.

    Facts are kept where all parts agree: the numbers of the units that were joined are not facts of the whole.
    """
    width = max((part.tensor("input_ids").shape[1] for part in parts), default=0)
    shared = [key for key in parts[0].meta_info if all(_agrees(part, parts[0], key) for part in parts)] if parts else []
    return DataProto.concat([_widen(part, width).select(meta_info_keys=shared) for part in parts])


def _agrees(part: DataProto, first: DataProto, key: str) -> bool:
    return key in part.meta_info and same(part.meta_info[key], first.meta_info[key])


def _widen(part: DataProto, width: int) -> DataProto:
    missing = width - part.tensor("input_ids").shape[1]
    if not missing:
        return part
    return _with_tensors(
        part,
        {
            key: torch.nn.functional.pad(t, (0, missing), value=_PADDING.get(key, 0)) if t.dim() == 2 else t
            for key, t in part.tensors().items()
        },
    )


def _with_tensors(data: DataProto, tensors: Mapping[str, Tensor]) -> DataProto:
    return DataProto.from_dict(tensors, data.non_tensor_batch, data.meta_info)


def swap_points(rollouts: DataProto) -> list[tuple[int, int]]:
    """(decode step, weights version) pairs of one unit: from which step of the decoding on which version was in use.

    All rows of a unit are decoded together, so a version begins at the earliest response position that carries it.
    """
    version, start = rollouts.tensor("version"), rollouts.tensor("prompt_length")
    step = torch.arange(version.shape[1])[None, :] - start[:, None]
    mask = rollouts.tensor("response_mask")
    versions: list[int] = version[mask].unique().tolist()
    return sorted((int(step[mask & (version == v)].min()), v) for v in versions)
