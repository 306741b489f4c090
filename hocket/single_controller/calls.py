"""A call on a group: what each worker gets, and one method of many workers as one callable."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import ray

from hocket.errors import GroupError
from hocket.single_controller.decorator import Dispatch, Execute
from hocket.single_controller.dispatch import Broadcast, Scatter, dispatch_all_to_all, get_predefined_dispatch_fn
from hocket.single_controller.future import Block, DataProtoFuture, kept_rows

if TYPE_CHECKING:
    from hocket.single_controller.worker_group import RayWorkerGroup

_INLINE = 100 * 1024  # bytes: below, Ray sends an argument with the call; above, one copy in the store serves all


class Spread:
    """Turns an argument of a call into one value per worker; what is large and shared is put into the store once."""

    def __init__(self, count: int, values: Sequence[Any], *, by_list: bool) -> None:
        self._count = count
        marked = any(isinstance(value, (Scatter, Broadcast)) for value in values)
        lists = all(isinstance(value, list) and len(cast(Any, value)) == count for value in values)
        self._by_list = by_list and not marked and lists

    def __call__(self, value: Any) -> Sequence[Any]:
        if isinstance(value, Scatter) and len(value) != self._count:
            raise GroupError(f"a Scatter of {len(value)} entries for {self._count} workers; give one for each")
        if isinstance(value, Scatter) or self._by_list:
            return self._shared(value)
        return self._shared([value.value if isinstance(value, Broadcast) else value] * self._count)

    def _shared(self, values: Sequence[Any]) -> list[Any]:
        uses = Counter(map(id, values))
        kept = {id(v): ray.put(v) for v in {id(v): v for v in values}.values() if uses[id(v)] > 1 and _is_large(v)}
        return [kept.get(id(value), value) for value in values]


def _is_large(value: Any) -> bool:
    from hocket.data import batches  # here: a worker process that only makes the class starts without torch

    return batches.nbytes(value) > _INLINE


class _RankZero:
    """What the functions of a dispatch mode see of a group when worker 0 alone is called: a group of one."""

    world_size = 1

    def __init__(self, group: RayWorkerGroup) -> None:
        self._group = group

    def dispatch_info(self, mesh_name: str) -> list[int]:
        return [0]

    def collect_info(self, mesh_name: str) -> list[bool]:
        return [True]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class GroupMethod:
    """One registered method, bound to a group: split the arguments, call, wait, join the results."""

    def __init__(self, group: RayWorkerGroup, role: str | None, method: str, noted: Mapping[str, Any]) -> None:
        self._group, self._method, self._blocking = group, method, noted["blocking"]
        mode = noted["dispatch_mode"]
        self._functions = dict(get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode)
        self._alone = Execute.RANK_ZERO is noted["execute_mode"] or Dispatch.RANK_ZERO is mode
        self._joins = getattr(self._functions["collect_fn"], "joins_rows", False)
        if self._alone and not self._joins and isinstance(mode, Dispatch):
            self._functions["dispatch_fn"] = dispatch_all_to_all  # worker 0 gets the arguments as they are
        self._sized = self._joins and not self._blocking
        self._senders = group.senders(role, method, sized=self._sized)[: 1 if self._alone else None]
        self._timeout: float | None = None

    def options(self, *, timeout: float) -> GroupMethod:
        """The same method with a deadline in seconds."""
        if not isinstance(cast(object, timeout), int | float) or timeout <= 0:
            raise GroupError(f"timeout is {timeout!r}; give seconds above 0")
        other = copy.copy(self)
        other._timeout = timeout
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group: Any = _RankZero(self._group) if self._alone else self._group
        split, named = self._functions["dispatch_fn"](group, *args, **kwargs)
        output = group._submit(self._senders, split, named, by_list=not self._alone)
        if self._blocking:
            output = group._gather(output, self._method, self._timeout)
        elif self._sized:
            output = [
                Block(pair[0], pair[1], who, self._method) if isinstance(pair, list) else pair
                for pair, who in zip(output, group._who, strict=False)
            ]
        result = self._functions["collect_fn"](group, output if self._joins or not self._alone else output[0])
        pads = [value.pad for value in (*split, *named.values()) if isinstance(value, Scatter) and value.pad[0]]
        return _without_padding(result, pads[0]) if self._joins and pads else result


def _without_padding(result: Any, pad: tuple[int, int]) -> Any:
    if isinstance(result, DataProtoFuture):
        return DataProtoFuture(result.collect_fn, result.futures, result.dispatch_fn, pad=pad)
    return result[: kept_rows(len(result), *pad)]


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """`ray.put` of each entry, by threads; references in order. GroupError for an empty list."""
    if not data_list:
        raise GroupError("found an empty list; give at least one value to put")
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as threads:
        return list(threads.map(ray.put, data_list))
