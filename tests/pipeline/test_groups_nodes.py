"""Groups on several nodes: which node, which rank, which port.

Run as a program, this file starts a cluster of its own and prints a line of JSON per case; in the process of the tests
such a cluster would end the actors of the one that the tests share.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from hocket.errors import PlacementError
from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    split_resource_pool,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(330)]
HEAD, FAR = "127.0.0.2", "127.0.0.10"  # as text, the second is before the first
RANKS = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WORLD_SIZE")


def soon(condition, timeout=20):
    """Whether the condition comes true in time; Ray counts what is free a moment later."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def free(kind="CPU"):
    return ray.available_resources().get(kind, 0)


def places(pool, **options):
    return [(slot.address, slot.bundle_index) for slot in pool.slots(**options)]


def refusal(make):
    """The words of a PlacementError, and the seconds until it came."""
    start = time.monotonic()
    try:
        make()
    except PlacementError as error:
        return str(error), time.monotonic() - start
    return "nothing was refused", 0.0


class Probe(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def ranks(self):
        return [int(os.environ[name]) for name in RANKS]

    @register(Dispatch.ONE_TO_ALL)
    def meeting(self):
        return self.get_master_addr_port()

    @register(Dispatch.ONE_TO_ALL)
    def assigned(self):
        return self.get_cuda_visible_devices(), ray.get_runtime_context().get_assigned_resources()

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self):
        import torch  # here: few workers need it

        torch.distributed.init_process_group("gloo")
        number = torch.tensor([10**self.rank])
        torch.distributed.all_reduce(number)
        torch.distributed.destroy_process_group()
        return number.item()


def cpu_pool(nodes, **options):
    return RayResourcePool(nodes, use_gpu=False, **options)


def strategies():
    laid = {}
    for strategy, size in (("STRICT_PACK", 2), ("PACK", 2), ("PACK", 3), ("SPREAD", 4), ("STRICT_SPREAD", 2)):
        with cpu_pool([size]) as pool:
            laid[f"{strategy} {size}"] = [address for address, _ in places(pool, strategy=strategy)]
    return laid


def too_big():
    return {
        strategy: refusal(lambda strategy=strategy: cpu_pool([3]).slots(strategy))
        for strategy in ("STRICT_PACK", "STRICT_SPREAD")
    }


def order():
    """The nodes of pools that are made one after the other."""
    laid = []
    for nodes in ([1, 1], [2, 2], [1, 1], [2, 2], [1, 1]):
        with cpu_pool(nodes) as pool:
            laid.append([address for address, _ in places(pool)])
    return laid


def resources():
    options = ({"resources": {"disk": 1}}, {"accelerator_type": "H200"}, {"resources": {"disk": 2, "H200": 0.5}})
    laid = [refusal(cpu_pool([1], resources={"disk": 5}).slots)]
    for more in options:
        with cpu_pool([1], **more) as pool:
            laid.append(places(pool))
    return laid


def across():
    """One worker on one node and two on the other meet at the address of rank 0."""
    with cpu_pool([1, 2]) as pool:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Probe), call_timeout=90)
        return group.ranks(), group.all_reduce(), group.master_address == pool.slots()[0].address


def packed():
    """Three workers of one entry that lies on both nodes, and beside them two in a window on the last two places."""
    with cpu_pool([3]) as pool:
        whole = RayWorkerGroup(pool, RayClassWithInitArgs(Probe), bin_pack=False, call_timeout=90)
        window = split_resource_pool(pool, [1, 2])[1]
        group = RayWorkerGroup(window, RayClassWithInitArgs(Probe), call_timeout=90)
        return [address for address, _ in places(pool)], whole.ranks(), group.ranks()


def far_away():
    """A worker where the custom resource is, which it takes from its place; its port is held over there."""
    spec = RayClassWithInitArgs(Probe)
    spec.set_additional_resource({"disk": 1})
    with closing(socket.socket()) as taken, cpu_pool([1], resources={"disk": 1}) as pool:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        full = refusal(lambda: RayWorkerGroup(pool, spec, master_port_range=[port, port + 1]))[0]
        group = RayWorkerGroup(pool, spec, call_timeout=90)
        with closing(socket.socket()) as rival:
            refused = rival.connect_ex((group.master_address, int(group.master_port))) != 0
            try:
                rival.bind(("", int(group.master_port)))
            except OSError as error:
                held = str(error)
            else:
                held = "free for all"
        disk = [value for name, value in group.assigned()[0][1].items() if name == "disk"]
        return full.replace(str(port), "PORT"), group.meeting()[0][0], refused, held, disk


