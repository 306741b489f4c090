"""Results that stay with the workers: futures that go from group to group, in chunks, padded, or failed."""

import asyncio
import sys
import threading
from collections import defaultdict

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.data.batches import concat
from hocket.data.proto import DataProto
from hocket.errors import BatchError, HocketError, WorkerDied
from hocket.single_controller import (
    DataProtoFuture,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    parallel_put,
    register,
)
from hocket.single_controller.future import Block

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests
LONG = 60  # seconds; a wait that nobody ends fails then


def rows(n, **options):
    return DataProto.from_dict({"x": torch.arange(n)}, **options)


def x(data):
    return data.tensor("x").tolist()


def mark(worker, data, other=None):
    x = data.tensor("x")  # not `batch`: workers that need no TensorDict start sooner
    x += 100 * (worker.rank + 1) + (0 if other is None else other.tensor("x"))
    return data


class Rows(Worker):
    """Makes rows that others take."""

    def __init__(self):
        super().__init__()
        self.opened = defaultdict(threading.Event)

    add = register(Dispatch.DP_COMPUTE_PROTO, blocking=False)(mark)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def wait_and_add(self, data):
        assert self.opened["add"].wait(LONG)
        return mark(self, data)

    async def gated(self, name, start, stop):
        """Rows that are not there before somebody opens `name`."""
        assert await asyncio.to_thread(self.opened[name].wait, LONG)
        return rows(stop)[start:]

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def ragged(self, data):
        """As many copies of each row as its number says."""
        return data.sample_level_repeat(data.tensor("x"))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fails(self, data):
        raise ValueError("no rows today")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def none(self, data):
        return None

    @register(Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def took(self, data):
        return data.tensor("x").tolist()

    @register(Dispatch.ONE_TO_ALL)
    def all_of_it(self, futures):
        return [future.tensor("x").tolist() for future in futures]

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def untouched(self, future):
        return type(future).__name__, future.get(timeout=LONG).tensor("x").tolist()

    @register(Dispatch.ONE_TO_ALL)
    async def open(self, name):
        self.opened[name].set()


@pytest.fixture(scope="module")
def pool(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([2]) as pool:
        yield pool
    ray.shutdown()


@pytest.fixture(scope="module")
def makers(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Rows), call_timeout=2 * LONG)


@pytest.fixture(scope="module")
def takers(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Rows), call_timeout=2 * LONG)


def test_a_future_goes_from_group_to_group_before_it_is_there(makers, takers):
    """V43: the second and third call are sent while the first has not even run."""
    once = makers.wait_and_add(rows(4))
    twice = takers.add(once)
    thrice = makers.add(twice, other=once)
    assert ray.wait(twice.refs, num_returns=2, timeout=0)[0] == []
    makers.open("add")
    assert [x(future.get(timeout=LONG)) for future in (once, twice, thrice)] == [
        *([100, 101, 202, 203], [200, 201, 402, 403], [400, 402, 804, 806])
    ]


def test_get_with_a_timeout(makers):
    ref = makers.execute_rank_zero_async("gated", "timeout", 0, 2)
    block = DataProtoFuture(concat, [Block(ref, ray.put(2))])
    for waiting in (block, block.chunk(2)[0], DataProtoFuture(concat, [ref])):
        with pytest.raises(WorkerDied, match=r"did not answer within 0\.05 s"):
            waiting.get(timeout=0.05)
    makers.open("timeout")
    assert x(block.get(timeout=LONG)) == [0, 1]


