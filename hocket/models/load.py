"""A name, a folder or a config -> modules and tokenizers. The only user of transformers' model loading."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hocket.config import ModelSection
from hocket.errors import ConfigError, DataError
from hocket.models.chars import char_tokenizer
from hocket.models.policy import copy_weights, named_weights

CHARS = "chars"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Trust:
    """What is believed of a model's files: the commit of a hub id, its own code, weights in pickles (plain tensors
    only). Believed is what the config says of `model.name`, and folders on this machine; other hub ids are not.
    """

    revision: str | None = None
    remote_code: bool = False
    pickle_weights: bool = False

    @staticmethod
    def of(section: ModelSection, name: str | None) -> Trust:
        """What the config says of `name`, the model's or another one that is loaded beside it."""
        if name == section.name or (name is not None and Path(name).is_dir()):
            return Trust(section.revision, section.trust_remote_code, section.allow_pickle_weights)
        return Trust()

    def options(self, name: str) -> dict[str, Any]:
        """For every `from_pretrained`. Raises ConfigError for the code of a hub id that may change under us."""
        if Path(name).is_dir():
            pinned: dict[str, Any] = {}
        else:
            pinned = {"revision": self.revision} if self.revision else {}
            if self.remote_code and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
                raise ConfigError(
                    f"model.trust_remote_code is on for the id {name!r}, found model.revision={self.revision!r}; "
                    "wanted the commit (40 hex digits) whose code you have read, or a folder on this machine"
                )
        if self.remote_code:
            _say_trust(name)
        return {"trust_remote_code": self.remote_code, **pinned}


@cache
def _say_trust(name: str) -> None:
    getLogger("hocket").warning("model.trust_remote_code is on: Python files of %r run with all your rights", name)


@dataclass(frozen=True)
class ModelSpec:
    """What to load: `name` is a folder or a Hugging Face id; or `config` (with its `model_type`) is made
    from nothing with `seed`."""

    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=lambda: cast(dict[str, Any], {}))
    dtype: str = "float32"
    seed: int = 0
    trust: Trust = Trust()


def load_causal_lm(spec: ModelSpec, *, device: str = "cpu") -> PreTrainedModel:
    """A causal language model in evaluation mode (dropout off: its log-probs are compared).

    Raises DataError for a folder that is missing, damaged or incomplete, ConfigError for a `config` that
    makes no causal language model.
    """
    quiet()
    model = _fresh(AutoModelForCausalLM, spec) if spec.name is None else _pretrained(AutoModelForCausalLM, spec)
    ready = cast(PreTrainedModel, cast(nn.Module, model).to(device).eval())
    _demand_causal(ready)
    return ready


def load_scalar_model(spec: ModelSpec, *, fresh_head: bool, device: str = "cpu") -> PreTrainedModel:
    """A sequence-classification model with one label: a critic or a reward model.

    `fresh_head=True` takes the backbone of `spec` and sets the head to zero, so that a new critic values every
    state with 0; False wants a folder that was trained with one label, or a bare config, whose head is random as
    its backbone is. Raises DataError for a folder that cannot be loaded so, ConfigError for an architecture without
    such a head.
    """
    quiet()
    if spec.name is None:
        model, trained = _fresh(AutoModelForSequenceClassification, spec, num_labels=1), False
    else:
        model, trained = _pretrained_scalar(spec, fresh_head=fresh_head)
    if not hasattr(model, "score"):
        raise ConfigError(f"{type(model).__name__} has no `score` head; use GPT-2, OPT, BLOOM, Llama, Qwen, ...")
    if fresh_head and not trained:
        nn.init.zeros_(model.score.weight)
    return cast(PreTrainedModel, cast(nn.Module, model).to(device).eval())


def _pretrained_scalar(spec: ModelSpec, *, fresh_head: bool) -> tuple[Any, bool]:
    """The model of a folder or id, and whether its head came from there too."""
    name = str(spec.name)
    check_model_folder(name, spec.trust)
    config = _from_pretrained(AutoConfig, name, **spec.trust.options(name))
    trained = "ForSequenceClassification" in "".join(config.architectures or ())
    if not trained and not fresh_head:
        raise DataError(
            f"model {name!r} is {config.architectures}, which has no score head; a reward model must be "
            "saved as AutoModelForSequenceClassification with num_labels=1"
        )
    if trained and config.num_labels != 1:
        raise DataError(f"model {name!r} scores {config.num_labels} labels; a critic or reward model has 1")
    new = set[str]() if trained else {"score.weight"}
    return _pretrained(AutoModelForSequenceClassification, spec, new=new, num_labels=1), trained


