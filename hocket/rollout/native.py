"""hocket's own decode loop over any Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hocket.data.proto import DataProto
from hocket.data.schema import PROMPTS, ROLLOUTS, check, positions
from hocket.models.load import check_room
from hocket.models.pieces import Weight
from hocket.models.policy import copy_weights, takes, wanted_shapes
from hocket.rollout.engine import Refresh, Sampling
from hocket.rollout.sampling import sample_tokens, uniforms


class NativeEngine:
    """Decodes one unit at a time: each prompt is prefilled once and its cache repeated for its samples, and
    rows that have ended leave the batch.

    Weights that a `refresh` puts in compute from the next token on. The cache is kept: what older weights made of the
    earlier tokens stays, as recomputing it would cost a prefill for each swap. Those log-probs are of neither version
    alone, but they are those of the drawn distribution, which is what an importance weight needs.
    """

    def __init__(self, model: PreTrainedModel, *, stop_ids: Sequence[int], pad_id: int) -> None:
        self.model = model.eval()
        self.version = 0
        self._stop = torch.tensor(sorted(stop_ids))
        self._pad_id = pad_id

    @torch.no_grad()
    def generate(
        self, prompts: DataProto, sampling: Sampling, *, samples: int, seed: int, refresh: Refresh | None = None
    ) -> DataProto:
        """See RolloutEngine. Raises DataError when prompt and response cannot fit the model's positions."""
        check(prompts, PROMPTS, "prompts given to the engine")
        longest = int(prompts.tensor("prompt_length").max())
        sampling = replace(sampling, max_new_tokens=sampling.room(longest))
        check_room(longest, sampling.max_new_tokens, getattr(self.model.config, "max_position_embeddings", None))
        device = self.model.device
        rows = prompts.repeat(samples)
        sample = torch.arange(samples).repeat(len(prompts))
        noise = np.stack(
            [
                uniforms(seed, str(uid), int(i), sampling.max_new_tokens)
                for uid, i in zip(rows.non_tensor_batch["uid"], sample, strict=True)
            ]
        )
        answers = self._decode(
            prompts.select().to(device), sampling, samples, noise=torch.from_numpy(noise).to(device), refresh=refresh
        )
        return self._rollouts(rows, sample, *(tensor.cpu() for tensor in answers))

    def load(self, weights: Iterable[tuple[str, Weight]], version: int) -> None:
        """See RolloutEngine."""
        copy_weights(self.model, dict(weights), what=f"weights version {version}")
        self.version = version

    def expects(self) -> Mapping[str, tuple[int, ...]] | None:
        """See RolloutEngine."""
        return wanted_shapes(self.model)

    def _decode(
        self, prompts: DataProto, sampling: Sampling, samples: int, *, noise: Tensor, refresh: Refresh | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sampled ids (R, N), their log-probs (R, N), how many of each row count (R,), and the version of each decode
        step (N,)."""
        logits, cache, attention = self._prefill(prompts)
        cache.batch_repeat_interleave(samples)
        logits, attention = (t.repeat_interleave(samples, 0) for t in (logits, attention))
        rows, width = logits.shape[0], sampling.max_new_tokens
        tokens = torch.full((rows, width), self._pad_id, device=noise.device)
        logprobs = torch.zeros(rows, width, device=noise.device)
        counts = torch.zeros(rows, dtype=torch.int64, device=noise.device)
        versions = torch.full((width,), self.version, dtype=torch.int32)
        live = torch.arange(rows, device=noise.device)
        stop = self._stop.to(noise.device)
        for i in range(width):
            chosen, tokens_logprobs = sample_tokens(logits, noise[live, i], sampling)
            tokens[live, i], logprobs[live, i] = chosen, tokens_logprobs
            counts[live] += 1
            going = (~torch.isin(chosen, stop)).nonzero().squeeze(1)
            if not len(going) or i + 1 == width:
                break
            if len(going) < len(live):
                live, chosen, attention = live[going], chosen[going], attention[going]
                cache.batch_select_indices(going)
            if refresh is not None and (i + 1) % refresh.every == 0:
                refresh.look()
                versions[i + 1 :] = self.version
            attention = torch.nn.functional.pad(attention, (0, 1), value=1)
            logits = self._forward(chosen[:, None], attention, cache)
        return tokens, logprobs, counts, versions

    def _prefill(self, prompts: DataProto) -> tuple[Tensor, DynamicCache, Tensor]:
        """Next-token logits (P, V), the cache, and the attention mask of left-padded prompts."""
        length = prompts.tensor("prompt_length")
        width = int(length.max())
        source = torch.arange(width, device=length.device)[None, :] - (width - length)[:, None]
        attention = (source >= 0).long()
        ids = prompts.tensor("input_ids").gather(1, source.clamp(min=0))
        ids = torch.where(attention.bool(), ids, self._pad_id)
        cache = DynamicCache(config=self.model.config)
        return self._forward(ids, attention, cache), cache, attention

    def _forward(self, ids: Tensor, attention: Tensor, cache: DynamicCache) -> Tensor:
        """Logits (R, V) after the last of `ids` (R, n); `attention` (R, past + n) covers the cache as well."""
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": attention, "use_cache": True}
        if takes(type(self.model), "position_ids"):
            inputs["position_ids"] = (attention.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        inputs["cache"] = cache
        return cast(Tensor, self.model(**inputs, logits_to_keep=1).logits[:, -1])

    def _rollouts(
        self, rows: DataProto, sample: Tensor, tokens: Tensor, logprobs: Tensor, counts: Tensor, versions: Tensor
    ) -> DataProto:
        """Put each response right behind its prompt, right padded."""
        prompt_length = rows.tensor("prompt_length")
        length = prompt_length + counts
        width = int(length.max())
        response = positions(length, width) & ~positions(prompt_length, width)
        source = (torch.arange(width)[None, :] - prompt_length[:, None]).clamp(0, tokens.shape[1] - 1)
        prompt_ids = _fit(rows.tensor("input_ids"), width, self._pad_id)
        prompt_ids = torch.where(positions(prompt_length, width), prompt_ids, self._pad_id)
        last = tokens.gather(1, (counts - 1)[:, None]).squeeze(1)
        out = DataProto.from_dict(
            {
                "sample": sample,
                "input_ids": torch.where(response, tokens.gather(1, source), prompt_ids),
                "prompt_length": prompt_length,
                "length": length,
                "response_mask": response,
                "rollout_logprobs": torch.where(response, logprobs.gather(1, source), 0.0),
                "version": torch.where(response, versions[source], -1),
                "truncated": ~torch.isin(last, self._stop),
            },
            rows.non_tensor_batch,
            rows.meta_info,
        )
        return check(out, ROLLOUTS, "rollouts of the native engine")


def _fit(ids: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, max(0, width - ids.shape[1])), value=value)[:, :width]
