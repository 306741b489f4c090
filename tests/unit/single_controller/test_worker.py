"""A Worker made from environment variables, without a group and without a cluster."""

import os

import pytest

from hocket.errors import GroupError, PlacementError
from hocket.single_controller import Worker

RANKS = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29123"}
OWN = [*RANKS, "LOCAL_WORLD_SIZE", "LOCAL_RANK", "DISABLE_WORKER_INIT", "WG_BACKEND"]
MASKS = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"]


@pytest.fixture
def environment():
    """A function that sets variables; the environment has none of those that a worker reads, and comes back after."""
    before = dict(os.environ)
    for name in [*OWN, *MASKS]:
        os.environ.pop(name, None)
    yield lambda **variables: os.environ.update(variables)
    os.environ.clear()
    os.environ.update(before)


class Meshed(Worker):
    """Stands in two meshes."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("infer", dp_rank=1, is_collect=False)


class Skipping(Worker):
    """Calls no constructor above it."""

    def __init__(self):
        self.own = 1


def test_rank_size_and_meeting_point_come_from_the_environment(environment):
    environment(**RANKS, LOCAL_WORLD_SIZE="2", LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="3")
    worker = Worker()
    assert (worker.rank, worker.world_size) == (2, 4)
    assert (worker._rank, worker._world_size, worker._local_rank, worker._local_world_size) == (2, 4, 1, 2)
    assert worker.get_master_addr_port() == ("10.0.0.7", "29123")
    assert (worker._master_addr, worker._master_port) == ("10.0.0.7", "29123")
    assert worker.get_cuda_visible_devices() == worker._cuda_visible_devices == "3"


def test_the_keys_are_the_seven_and_each_is_an_attribute(environment):
    environment(**RANKS)
    keys = Worker.env_keys()
    assert sorted(keys) == sorted([*RANKS, "LOCAL_WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"])
    assert all(hasattr(Worker(), f"_{key.lower()}") for key in keys)


def test_what_was_not_set_is_exported_for_libraries_that_read_it(environment):
    environment(**RANKS)
    Worker()
    assert {key: os.environ[key] for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", *RANKS)} == {
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        **RANKS,
    }
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_without_any_of_them_it_is_a_world_of_its_own(environment):
    worker = Worker()
    assert (worker.rank, worker.world_size) == (0, 1)
    assert worker.get_master_addr_port() == (None, None)
    assert worker.get_cuda_visible_devices() == "not set"


@pytest.mark.parametrize("missing", list(RANKS))
def test_some_but_not_all_of_them_is_an_error_that_names_the_missing(environment, missing):
    environment(**{key: value for key, value in RANKS.items() if key != missing})
    with pytest.raises(PlacementError, match=rf"not \['{missing}'\]; set all of them or none"):
        Worker()


def test_a_mask_given_to_the_constructor_is_the_one_of_the_process(environment):
    environment(**RANKS, CUDA_VISIBLE_DEVICES="0,1")
    assert Worker(cuda_visible_devices="1").get_cuda_visible_devices() == os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_an_inner_worker_reads_its_ranks_and_leaves_the_process_alone(environment):
    """DISABLE_WORKER_INIT, old trap: it was set while inner workers were made, but nothing read it any more."""
    environment(**RANKS, LOCAL_WORLD_SIZE="2", LOCAL_RANK="1", DISABLE_WORKER_INIT="1", HIP_VISIBLE_DEVICES="1")
    before = dict(os.environ)
    inner = Worker()
    assert (inner.rank, inner.world_size, inner._local_rank, inner._local_world_size) == (2, 4, 1, 2)
    assert dict(os.environ) == before
    del os.environ["DISABLE_WORKER_INIT"]
    Worker()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "HIP_VISIBLE_DEVICES" not in os.environ


def test_a_free_port_on_this_node(environment):
    environment(**RANKS)
    port = Worker._get_free_port()
    assert 1024 <= port <= 65535
    assert port != Worker._get_free_port()


def test_only_ray_is_a_backend(environment):
    environment(WG_BACKEND="mpi")
    with pytest.raises(PlacementError, match=r"WG_BACKEND='mpi'; the only backend is 'ray'"):
        Worker._get_node_ip()


def test_no_other_role_lives_beside_a_lone_worker(environment):
    assert Worker().get_fused_worker_by_name("critic") is None


# -- meshes ---------------------------------------------------------------------------------------------------------


def test_a_mesh_is_registered_once_and_asked_by_name(environment):
    worker = Meshed()
    worker._register_dispatch_collect_info("train", dp_rank=0, is_collect=True)
    assert (worker._query_dispatch_info("infer"), worker._query_dispatch_info("train")) == (1, 0)
    assert (worker._query_collect_info("infer"), worker.query_collect_info("train")) == (False, True)
    with pytest.raises(ValueError, match=r"mesh 'infer' is registered already"):
        worker._register_dispatch_collect_info("infer", dp_rank=0, is_collect=True)


def test_an_unknown_mesh_is_an_error_that_names_the_class_and_what_it_has(environment):
    for ask in (Meshed()._query_dispatch_info, Meshed().query_collect_info):
        with pytest.raises(AssertionError, match=r"mesh 'train' is not registered in Meshed, which has \['infer'\]"):
            ask("train")


def test_an_outer_worker_adopts_the_mesh_of_an_inner_one_under_its_own_names(environment):
    outer, inner = Worker(), Meshed()
    found = inner.get_dispatch_collect()
    assert found == {"dispatch_dp_rank": {"infer": 1}, "collect_dp_rank": {"infer": False}}
    for name in ("actor", "rollout"):
        outer.set_dispatch_collect(mesh_name=name, **found)
    assert outer.get_dispatch_collect() == {
        "dispatch_dp_rank": {"actor": 1, "rollout": 1},
        "collect_dp_rank": {"actor": False, "rollout": False},
    }
    with pytest.raises(GroupError, match=r"'actor' is registered already"):
        outer.set_dispatch_collect(mesh_name="actor", **found)


def test_meshes_work_in_a_class_that_skips_the_constructor(environment):
    worker = Skipping()
    worker._register_dispatch_collect_info("infer", 0, True)
    assert worker._query_dispatch_info("infer") == 0
    assert worker.get_fused_worker_by_name("x") is None
    assert Skipping().get_dispatch_collect() == {"dispatch_dp_rank": {}, "collect_dp_rank": {}}


# -- functions of the driver's --------------------------------------------------------------------------------------


def test_driver_functions_called_in_the_process_are_plain_calls(environment):
    environment(**RANKS)
    assert Worker().execute_with_func_generator(lambda worker, a, *, b: (worker.rank, a, b), 1, b=2) == (2, 1, 2)
    assert Worker().execute_func_rank_zero(lambda a, b: a + b, 1, b=2) == 3