def accelerators():
    """What two groups see on one pool of GPU places, and a group without GPUs beside them."""
    with RayResourcePool([2], max_colocate_count=2) as pool:
        halves = (pool, split_resource_pool(pool, 1)[1])  # the second group shares the second GPU
        groups = [RayWorkerGroup(part, RayClassWithInitArgs(Probe), call_timeout=90) for part in halves]
        seen = [[(devices, got.get("GPU")) for devices, got in group.assigned()] for group in groups]
        bundle, left = pool.bundle(), soon(lambda: free("GPU") == 0)
        with RayResourcePool([1]) as plain:
            alone = RayWorkerGroup(plain, RayClassWithInitArgs(Probe), use_gpu=False, call_timeout=90).assigned()[0]
    return bundle, seen, left, [alone[0], alone[1].get("GPU")], refusal(RayResourcePool([3], use_gpu=True).slots)


def tell(case):
    assert soon(lambda: free() == ray.cluster_resources()["CPU"]), "the case before has left something"
    sys.stdout.write(json.dumps([case.__name__, case()]) + "\n")
    sys.stdout.flush()


def several_nodes():
    with tempfile.TemporaryDirectory(prefix="hk", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": 2, "num_gpus": 0, "include_dashboard": False, "temp_dir": folder, "node_ip_address": HEAD}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=2, num_gpus=2, resources={"disk": 2, "H200": 1}, node_ip_address=FAR)
        ray.init(address=cluster.address, log_to_driver=False, _node_ip_address=HEAD, logging_level="ERROR")
        for case in (strategies, too_big, order, resources, across, packed, far_away, accelerators):
            tell(case)
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def case(ray_address):  # whose token the other cluster shares
    """What a case gave on several nodes."""
    done = subprocess.run([sys.executable, Path(__file__)], capture_output=True, text=True, timeout=300, check=False)
    given = dict(map(json.loads, done.stdout.splitlines()))
    return lambda name: given[name] if name in given else pytest.fail(done.stderr[-3000:])


def test_the_strategy_decides_which_nodes(case):
    laid = case("strategies")
    assert all(laid[f"{packed} 2"] in ([HEAD, HEAD], [FAR, FAR]) for packed in ("STRICT_PACK", "PACK"))
    assert sorted(laid["PACK 3"]) in (sorted([HEAD, HEAD, FAR]), sorted([HEAD, FAR, FAR]))
    assert laid["SPREAD 4"] == [HEAD, HEAD, FAR, FAR]
    assert laid["STRICT_SPREAD 2"] == [HEAD, FAR]


def test_what_no_node_can_hold_is_refused_though_there_is_enough_in_all(case):
    for words, seconds in case("too_big").values():
        assert "3 CPU (4 in all, 4 free)" in words
        assert "2 nodes have room for [2, 2] workers" in words
        assert seconds < 5


def test_ranks_follow_the_addresses_of_the_nodes_each_time(case):
    laid = case("order")
    assert laid[1] == laid[3] == [HEAD, HEAD, FAR, FAR]
    assert all(nodes in ([HEAD, FAR], [HEAD, HEAD], [FAR, FAR]) for nodes in laid[::2])


def test_custom_resources_choose_the_node(case):
    (words, _), *laid = case("resources")
    assert laid == [[[FAR, 0]]] * 3
    assert "5 disk (2 in all, 2 free)" in words


def test_workers_on_two_nodes_know_their_ranks_and_meet(case):
    ranks, reduced, meets_at_rank_zero = case("across")
    assert ranks == [[0, 0, 1, 1, 3], [1, 0, 2, 2, 3], [2, 1, 2, 2, 3]]
    assert reduced == [111] * 3
    assert meets_at_rank_zero


def test_an_entry_may_lie_on_two_nodes_and_a_window_of_it_is_a_world_of_its_own(case):
    def ranks(nodes):
        return [[i, nodes[:i].count(node), *[nodes.count(node)] * 2, len(nodes)] for i, node in enumerate(nodes)]

    nodes, whole, window = case("packed")
    assert set(nodes) == {HEAD, FAR}
    assert whole == ranks(nodes)
    assert window == ranks(nodes[1:])


def test_the_port_is_held_on_the_node_of_rank_zero(case):
    full, address, not_yet_listening, held, disk = case("far_away")
    assert "no port in [PORT, " in full
    assert (address, not_yet_listening, disk) == (FAR, True, [1])
    assert "in use" in held


def test_groups_on_a_pool_with_gpus_share_them(case):
    bundle, seen, none_left, alone, (words, seconds) = case("accelerators")
    assert bundle == {"CPU": 1, "GPU": 1}
    assert sorted(devices for devices, _ in seen[0]) == ["0", "1"]
    assert seen[1] == seen[0][1:], "the workers of one place are on one device"
    assert {share for group in seen for _, share in group} == {0.5}
    assert none_left
    assert alone[0] in ("", "not set")
    assert alone[1] is None
    assert "3 GPU (2 in all, " in words
    assert seconds < 5


if __name__ == "__main__":
    several_nodes()
