"""`register` says how a call on a group of workers splits its arguments and joins its results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar, cast

import ray

from hocket.single_controller.future import materialize

MAGIC_ATTR = "__hocket_registered__"
F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """How arguments reach the workers of a group and what comes back.

    ONE_TO_ALL: every worker gets the same arguments; a list of all results comes back.
    DP_COMPUTE_PROTO: each argument is a DataProto, cut into one block of rows per worker; results are joined.
    RANK_ZERO: only worker 0 is called; its result comes back.
    """

    ONE_TO_ALL = "one_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"
    RANK_ZERO = "rank_zero"


class Registered(NamedTuple):
    """What `register` notes on a method."""

    dispatch_mode: Dispatch
    blocking: bool


def register(dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, *, blocking: bool = True) -> Callable[[F], F]:
    """Make a Worker method callable on a whole group.

    With `blocking=False` the call returns futures at once. Inside the worker, arguments that are futures
    (or lists of them) are replaced by what they stand for before the body runs.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*map(materialize, args), **{k: materialize(v) for k, v in kwargs.items()})

        setattr(call, MAGIC_ATTR, Registered(dispatch_mode, blocking))
        return cast(F, call)

    return decorate


def concurrency(group: str, *, num_returns: int = 1) -> Callable[[F], F]:
    """Run the method on the threads of `group` when its class is made an actor with such groups.

    It is `ray.method` with the type of the method kept. In a WorkerDict, which has no groups, it does nothing.
    """

    def decorate(method: F) -> F:
        return cast(F, cast(Any, ray.method)(concurrency_group=group, num_returns=num_returns)(method))

    return decorate


def registered_methods(cls: type) -> dict[str, Registered]:
    """The registered methods of a worker class, inherited ones included."""
    found = {name: getattr(getattr(cls, name, None), MAGIC_ATTR, None) for name in dir(cls)}
    return {name: info for name, info in found.items() if info is not None}
