"""`register` and the enumerations that can grow. No Ray process."""

import asyncio
import inspect
import pickle
import threading

import cloudpickle
import pytest

from hocket.errors import GroupError
from hocket.single_controller import (
    DataProtoFuture,
    Dispatch,
    Execute,
    Worker,
    get_predefined_dispatch_fn,
    register,
)
from hocket.single_controller.decorator import MAGIC_ATTR, DynamicEnum, concurrency, registered_methods


class Ready(DataProtoFuture):
    """A future of a value that is there; `asked` is set when somebody fetches it, who then waits for `given`."""

    def __init__(self, value, *, given=True):
        super().__init__(None, [])
        self.value, self.asked, self.given = value, threading.Event(), threading.Event()
        if given:
            self.given.set()

    def get(self, timeout=None):
        self.asked.set()
        assert self.given.wait(5), "the event loop stood still while an argument was fetched"
        return self.value


class Colour(DynamicEnum):
    """An enumeration of the tests."""


@pytest.fixture
def colour():
    """`Colour` with two members, emptied afterwards."""
    Colour.register("red"), Colour.register("Green")
    yield Colour
    for name in Colour.names():
        Colour.remove(name)


# -- enumerations ---------------------------------------------------------------------------------------------------


def test_members_are_found_by_name_in_any_case_and_by_iteration(colour):
    assert colour.RED is colour["RED"] is colour.from_name("red")
    assert colour.from_name("blue") is None
    assert list(colour) == [colour.RED, colour.GREEN]
    assert colour.names() == ["RED", "GREEN"]
    assert len(colour) == 2
    assert "red" in colour
    assert colour.GREEN in colour
    assert "blue" not in colour
    assert Dispatch.ONE_TO_ALL not in colour
    assert repr(colour.RED) == "Colour.RED"
    assert colour.RED.name == "RED"


def test_numbers_grow_and_are_not_given_twice(colour):
    red, green = colour.values()
    assert green == red + 1
    assert colour.remove("green").name == "GREEN"
    assert not hasattr(colour, "GREEN")
    assert "green" not in colour
    assert colour.register("blue").value == green + 1


def test_a_name_is_registered_once(colour):
    with pytest.raises(ValueError, match=r"Colour.RED exists already"):
        colour.register("RED")
    assert colour.names() == ["RED", "GREEN"]


def test_enumerations_do_not_share_members(colour):
    assert set(Execute.names()) == {"ALL", "RANK_ZERO"}
    assert Execute.RANK_ZERO is not Dispatch.RANK_ZERO
    assert {"ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC"} < set(
        Dispatch.names()
    )


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps])
def test_members_and_their_class_are_pickled_by_reference(dump):
    for value in (Dispatch, Execute, *Dispatch, *Execute):
        assert pickle.loads(dump(value)) is value


def test_a_grown_member_keeps_its_identity_and_arrives_by_name_where_it_is_new():
    """Old trap (spec 1.1): a mode that only the driver had registered could not be unpickled in a worker."""
    sent = pickle.dumps(Dispatch.register("of_one_test"))
    try:
        assert pickle.loads(sent) is Dispatch.OF_ONE_TEST
        Dispatch.remove("of_one_test")  # as if in another process
        assert pickle.loads(sent) is pickle.loads(sent) is Dispatch.OF_ONE_TEST
        with pytest.raises(GroupError, match=r"Dispatch.OF_ONE_TEST has no functions here"):
            get_predefined_dispatch_fn(Dispatch.OF_ONE_TEST)
    finally:
        Dispatch.remove("of_one_test")


# -- register -------------------------------------------------------------------------------------------------------


