"""The dispatch modes: how the arguments of a call are split over N workers, and how N results become one.

A dispatch function takes (group, *args, **kwargs) and gives (args, kwargs) in which a Scatter holds one entry per
worker and a Broadcast one value for all; a collect function takes (group, outputs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import ray

from hocket.errors import BatchError, GroupError
from hocket.single_controller.decorator import Dispatch
from hocket.single_controller.future import Block, DataProtoFuture, future_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Mode = Mapping[str, Callable[..., Any]]


class Scatter(list[Any]):
    """One entry per worker. `pad` is (rows that the dispatch added at the end, rows with them)."""

    pad: tuple[int, int] = (0, 1)


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
        if not isinstance(value, (list, tuple)) or len(cast(Any, value)) != group.world_size:
            found = f"{len(cast(Any, value))} entries" if isinstance(value, (list, tuple)) else type(value).__name__
            raise GroupError(f"found {found}; DP_COMPUTE wants a list with one entry for each of {group.world_size}")
        return Scatter(cast(Any, value))

    return _each(scatter, args, kwargs)


def dispatch_dp_compute_data_proto(group: Any, *args: Any, **kwargs: Any) -> Arguments:
    """Each argument is a batch of rows, or a future of one: worker i gets block i of equal blocks."""
    return _blocks(group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Any, func: Any, *args: Any, **kwargs: Any) -> Arguments:
    """`func` to every worker, the rest as in DP_COMPUTE_PROTO."""
    if not callable(func):
        raise GroupError(f"the first argument is a {type(func).__name__}; it is to be a function of (worker, *chunks)")
    split, named = _blocks(group.world_size, args, kwargs)
    return (Broadcast(func), *split), named


def _blocks(count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Cut all arguments into `count` blocks; of those that ask for padding, copies that repeat the last row are cut."""
    from hocket.data import batches  # here: a worker that gets no rows starts without torch

    padded = [value for value in (*args, *kwargs.values()) if _wants_padding(value)]
    lengths = {len(value) for value in padded}
    if len(lengths) > 1:
        raise BatchError(f"arguments of one call have {sorted(lengths)} rows; padding needs them to agree")
    length = next(iter(lengths), 0)
    pad = -length % count

    def cut(value: Any) -> Scatter:
        if isinstance(value, DataProtoFuture):
            chunks = Scatter(value.chunk(count, padded=True))  # the padding of the call before serves this one too
            chunks.pad = value.pad
            return chunks
        if not batches.is_batch(value):
            raise BatchError(
                f"found an argument of type {type(value).__name__}; rows are split over workers from a DataProto, a "
                "future of one, a TensorDict or a registered batch type. Use ONE_TO_ALL for what all workers get"
            )
        if pad and _wants_padding(value):
            value = value[[*range(length), *[length - 1] * pad]]
        blocks = Scatter(batches.chunk(value, count))
        blocks.pad = (pad, length + pad) if pad else (0, 1)
        return blocks

    return _each(cut, args, kwargs)


def _wants_padding(value: Any) -> bool:
    return hasattr(value, "is_padding_enabled") and value.is_padding_enabled()


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


collect_concat.joins_rows = True  # pyright: ignore[reportFunctionMemberAccess]  of references it needs the row counts


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """A mode for workers that form a mesh: one block per data-parallel rank, shared by the ranks that split a model.

    The workers say their dp rank and whether they hand back its result (`_register_dispatch_collect_info`).
    Results come in the order of the dp ranks.
    """

    def dispatch(group: Any, *args: Any, **kwargs: Any) -> Arguments:
        ranks = group.dispatch_info(mesh_name)
        if sorted(set(ranks)) != list(range(max(ranks) + 1)):
            raise GroupError(f"mesh {mesh_name!r} has the dp ranks {ranks}; they must count from 0 without a gap")

        def for_workers(blocks: Scatter) -> Scatter:
            shared = Scatter(blocks[rank] for rank in ranks)
            shared.pad = blocks.pad
            return shared

        return _each(for_workers, *_blocks(max(ranks) + 1, args, kwargs))

    def collect(group: Any, output: Sequence[Any]) -> Any:
        return collect_concat(group, [output[rank] for rank in _collectors(group, mesh_name)])

    collect.joins_rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return {"dispatch_fn": dispatch, "collect_fn": collect}


def _collectors(group: Any, mesh: str) -> list[int]:
    """The rank that hands back the result of each dp rank, in the order of the dp ranks."""
    ranks = cast(list[int], group.dispatch_info(mesh))
    flags = group.collect_info(mesh)
    found = {dp: [i for i, rank in enumerate(ranks) if rank == dp and flags[i]] for dp in range(max(ranks) + 1)}
    if bad := {dp: workers for dp, workers in found.items() if len(workers) != 1}:
        raise GroupError(
            f"mesh {mesh!r} needs one worker with is_collect=True for each dp rank; found dp rank -> workers {bad}"
        )
    return [workers[0] for workers in found.values()]


def _direct(group: Any, *args: Any, **kwargs: Any) -> Any:
    raise GroupError("this method is called on the handle of one worker, as group.workers[i].<method>.remote(...)")


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


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Add a mode; afterwards it is `Dispatch.<NAME>`. GroupError when the name is taken."""
    mode = Dispatch.register(dispatch_mode_name)
    DISPATCH_MODE_FN_REGISTRY[mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode that exists."""
    get_predefined_dispatch_fn(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
