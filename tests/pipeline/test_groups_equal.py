"""Any program of registered calls gives the same in separate groups, in a WorkerDict and in a fused class."""

import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import ray
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hocket.data.proto import DataProto
from hocket.errors import BatchError
from hocket.single_controller import (
    DataProtoFuture,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests
LONG = 60  # seconds


class Role(Worker):
    """A few small methods over one number of its own, which each call changes."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self._register_dispatch_collect_info("turned", dp_rank=1 - self.rank, is_collect=True)
        self.reset()

    @register(Dispatch.ONE_TO_ALL)
    def reset(self):
        self.total = self.rank

    @register(Dispatch.ONE_TO_ALL)
    def count(self, n):
        """State that later calls depend on."""
        self.total += n * self.step
        return self.total

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data, other=None):
        """Changes its input in place."""
        x = data.tensor("x")  # not `batch`: workers that need no TensorDict start sooner
        x *= self.step
        x += self.total if other is None else other.tensor("x")
        data.non_tensor_batch["n"] += 1
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, data, other=None):
        return type(self).scale.__wrapped__(self, data, other)

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def shift(self, data):
        """Async."""
        data.tensor("x").add_(1000 * self.step)
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def shift_later(self, data):
        return await type(self).shift.__wrapped__(self, data)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def twice(self, data):
        """More rows than it got."""
        return data.repeat(2)

    @register(make_nd_compute_dataproto_dispatch_fn("turned"))
    def turned(self, data):
        data.tensor("x").add_(self.rank)
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def measure(self, data):
        return len(data), data.tensor("x").sum().item()


BATCHES = ["scale", "scale_later", "shift", "shift_later", "twice", "turned", "measure"]


@dataclass(frozen=True)
class Call:
    """`source` is a number of rows to make, or which of the batches that came back before is passed on."""

    role: str
    method: str
    source: tuple[str, int]
    padding: bool = False
    other: bool = False


sources = st.tuples(st.sampled_from(["new", "new", "earlier"]), st.integers(0, 9))
counting = st.builds(Call, st.sampled_from(["left", "right"]), st.just("count"), sources)
calls = st.builds(
    Call, st.sampled_from(["left", "right"]), st.sampled_from(BATCHES), sources, st.booleans(), st.booleans()
)
programs = st.lists(calls | counting, min_size=1, max_size=6)


def roles():
    return {"left": RayClassWithInitArgs(Role, step=2), "right": RayClassWithInitArgs(Role, 3)}


@pytest.fixture(scope="module")
def layouts(ray_address):
    """Three ways to place two roles on two workers each: role -> group."""
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([2]) as pool:
        bound = RayWorkerGroup(pool, create_colocated_worker_cls(roles()), call_timeout=LONG)
        fused = RayWorkerGroup(pool, create_colocated_worker_cls_fused(roles()), call_timeout=LONG)
        fused.fuse({"left", "right"})
        yield {
            "separate": {role: RayWorkerGroup(pool, spec, call_timeout=LONG) for role, spec in roles().items()},
            "WorkerDict": bound.spawn({"left", "right"}),
            "fused": {"left": fused.left, "right": fused.right},
        }
    ray.shutdown()


def make(rows, padding):
    return DataProto.from_dict({"x": torch.arange(rows)}, {"n": np.arange(rows)}, auto_padding=padding)


def content(data):
    return data.tensor("x").tolist(), data.non_tensor_batch["n"].tolist()


def reason(error):
    """Why rows could not be split, without the names of ranks and classes, which differ."""
    return re.search(r"cannot split \d+ rows.*? into \d+ equal parts", str(error)).group()


def outcome(result):
    """What came of a call, in plain values."""
    if isinstance(result, DataProtoFuture):
        try:
            result = result.get(timeout=LONG)
        except BatchError as error:  # a worker says it
            return reason(error)
    return content(result) if isinstance(result, DataProto) else result


def run(groups, program):
    """The outcomes of all calls; what is later is looked at when all calls are made."""
    for group in groups.values():
        group.reset()
    results, batches = [], []
    for call in program:
        method, (kind, n) = getattr(groups[call.role], call.method), call.source
        if call.method == "count":
            results.append(method(n))
            continue
        source = batches[n % len(batches)] if kind == "earlier" and batches else make(n, call.padding)
        before = content(source) if isinstance(source, DataProto) else None
        try:
            results.append(method(source, source) if call.other and "scale" in call.method else method(source))
        except BatchError as error:
            results.append(reason(error))
        else:
            batches += [results[-1]] if isinstance(results[-1], DataProto | DataProtoFuture) else []
        assert before is None or content(source) == before, "a call changed what it was given"
    return [outcome(result) for result in results]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_a_program_gives_the_same_in_every_layout(layouts, program):
    separate, *others = (run(groups, program) for groups in layouts.values())
    assert others == [separate, separate]


def test_what_such_a_program_does(layouts):
    """By hand, so that the layouts are not all wrong in the same way."""
    program = [
        Call("left", "count", ("new", 5)),  # rank r: r + 10
        Call("right", "count", ("new", 1)),  # rank r: r + 3
        Call("left", "scale_later", ("new", 3), padding=True),  # 0, 2, 4 plus 10, 10, 11
        Call("right", "scale", ("new", 4)),  # 0, 3, 6, 9 plus 3, 3, 4, 4
        Call("right", "twice", ("earlier", 1)),
        Call("left", "turned", ("earlier", 1)),  # rows 2 and 3 are those of rank 0
        Call("left", "shift_later", ("earlier", 2)),
        Call("left", "measure", ("new", 5), padding=True),
        Call("right", "scale", ("new", 5)),
    ]
    for groups in layouts.values():
        *found, error = run(groups, program)
        scaled, added = [3, 6, 10, 13], [1, 2, 3, 4]
        doubled, doubled_n = [value for value in scaled for _ in range(2)], [n for n in added for _ in range(2)]
        assert found == [
            *([10, 11], [3, 4]),
            ([10, 12, 15], [1, 2, 3]),
            (scaled, added),
            (doubled, doubled_n),
            ([4, 7, 10, 13], added),
            ([value + 2000 for value in doubled], doubled_n),
            [(3, 3), (3, 11)],
        ]
        assert error == "cannot split 5 rows into 2 equal parts"