class Base(Worker):
    """Registered in several ways; one of its properties must not be looked at."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def split(self, data, scale=1):
        """Split it."""
        return data, scale

    @register()
    async def plain_async(self, data, *, scale=1):
        return data, scale

    @register(materialize_futures=False)
    def raw(self, data):
        return data

    @property
    def trap(self):
        raise RuntimeError("a property is not a method")

    def unregistered(self):
        pass


class Child(Base):
    """Inherits; one method is replaced by one that is not registered."""

    def raw(self, data):
        return data


def call(method, *args, **kwargs):
    """The method on an object that skipped its constructor."""
    return getattr(object.__new__(Base), method)(*args, **kwargs)


def test_metadata_is_readable_on_the_class():
    assert getattr(Base.split, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.DP_COMPUTE_PROTO,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
    }
    assert getattr(Base.plain_async, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.ALL_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
    }


def test_a_registered_method_keeps_its_name_text_signature_and_kind():
    assert (Base.split.__name__, Base.split.__doc__) == ("split", "Split it.")
    assert list(inspect.signature(Base.split).parameters) == ["self", "data", "scale"]
    assert inspect.iscoroutinefunction(Base.plain_async)
    assert not inspect.iscoroutinefunction(Base.split)


def test_called_in_its_process_it_is_an_ordinary_method():
    assert call("split", 3, scale=2) == (3, 2)
    assert asyncio.run(call("plain_async", 3, scale=2)) == (3, 2)


def test_registered_methods_are_found_with_the_inherited_ones():
    own = {"split", "plain_async", "raw"}
    inherited = {
        *("_query_dispatch_info", "_query_collect_info"),
        *("execute_with_func_generator", "execute_func_rank_zero"),
    }
    assert set(registered_methods(Base)) == own | inherited
    assert set(registered_methods(Child)) == own - {"raw"} | inherited
    assert not hasattr(Base.unregistered, MAGIC_ATTR)


@pytest.mark.parametrize("method", ["split", "plain_async"])
def test_futures_are_fetched_also_as_keywords_and_in_lists(method):
    result = call(method, Ready("rows"), scale=[Ready(1), 2])
    assert (asyncio.run(result) if method == "plain_async" else result) == ("rows", [1, 2])


def test_futures_stay_where_the_method_wants_them_itself():
    future = Ready("rows")
    assert call("raw", future) is future


@pytest.mark.parametrize("by", ["position", "keyword", "list"])
def test_an_async_method_fetches_beside_the_event_loop(by):
    """Old trap (spec 1.2): fetching a future blocked the event loop, and with it every other call of the actor."""
    future = Ready("rows", given=False)
    args, kwargs = {"position": ((future,), {}), "keyword": ((), {"data": future}), "list": (([future],), {})}[by]

    async def both():
        waiting = asyncio.ensure_future(call("plain_async", *args, **kwargs))
        while not future.asked.is_set():
            await asyncio.sleep(0.001)
        future.given.set()  # only a loop that goes on comes here
        return await waiting

    assert asyncio.run(both()) == (["rows"] if by == "list" else "rows", 1)


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", Execute.ALL, 3, {"dispatch_fn": len}, {"collect_fn": len}])
def test_a_mode_that_is_none_is_refused_when_the_method_is_decorated(mode):
    with pytest.raises(AssertionError, match=r"dispatch_mode is .*give Dispatch\.<one of"):
        register(dispatch_mode=mode)


@pytest.mark.parametrize("mode", [Dispatch.RANK_ZERO, "RANK_ZERO", "FIRST", 0])
def test_an_execute_mode_that_is_none_is_refused(mode):
    with pytest.raises(AssertionError, match=r"execute_mode is .*give Execute\.<one of"):
        register(execute_mode=mode)


def test_a_dict_is_a_mode():
    mode = {"dispatch_fn": lambda group, *args, **kwargs: (args, kwargs), "collect_fn": lambda group, output: output}
    assert getattr(register(mode)(lambda self: None), MAGIC_ATTR)["dispatch_mode"] == mode


def test_a_concurrency_group_is_noted_through_register():
    """Old trap (facts): the attribute was lost on the way to the bound class, and calls were serialised silently."""

    class Receiver(Worker):
        @register(Dispatch.ONE_TO_ALL)
        @concurrency("receive")
        def inner(self):
            return 1

        @concurrency("receive")
        @register(Dispatch.ONE_TO_ALL)
        def outer(self):
            return 2

    for method in (Receiver.inner, Receiver.outer):
        assert method.__ray_concurrency_group__ == "receive"
        assert hasattr(method, MAGIC_ATTR)
    assert object.__new__(Receiver).inner() + object.__new__(Receiver).outer() == 3
