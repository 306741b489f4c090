"""The state of a trainer at one moment: copied quickly, written slowly, and read back."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from hocket.errors import CheckpointError, DataError, WeightSyncError
from hocket.models.load import read_weights
from hocket.roles.optimizer import Optimizer
from hocket.weights.manifest import weights_sha256

State = dict[str, Any]
_FILE = "optimizer.pt"


@dataclass(frozen=True)
class Snapshot:
    """Copies in memory: state dicts of the models and of their optimizers by name, and the state of torch's generator.

    Tensors that share memory in the model, such as tied heads, are copied once.
    """

    weights: dict[str, dict[str, Tensor]]
    optimizers: dict[str, State]
    random: Tensor

    @staticmethod
    def of(models: Mapping[str, PreTrainedModel], optimizers: Mapping[str, Optimizer]) -> Snapshot:
        """The state as it is now."""
        return Snapshot(
            {name: _copies(model.state_dict()) for name, model in models.items()},
            {name: _copied(optimizer.state()) for name, optimizer in optimizers.items()},
            torch.get_rng_state(),
        )

    def save(self, folder: Path) -> dict[str, str]:
        """Write what is not weights into `folder`; returns SHA-256 of the policy's weights and of optimizer state."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"optimizers": self.optimizers, "random": self.random}, folder / _FILE)
        return {
            "weights_sha256": weights_sha256(_unshared(self.weights["policy"])),
            "optimizer_sha256": state_sha256(self.optimizers),
        }


def restore(folder: Path, models: Mapping[str, PreTrainedModel], optimizers: Mapping[str, Optimizer]) -> None:
    """Put what was saved in `folder` back into models and optimizers.

    Raises CheckpointError when a file cannot be read, or is of another model or algorithm.
    """
    try:
        state: State = torch.load(folder / "state" / _FILE, weights_only=True)
        if set(state["optimizers"]) != set(optimizers):
            raise CheckpointError(
                f"checkpoint {str(folder)!r} has optimizers of {sorted(state['optimizers'])}, this run has those of "
                f"{sorted(optimizers)}; resume with the algorithm that wrote it"
            )
        for name, model in models.items():
            read_weights(model, folder / ("hf" if name == "policy" else "critic"))
        for name, optimizer in optimizers.items():
            optimizer.load(state["optimizers"][name])
        torch.set_rng_state(state["random"])
    except (DataError, WeightSyncError) as error:
        raise CheckpointError(f"cannot restore from checkpoint {str(folder)!r}: {error.message}") from error
    except (OSError, KeyError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"cannot restore from checkpoint {str(folder)!r}: {error}") from error


def state_sha256(state: Any) -> str:
    """SHA-256 over all numbers and tensors of nested dicts and lists, in order."""
    hasher = hashlib.sha256()
    for name, value in _leaves(state, ""):
        hasher.update(f"{name} ".encode())
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            hasher.update(f"{data.dtype} {tuple(data.shape)}".encode())
            hasher.update(cast(Any, data.reshape(-1).view(torch.uint8).numpy()))
        else:
            hasher.update(repr(value).encode())
    return hasher.hexdigest()


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in cast(dict[Any, Any], state).items():
            yield from _leaves(value, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        for i, value in enumerate(cast(list[Any], state)):
            yield from _leaves(value, f"{name}/{i}")
    else:
        yield name, state


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    once: dict[int, Tensor] = {}
    return {name: once.setdefault(t.data_ptr(), t.detach().cpu().clone()) for name, t in weights.items()}


def _unshared(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(tensor.data_ptr(), name)
    return {name: weights[name] for name in first.values()}


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in cast(dict[Any, Any], state).items()}
    if isinstance(state, list):
        return [_copied(value) for value in cast(list[Any], state)]
    return state.detach().cpu().clone() if isinstance(state, Tensor) else state
