"""`register` says how a call on a group of workers splits its arguments and joins its results."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, cast

import ray

from hocket.errors import GroupError
from hocket.single_controller.future import materialize

MAGIC_ATTR = "__hocket_registered__"
F = TypeVar("F", bound=Callable[..., Any])


class _Growing(type):
    """Members by name in any case, on the class itself: iteration, `in`, `[name]`; numbers are not given twice."""

    members: dict[str, Any]

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        cls.members, cls.numbers = {}, itertools.count()
        for member in inspect.get_annotations(cls):
            cls.register(member)

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.members.values())

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, item: object) -> bool:
        return item in cls.members.values() or (isinstance(item, str) and item.upper() in cls.members)

    def __getitem__(cls, name: str) -> Any:
        return cls.members[name.upper()]

    def register(cls, name: str) -> Any:
        """Add a member; GroupError when the name is taken."""
        if name in cls:
            raise GroupError(f"{cls.__name__}.{name.upper()} exists already; choose another name")
        member = cls.members[name.upper()] = cls(name.upper(), next(cls.numbers))
        setattr(cls, member.name, member)
        return member

    def remove(cls, name: str) -> Any:
        """Take a member out and return it."""
        delattr(cls, name.upper())
        return cls.members.pop(name.upper())

    def from_name(cls, name: str) -> Any:
        """The member of that name, or None."""
        return cls.members.get(name.upper())

    def names(cls) -> list[str]:
        """Names of all members, in order."""
        return list(cls.members)

    def values(cls) -> list[int]:
        """Numbers of all members, in order."""
        return [member.value for member in cls]


class DynamicEnum(metaclass=_Growing):
    """An enumeration that can grow. Members are pickled by name, so that identity survives the way to a worker."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (type(self), self.name)


def _member(cls: type[DynamicEnum], name: str) -> Any:
    # a worker needs the name of a mode that only the driver has registered, not its functions
    return cls[name] if name in cls else cls.register(name)


class Dispatch(DynamicEnum):
    """How arguments reach the workers of a group and what comes back; the table is in docs/worker-groups.md."""

    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]
    DIRECT_ROLLOUT_METHOD: ClassVar[Dispatch]


class Execute(DynamicEnum):
    """Which workers run a call: ALL, or RANK_ZERO, which then gets the arguments whole."""

    ALL: ClassVar[Execute]
    RANK_ZERO: ClassVar[Execute]


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Make a Worker method, sync or async, callable on a whole group.

    `dispatch_mode` is a member of Dispatch or a dict of `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)` and
    `collect_fn(group, outputs)`; GroupError for others. With `blocking=False` the call returns futures at once. In
    the worker, futures among the arguments (also in lists) are fetched before the body runs.
    """
    mode, execute = cast(Any, dispatch_mode), cast(Any, execute_mode)
    if not isinstance(mode, Dispatch) and not (isinstance(mode, Mapping) and {"dispatch_fn", "collect_fn"} <= {*mode}):
        members = f"Dispatch.<one of {Dispatch.names()}>"
        raise GroupError(f"dispatch_mode is {mode!r}; give {members}, or a dict of dispatch_fn and collect_fn")
    if not isinstance(execute, Execute):
        raise GroupError(f"execute_mode is {execute!r}; give Execute.<one of {Execute.names()}>")
    noted = {"dispatch_mode": mode, "execute_mode": execute, "blocking": blocking}

    def decorate(method: F) -> F:
        def fetch(args: Any, kwargs: Any) -> tuple[Any, Any]:
            if not materialize_futures:
                return args, kwargs
            return tuple(map(materialize, args)), {key: materialize(value) for key, value in kwargs.items()}

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = fetch(args, kwargs)
            return method(*args, **kwargs)

        @functools.wraps(method)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = await asyncio.to_thread(fetch, args, kwargs)  # beside the loop, which goes on meanwhile
            return await method(*args, **kwargs)

        wrapper = call_async if inspect.iscoroutinefunction(method) else call
        setattr(wrapper, MAGIC_ATTR, noted)
        return cast(F, wrapper)

    return decorate


def concurrency(group: str, *, num_returns: int = 1) -> Callable[[F], F]:
    """`ray.method`, typed: run the method on the threads of `group` where its class was given such groups."""
    return cast(Any, ray.method)(concurrency_group=group, num_returns=num_returns)


def registered_methods(cls: type) -> dict[str, dict[str, Any]]:
    """The registered methods of a worker class, inherited ones included, and what `register` noted on each."""
    found = {name: getattr(inspect.getattr_static(cls, name), MAGIC_ATTR, None) for name in dir(cls)}
    return {name: info for name, info in found.items() if info is not None}
