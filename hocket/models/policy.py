"""One forward over right-padded rows -> log-probs of the tokens that are there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hocket.data.schema import positions
from hocket.errors import WeightSyncError
from hocket.models.pieces import Weight, copy_into, whole

Frozen = TypeVar("Frozen", bound=nn.Module)
WeightLoader = Callable[[Any, Mapping[str, Tensor]], None]


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    length: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> dict[str, Tensor]:
    """Log-probs that `model` gives each token of `input_ids` (B, T), right padded, `length` (B,) tokens a row.

    Returns `logprobs` (B, T) float32: position t holds log p(token t | tokens before t), after dividing the
    logits by `temperature`; position 0 and padding hold 0. With `entropy`, also the entropy in nats (B, T) of
    the distribution that token t was drawn from.
    """
    logits = cast(Tensor, model(**forward_inputs(model, input_ids, length)).logits)
    scores = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    real = positions(length, input_ids.shape[1])[:, 1:]
    chosen = scores.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    out = {"logprobs": _shifted(torch.where(real, chosen, 0.0))}
    if entropy:
        out["entropy"] = _shifted(torch.where(real, -(scores.exp() * scores).sum(-1), 0.0))
    return out


def forward_inputs(model: nn.Module, input_ids: Tensor, length: Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward over right-padded rows, with `position_ids` where the model takes them."""
    attention = positions(length, input_ids.shape[1]).long()
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention, "use_cache": False}
    if takes(type(model), "position_ids"):
        inputs["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)
    return inputs


@cache
def takes(kind: type[nn.Module], argument: str) -> bool:
    """Whether the model's forward names `argument`: an unknown keyword would vanish in its **kwargs."""
    return argument in inspect.signature(kind.forward).parameters


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers by name, a tied tensor once, under the first of its names."""
    weights: dict[str, Tensor] = {name: p.detach() for name, p in module.named_parameters()}
    saved = module.state_dict()
    weights |= {name: b for name, b in module.named_buffers() if name in saved}
    return weights


def frozen(model: Frozen) -> Frozen:
    """The model, in evaluation mode and without gradients, as every maker holds its models.

    Not only to save memory: torch folds a one-row product differently for weights that want gradients, even where none
    are recorded, and then the last bits of a log-prob differ.
    """
    return model.eval().requires_grad_(False)


def demand_fit(own: Mapping[str, Sequence[int]], sent: Mapping[str, Sequence[int]], *, what: str, model: str) -> None:
    """Raise WeightSyncError, naming the tensors, unless `sent` has the names and shapes of `own`."""
    lack, extra = sorted(set(own) - set(sent)), sorted(set(sent) - set(own))
    if lack or extra:
        raise WeightSyncError(
            f"{what} do not fit {model}: {len(lack)} tensors are missing, e.g. {lack[:3]}, {len(extra)} are unknown, "
            f"e.g. {extra[:3]}; maker and trainer must load the same architecture"
        )
    wrong = [name for name, shape in sent.items() if tuple(own[name]) != tuple(shape)]
    if wrong:
        shapes = {name: (tuple(sent[name]), tuple(own[name])) for name in wrong[:3]}
        raise WeightSyncError(f"{what} have other shapes than {model} (sent, own): {shapes}")


_LOADERS: dict[type[nn.Module], WeightLoader] = {}


def register_weight_loader(kind: type[nn.Module], loader: WeightLoader) -> None:
    """Let `loader(model, weights)` put named weights into models of this class, instead of copying name by name.

    For a maker's model that cannot take plain tensors, such as a quantized one. It runs in the maker, between two
    batches, with all tensors of the trainer's model; a tensor is read-only memory of the sender: copy it.
    """
    _LOADERS[kind] = loader


def weight_loader(model: nn.Module) -> WeightLoader | None:
    """The loader registered for the model's class, or for the nearest class that it derives from."""
    return next((_LOADERS[kind] for kind in type(model).__mro__ if kind in _LOADERS), None)


def copy_weights(model: nn.Module, weights: Mapping[str, Weight], *, what: str) -> None:
    """Copy `weights` into the model's own tensors, or give them to its registered loader.

    Raises WeightSyncError unless names and shapes match exactly.
    """
    if (loader := weight_loader(model)) is not None:
        loader(model, {name: whole(weight) for name, weight in weights.items()})
        return
    own = named_weights(model)
    demand_fit(_shapes(own), _shapes(weights), what=what, model="this model")
    for name, weight in weights.items():
        copy_into(own[name], weight)


def wanted_shapes(model: nn.Module) -> dict[str, tuple[int, ...]] | None:
    """What `copy_weights` wants, by name; None when a registered loader takes what comes."""
    return None if weight_loader(model) else _shapes(named_weights(model))


def _shapes(weights: Mapping[str, Weight]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _shifted(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (1, 0))