def load_tokenizer(name: str | None, *, model: str | None = None, trust: Trust = Trust()) -> PreTrainedTokenizerBase:
    """The tokenizer `name` ("chars" is the bundled character tokenizer), or the model's own; `trust` is in that.

    A tokenizer without a padding token gets its end token for padding: masks come from lengths, so the two
    may be the same.
    """
    source = name or model
    if source == CHARS:
        return char_tokenizer()
    if source is None:
        raise ConfigError(f"model.config needs model.tokenizer: a folder, an id, or {CHARS!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **trust.options(source))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"no tokenizer in {source!r} ({_first_line(error)}); set model.tokenizer to a folder or id that has one"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast(PreTrainedTokenizerBase, tokenizer)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The padding token, 0 for a tokenizer that has neither that nor an end token: no mask looks at it."""
    return cast(int, cast(Any, tokenizer).pad_token_id or 0)


def save_hf(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_ids: tuple[int, ...],
    *,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`, given one, load as it is.

    `weights`, a state dict, is written in the place of the model's own.
    """
    pad = tokenizer.pad_token_id if tokenizer is not None else model.config.pad_token_id
    if model.can_generate():
        model.generation_config = GenerationConfig(eos_token_id=list(stop_ids) or None, pad_token_id=pad)
    quiet()
    model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.padding_side = "left"  # what `generate` needs when a user batches prompts
        tokenizer.save_pretrained(folder)


def read_weights(model: PreTrainedModel, folder: Path) -> None:
    """Copy what `save_hf` wrote into the model. Raises DataError when that is another model."""
    quiet()
    saved = _pretrained(type(model), ModelSpec(name=str(folder)))
    with torch.no_grad():
        copy_weights(model, named_weights(saved), what=f"checkpoint {str(folder)!r}")


def check_model_folder(name: str, trust: Trust = Trust()) -> None:
    """Say what is wrong with a local model folder before any library guesses; ids of a hub pass."""
    folder = Path(name)
    if not folder.exists():
        looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
        if looks_local:
            near = difflib.get_close_matches(folder.name, _siblings(folder), n=1)
            hint = f"; did you mean {str(folder.parent / near[0])!r}?" if near else ""
            raise DataError(f"model folder {name!r} does not exist{hint}")
        return
    if not folder.is_dir():
        raise DataError(f"model {name!r} is a file; wanted a folder with config.json and model.safetensors")
    if not (folder / "config.json").exists():
        raise DataError(f"model folder {name!r} has no config.json; wanted a folder saved by save_pretrained")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        found = sorted(p.name for p in folder.iterdir())
        pickles = [one.name for pattern in _PICKLES for one in sorted(folder.glob(pattern))]
        if pickles and not trust.pickle_weights:
            raise DataError(
                f"model folder {name!r} has its weights only in pickles, {pickles}, wanted *.safetensors; convert "
                "them, or set model.allow_pickle_weights=true: then plain tensors are read from them, and nothing else"
            )
        if not pickles:
            raise DataError(
                f"model folder {name!r} has no weights: wanted *.safetensors, found {found}; "
                "save the model with save_pretrained, or convert a .bin file to safetensors first"
            )


def _pretrained(kind: Any, spec: ModelSpec, *, new: Set[str] = frozenset(), **options: Any) -> Any:
    """Load the folder or id as `kind`; only the weights `new` may be missing from it."""
    name = str(spec.name)
    check_model_folder(name, spec.trust)
    model, found = _from_pretrained(
        kind,
        name,
        dtype=_dtype(spec.dtype),
        **spec.trust.options(name),
        use_safetensors=None if spec.trust.pickle_weights else True,
        weights_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    # transformers would fill what is missing or does not fit with random numbers
    if wrong := sorted(found["mismatched_keys"]):
        key, saved, wanted = wrong[0]
        raise DataError(f"model {name!r} holds {key} as {tuple(saved)}, its config.json wants {tuple(wanted)}; mend it")
    if missing := sorted(set(found["missing_keys"]) - new):
        raise DataError(
            f"model {name!r} has no weights for {len(missing)} tensors of {type(model).__name__}, e.g. {missing[:3]}; "
            "it was saved as another architecture, or not whole"
        )
    return model


def _from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """`kind.from_pretrained`; whatever it raises about the files becomes one DataError that names the model."""
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # config, JSON, safetensors and hub errors share no base class
        raise DataError(
            f"cannot load model {name!r}: {_first_line(error)}; give a folder saved by save_pretrained, or a "
            "Hugging Face id that is in the cache or can be reached"
        ) from error


def quiet() -> None:
    """No progress bars and load reports on the way: what matters is said by hocket itself."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _siblings(folder: Path) -> list[str]:
    return [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []


@torch.no_grad()
def _demand_causal(model: PreTrainedModel) -> None:
    """ConfigError when a later token changes what the model says before it: an encoder learns nothing by RL."""
    ids = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], device=model.device)
    first, second = cast(torch.Tensor, model(input_ids=ids).logits)[:, :-1].float()
    # a causal model gives zero here, up to the rounding of its matrix products; an encoder 1e-4 even when fresh
    if model.dtype == torch.float32 and not torch.allclose(first, second, rtol=1e-5, atol=1e-5):
        raise ConfigError(
            f"{type(model).__name__} looks at later tokens, so that it is no causal language model; choose a decoder, "
            "or set is_decoder: true in model.config where the architecture has that"
        )


def _fresh(kind: Any, spec: ModelSpec, **options: Any) -> Any:
    """A model of that kind made from the config alone; its noise is its own, and nobody else's is used up."""
    settings = dict(spec.config)
    model_type = settings.pop("model_type", None)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ", for example llama"
        raise ConfigError(f"model.config.model_type {model_type!r} is no causal language model of transformers{hint}")
    known = AutoConfig.for_model(model_type)
    for key in settings:  # a config takes any keyword, and would ignore a misspelt one
        near = [] if hasattr(known, key) else difflib.get_close_matches(key, known.to_dict(), n=1, cutoff=0.8)
        if near:
            raise ConfigError(f"model.config.{key} is no setting of {model_type}; did you mean {near[0]}?")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            return kind.from_config(AutoConfig.for_model(model_type, **settings, **options), dtype=_dtype(spec.dtype))
    except Exception as error:  # each architecture checks its sizes in its own way
        raise ConfigError(f"model.config makes no {model_type} model: {error}") from error


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def named_architecture(name: str, *, trust: Trust = Trust()) -> str:
    """The model type that the config of a folder or id names, such as "gpt2"; DataError when there is none."""
    check_model_folder(name, trust)
    return cast(str, _from_pretrained(AutoConfig, name, **trust.options(name)).model_type)


def named_positions(name: str, *, trust: Trust = Trust()) -> int | None:
    """How many positions the model's config allows; None when it names no limit."""
    config = _from_pretrained(AutoConfig, name, **trust.options(name))
    return cast(int | None, getattr(config, "max_position_embeddings", None))


def check_room(longest: int, max_new_tokens: int, positions: int | None) -> None:
    """DataError when a prompt of `longest` tokens and its answer exceed the model's positions; None is no limit."""
    if positions is not None and longest + max_new_tokens > positions:
        raise DataError(
            f"a prompt of {longest} tokens and rollout.max_new_tokens={max_new_tokens} exceed the model's {positions} "
            "positions; lower max_new_tokens or set data.max_prompt_tokens"
        )


def generation_source(model: PreTrainedModel) -> Any:
    """Where a loaded model says how it is to generate: its generation config, or else its config."""
    return getattr(model, "generation_config", None) or model.config


def end_tokens(model: PreTrainedModel, given: int | Sequence[int] | None = None) -> tuple[int, ...]:
    """The end tokens `given`, or else those that a loaded model names; none when it names none."""
    found = given if given is not None else getattr(generation_source(model), "eos_token_id", None)
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def named_stop_ids(name: str, *, trust: Trust = Trust()) -> int | list[int] | None:
    """End tokens that the model's generation config names, or else its config; read without its weights."""
    try:
        source: Any = GenerationConfig.from_pretrained(name, **trust.options(name))
    except OSError:
        source = _from_pretrained(AutoConfig, name, **trust.options(name))
    return cast(Any, getattr(source, "eos_token_id", None))
