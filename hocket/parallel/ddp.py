"""Data-parallel ranks over torch.distributed: gloo between CPUs, NCCL between GPUs (untested here)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors  # pyright: ignore[reportPrivateUsage]

from hocket.errors import WorkerDied

_BUCKET_BYTES = 32 << 20  # gradients travel in pieces, so that no second copy of the whole model is needed


class DDP:
    """See Strategy. The process group comes from the environment, as torchrun sets it."""

    def __init__(self, *, timeout: float) -> None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """See Strategy."""
        values: list[Any] = [None] * self.world_size
        with self._together():
            dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See Strategy."""
        for bucket in _buckets([_gradient(parameter) for parameter in parameters]):
            flat = _flatten_dense_tensors(bucket)
            with self._together():
                dist.all_reduce(flat)
            for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(summed)

    @contextmanager
    def _together(self) -> Generator[None, None, None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise, in their own words
            raise WorkerDied(
                f"rank {self.rank} of {self.world_size} lost another rank of its trainer group, which died, failed or "
                f"kept it waiting too long ({str(error).splitlines()[0]}); look for the first error of the others"
            ) from error

    def close(self) -> None:
        """See Strategy."""
        dist.destroy_process_group()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring tensors of one dtype, up to the bucket's size together; a larger one is alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
