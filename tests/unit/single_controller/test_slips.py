"""Slips of newcomers are refused where they are made, with what was found and what to give."""

import pytest

from hocket.errors import GroupError
from hocket.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
)


class Plain(Worker):
    pass


@pytest.mark.parametrize(
    ("slip", "says"),
    [
        (lambda: RayWorkerGroup(RayResourcePool([1]), Plain), r"ray_cls_with_init is <class .*; give RayClassWithInit"),
        (
            lambda: RayWorkerGroup(RayClassWithInitArgs(Plain), RayResourcePool([1])),
            r"resource_pool is <.*; give RayRes",
        ),
        (lambda: RayWorkerGroup([2], RayClassWithInitArgs(Plain)), r"resource_pool is \[2\]; give RayResourcePool"),
        (lambda: RayWorkerGroup(), "found no workers; give a resource_pool, or worker_names"),
        (lambda: RayWorkerGroup.from_detached(worker_names="maker"), "worker_names is the string 'maker'"),
        (lambda: RayClassWithInitArgs("Plain"), "found 'Plain'; give a class"),
        (lambda: RayClassWithInitArgs(None), "found None; give a class"),
        (lambda: RayResourcePool(2), r"process_on_nodes is 2; give whole numbers, one per node"),
        (lambda: RayResourcePool([1.5]), r"process_on_nodes is \[1.5\]; give whole numbers"),
        (lambda: RayResourcePool([True]), r"process_on_nodes is \[True\]; give whole numbers"),
        (lambda: RayResourcePool([1], cpus_per_worker=-1), "less than nothing"),
        (
            lambda: create_colocated_worker_cls({"a": Plain}),
            r"found 'a': <class .*; give \{'role': RayClassWithInitArgs",
        ),
        (lambda: create_colocated_worker_cls({1: RayClassWithInitArgs(Plain)}), "found 1: "),
        (lambda: create_colocated_worker_cls({}), "found no roles to bind"),
    ],
)
def test_a_slip_is_refused(slip, says):
    with pytest.raises(GroupError, match=says):
        slip()