@pytest.mark.parametrize(("there", "total"), [(6, 8), (4, 8), (5, 6)], ids=["6 and 2", "4 and 4", "5 and 1"])
def test_a_receiver_fetches_only_the_blocks_with_its_rows(makers, takers, there, total):
    """D21, old trap: every receiver pulled the whole batch. Here the second block is not there, and rank 0 goes on."""
    name = f"{there} of {total}"
    missing = Block(makers.execute_rank_zero("gated", name, there, total), ray.put(total - there))
    future = DataProtoFuture(concat, [Block(ray.put(rows(there)), ray.put(there)), missing])
    first, second = takers.took(future)
    assert ray.get(first, timeout=LONG) == list(range(total // 2))
    assert ray.wait([second], timeout=0.05)[0] == []
    makers.open(name)
    assert ray.get(second, timeout=LONG) == list(range(total // 2, total))


@st.composite
def blocks_and_chunks(draw):
    """Sizes of blocks, and numbers of chunks of chunks that divide their sum."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    divisors = [n for n in range(1, 13) if sum(sizes) % n == 0]
    outer = draw(st.sampled_from(divisors))
    inner = draw(st.sampled_from([n for n in divisors if sum(sizes) % (outer * n) == 0]))
    return sizes, outer, inner


@settings(deadline=None, max_examples=25)
@given(blocks_and_chunks(), st.booleans())
def test_chunks_of_a_future_are_its_rows_in_order(pool, layout, known):
    """With and without the numbers of rows known; a chunk of a chunk is a chunk."""
    sizes, outer, inner = layout
    parts = [rows(sum(sizes))[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]
    refs = [Block(*parallel_put([part, len(part)])) if known else ray.put(part) for part in parts]
    future = DataProtoFuture(concat, refs)
    pieces = [small.get(timeout=LONG) for big in future.chunk(outer) for small in big.chunk(inner)]
    assert {len(piece) for piece in pieces} == {sum(sizes) // (outer * inner)}
    assert [value for piece in pieces for value in x(piece)] == x(future.get()) == list(range(sum(sizes)))


def test_unequal_blocks_are_cut_at_the_right_rows(makers, takers):
    future = makers.ragged(rows(4))  # 0 + 1 copies from one worker, 2 + 3 from the other
    assert ray.get(takers.took(future), timeout=LONG) == [[1, 2, 2], [3, 3, 3]]


def test_rows_that_do_not_divide_among_the_receivers(makers, takers):
    odd = makers.add(rows(3, auto_padding=True))
    with pytest.raises(BatchError, match=r"cannot split 3 rows of a future into 2 equal parts"):
        odd.chunk(2)[0].get(timeout=LONG)
    # but the padding of the first call serves the second, and is left out at the end
    assert x(takers.add(odd).get(timeout=LONG)) == x(takers.add(odd.get()).get(timeout=LONG))


@pytest.mark.parametrize("length", range(6))
def test_padding_is_left_out_of_futures_and_of_what_is_made_of_them(makers, length):
    """D4, old trap: the rows that padding had added came back with blocking=False."""
    future = makers.add(rows(length, auto_padding=True))
    half = -(-length // 2)
    assert x(future.get(timeout=LONG)) == [i + 100 * (1 + i // max(half, 1)) for i in range(length)]
    if length:
        parts = [part.get(timeout=LONG) for part in future.chunk(length)]
        assert [len(part) for part in parts] == [1] * length


def test_futures_in_lists_and_futures_that_the_method_wants_itself(makers, takers):
    first, second = makers.add(rows(2)), makers.add(rows(4))
    assert takers.all_of_it([first, second, first]) == [[[100, 201], [100, 101, 202, 203], [100, 201]]] * 2
    assert takers.untouched(first) == [("DataProtoFuture", [100, 201])] * 2


def test_a_future_tells_what_its_worker_raised(makers, takers):
    with pytest.raises(ValueError, match="no rows today"):
        makers.fails(rows(2)).get(timeout=LONG)
    with pytest.raises(ValueError, match=r"rank 0 of Rows.*rank 0 of Rows.*fails: ValueError: no rows today"):
        takers.add(makers.fails(rows(2))).get(timeout=LONG)


def test_a_future_of_what_has_no_rows_says_so(makers):
    with pytest.raises(BatchError, match=r"none returned NoneType; .*return a DataProto"):
        makers.none(rows(2)).get(timeout=LONG)


def test_what_a_future_gives_is_private(makers):
    future = makers.add(rows(4))
    first = future.get(timeout=LONG)
    first.tensor("x").add_(1)
    assert x(future.get(timeout=LONG)) == [100, 101, 202, 203]


def test_actors_that_other_code_has_made_give_futures_too(pool):
    handle = ray.remote(num_cpus=0)(Rows).remote()
    group = RayWorkerGroup.from_detached(
        worker_handles=[handle], ray_cls_with_init=RayClassWithInitArgs(Rows), watch=False
    )
    future = group.add(rows(2))
    assert x(future.get(timeout=LONG)) == [100, 101]
    assert [x(part.get(timeout=LONG)) for part in future.chunk(2)] == [[100], [101]]


def test_puts_by_threads_keep_their_order(pool):
    assert ray.get(parallel_put(list(range(20)), max_workers=3)) == list(range(20))
    with pytest.raises(HocketError, match="empty list"):
        parallel_put([])
