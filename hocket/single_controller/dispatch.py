"""A call on a group: how its arguments are split over N workers and sent, and how N results become one.

A dispatch function takes (group, *args, **kwargs) and gives (args, kwargs) in which a Scatter holds one entry per
worker and a Broadcast one value for all; a collect function takes (group, outputs).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import ray

from hocket.errors import BatchError, GroupError
from hocket.single_controller.decorator import Dispatch, Execute
from hocket.single_controller.future import Block, DataProtoFuture, future_of, kept_rows

_INLINE = 100 * 1024  # bytes: below, Ray sends an argument with the call; above, one copy in the store serves all

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Mode = Mapping[str, Function]


class Scatter(list[Any]):
    """One entry per worker. `pad` is (rows that the dispatch added at the end, rows with them)."""

    def __init__(self, values: Iterable[Any] = (), pad: tuple[int, int] = (0, 1)) -> None:
        super().__init__(values)
        self.pad = pad


class Broadcast(NamedTuple):
    """The same value for every worker, also when it is a list with one entry per worker."""

    value: Any


def _each(split: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    return tuple(map(split, args)), {key: split(value) for key, value in kwargs.items()}


def dispatch_one_to_all(group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Every argument to every worker."""
    return _each(Broadcast, args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """The arguments as they are; `execute_all` then scatters them if every one is a list of length N."""
    return args, kwargs


def dispatch_dp_compute(group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Each argument is a list or tuple with one entry per worker."""

    def scatter(value: Any) -> Scatter:
        found = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
        if found != f"{group.world_size} entries":
            raise GroupError(f"found {found}; DP_COMPUTE wants a list with one entry for each of {group.world_size}")
        return Scatter(value)

    return _each(scatter, args, kwargs)


def dispatch_dp_compute_data_proto(group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Each argument is a batch of rows, or a future of one: worker i gets block i of equal blocks."""
    return _blocks(range(group.world_size), args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Any, func: Any, *args: Any, **kwargs: Any) -> Arguments:
    """`func` to every worker, the rest as in DP_COMPUTE_PROTO."""
    if not callable(func):
        raise GroupError(f"the first argument is a {type(func).__name__}; it is to be a function of (worker, *chunks)")
    split, named = _blocks(range(group.world_size), args, kwargs)
    return (Broadcast(func), *split), named


def _blocks(ranks: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Cut all arguments, padded with copies of the last row if they ask for it; worker i gets block `ranks[i]`."""
    from hocket.data import batches  # here: a worker that gets no rows starts without torch

    def wants_padding(value: Any) -> bool:
        return hasattr(value, "is_padding_enabled") and value.is_padding_enabled()

    count, lengths = max(ranks) + 1, {len(value) for value in (*args, *kwargs.values()) if wants_padding(value)}
    if len(lengths) > 1:
        raise BatchError(f"arguments of one call have {sorted(lengths)} rows; padding needs them to agree")
    length = max(lengths, default=0)
    added = -length % count

    def cut(value: Any) -> Scatter:
        if isinstance(value, DataProtoFuture):  # the padding of the call before serves this one too
            parts, pad = value.chunk(count, padded=True), value.pad
        elif batches.is_batch(value):
            rows = value[[*range(length), *[length - 1] * added]] if added and wants_padding(value) else value
            parts, pad = batches.chunk(rows, count), (added, length + added) if added else (0, 1)
        else:
            raise BatchError(
                f"found an argument of type {type(value).__name__}; rows are split over workers from a DataProto, a "
                "future of one, a TensorDict or a registered batch type. Use ONE_TO_ALL for what all workers get"
            )
        return Scatter((parts[rank] for rank in ranks), pad)

    return _each(cut, args, kwargs)


def collect_all_to_all(group: Any, output: Any) -> Any:
    """The outputs as they are."""
    return output


def collect_rank_zero(group: Any, output: Any) -> Any:
    """The one output; of a reference, a future of it."""
    return future_of(output) if isinstance(output, ray.ObjectRef) else output


def collect_concat(group: Any, output: Sequence[Any]) -> Any:
    """The rows of all outputs in order; of references, a future of them."""
    from hocket.data import batches

    if output and isinstance(output[0], (Block, ray.ObjectRef)):
        return DataProtoFuture(batches.concat, output)
    if wrong := [i for i, value in enumerate(output) if not batches.is_batch(value)]:
        raise BatchError(
            f"rank {wrong[0]} returned {type(output[wrong[0]]).__name__}; this dispatch mode joins rows, so return a "
            "DataProto, or register the method with DP_COMPUTE_METRIC to get a list of what the workers return"
        )
    return batches.concat(list(output))


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """A mode for workers that form a mesh: one block per data-parallel rank, and results in the order of the dp ranks.

    Each worker says its dp rank and whether it hands back the result (`_register_dispatch_collect_info`).
    """

    def dispatch(group: Any, *args: Any, **kwargs: Any) -> Arguments:
        ranks = group.dispatch_info(mesh_name)
        if sorted(set(ranks)) != list(range(max(ranks) + 1)):
            raise GroupError(f"mesh {mesh_name!r} has the dp ranks {ranks}; they must count from 0 without a gap")
        return _blocks(ranks, args, kwargs)

    def collect(group: Any, output: Sequence[Any]) -> Any:
        ranks, flags = group.dispatch_info(mesh_name), group.collect_info(mesh_name)
        found = {dp: [i for i, rank in enumerate(ranks) if rank == dp and flags[i]] for dp in range(max(ranks) + 1)}
        if bad := {dp: workers for dp, workers in found.items() if len(workers) != 1}:
            wanted = "needs one worker with is_collect=True for each dp rank"
            raise GroupError(f"mesh {mesh_name!r} {wanted}; found dp rank -> workers {bad}")
        return collect_concat(group, [output[rank] for (rank,) in found.values()])

    collect.joins_rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return {"dispatch_fn": dispatch, "collect_fn": collect}


def _direct(group: Any, *args: Any, **kwargs: Any) -> Any:
    raise GroupError("this method is called on the handle of one worker, as group.workers[i].<method>.remote(...)")


collect_concat.joins_rows = True  # pyright: ignore[reportFunctionMemberAccess]  of references it needs the row counts

DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, Mode] = {
    mode: {"dispatch_fn": dispatch, "collect_fn": collect}
    for mode, dispatch, collect in (
        (Dispatch.RANK_ZERO, dispatch_all_to_all, collect_rank_zero),
        (Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all_to_all),
        (Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.DP_COMPUTE, dispatch_dp_compute, collect_all_to_all),
        (Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_concat),
        (Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, dispatch_dp_compute_data_proto_with_func, collect_concat),
        (Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_all_to_all),
        (Dispatch.DIRECT_ROLLOUT_METHOD, _direct, _direct),
    )
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> Mode:
    """The two functions of a mode; GroupError when it has none."""
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise GroupError(f"{dispatch_mode} has no functions here; register_dispatch_mode it in this process first")
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: Function, collect_fn: Function) -> None:
    """Add a mode; afterwards it is `Dispatch.<NAME>`. GroupError when the name is taken."""
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = {}
    update_dispatch_mode(Dispatch[dispatch_mode_name], dispatch_fn, collect_fn)


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: Function, collect_fn: Function) -> None:
    """Replace the functions of a mode that exists."""
    get_predefined_dispatch_fn(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def spread(count: int, args: Sequence[Any], kwargs: Mapping[str, Any], *, by_list: bool) -> Iterator[Arguments]:
    """What each of `count` workers gets; with `by_list`, arguments that all are lists of that length are scattered."""
    values = [*args, *kwargs.values()]
    lists = [value for value in values if isinstance(value, list) and not isinstance(value, Scatter)]
    if by_list and len(lists) == len(values) and all(len(cast(Any, value)) == count for value in lists):
        values = [Scatter(cast(Any, value)) for value in lists]
    columns = [_column(value, count) for value in values]
    for i in range(count):
        row = [column[i] for column in columns]
        yield tuple(row[: len(args)]), dict(zip(kwargs, row[len(args) :], strict=True))


def _column(value: Any, count: int) -> Sequence[Any]:
    """The value for each worker; what is large and goes to several is put into the store once."""
    if isinstance(value, Scatter) and len(value) != count:
        raise GroupError(f"a Scatter of {len(value)} entries for {count} workers; give one for each")
    shared = [value.value if isinstance(value, Broadcast) else value] * count
    column = value if isinstance(value, Scatter) else shared
    uses = Counter(map(id, column))
    several = {id(one): one for one in column if uses[id(one)] > 1}
    kept = {key: ray.put(one) for key, one in several.items() if _is_large(one)}
    return [kept.get(id(one), one) for one in column]


def _is_large(value: Any) -> bool:
    from hocket.data import batches  # here: a worker process that only makes the class starts without torch

    return batches.nbytes(value) > _INLINE


class GroupMethod:
    """One registered method, bound to a group: split the arguments, call, wait, join the results."""

    def __init__(self, group: Any, method: str, noted: Mapping[str, Any]) -> None:
        mode, self._method, self._blocking = noted["dispatch_mode"], method, noted["blocking"]
        functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
        self._dispatch, self._collect = functions["dispatch_fn"], functions["collect_fn"]
        self._alone = noted["execute_mode"] is Execute.RANK_ZERO or mode is Dispatch.RANK_ZERO
        self._joins = getattr(self._collect, "joins_rows", False)
        if self._alone and not self._joins and isinstance(mode, Dispatch):
            self._dispatch = dispatch_all_to_all  # worker 0 gets the arguments as they are
        self._group = group._rank_zero() if self._alone else group
        self._senders = self._group._senders(method, sized=self._joins and not self._blocking)
        self._timeout: float | None = None

    def options(self, *, timeout: float) -> GroupMethod:
        """The same method with a deadline in seconds."""
        if not isinstance(cast(object, timeout), int | float) or timeout <= 0:
            raise GroupError(f"timeout is {timeout!r}; give seconds above 0")
        other = copy.copy(self)
        other._timeout = timeout
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        split, named = self._dispatch(self._group, *args, **kwargs)
        output = self._group._submit(self._senders, split, named)
        if self._blocking:
            output = self._group._gather(output, self._method, self._timeout)
        elif self._joins:
            who = zip(output, self._group._who, strict=True)
            output = [Block(one[0], one[1], name, self._method) if isinstance(one, list) else one for one, name in who]
        result = self._collect(self._group, output if self._joins or not self._alone else output[0])
        pads = [value.pad for value in (*split, *named.values()) if isinstance(value, Scatter) and value.pad[0]]
        if not (pads and self._joins):
            return result
        if not isinstance(result, DataProtoFuture):
            return result[: kept_rows(len(result), *pads[0])]
        result.pad = pads[0]
        return result


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """`ray.put` of each entry, by threads; references in order. GroupError for an empty list."""
    if not data_list:
        raise GroupError("found an empty list; give at least one value to put")
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as threads:
        return list(threads.map(ray.put, data_list))
