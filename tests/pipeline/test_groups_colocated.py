"""Several roles in one process: the published example, views of roles, fused classes. Two workers everywhere."""

import os
import sys
from typing import ClassVar

import pytest
import ray
import torch

from hocket import DataProto
from hocket.errors import GroupError
from hocket.single_controller import (
    DataProtoFuture,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers get the classes, and do not import tests
MESH = make_nd_compute_dataproto_dispatch_fn("mesh")


@ray.remote
class Actor(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["a"] += self.rank
        return data


@ray.remote
class Critic(Worker):
    def __init__(self, config):
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sub(self, data: DataProto) -> DataProto:
        data.batch["a"] -= self.config["b"]
        return data


class Role(Worker):
    """What the roles have in common; `turn` says which dp rank a worker has."""

    made: ClassVar[list] = []  # in the order of the process

    def __init__(self, name, *, turn=False):
        os.environ["HIP_VISIBLE_DEVICES"] = "7"  # the set-up of a process would move it
        super().__init__()
        self.name, self.untouched = name, os.environ.pop("HIP_VISIBLE_DEVICES", None) == "7"
        self.made.append((name, os.environ.get("DISABLE_WORKER_INIT"), self.rank, self.world_size))
        self._register_dispatch_collect_info("mesh", 1 - self.rank if turn else self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def inherited(self, *args, **kwargs):
        """Says who it is."""
        return self.name, self.rank, args, kwargs

    @register(Dispatch.ONE_TO_ALL)
    async def inherited_async(self, value):
        return self.name, value

    @register(MESH)
    def meshed(self, data):
        data.tensor("a").add_(10 * self.rank)  # not `batch`: workers that need no TensorDict start sooner
        return data

    def told(self):
        """Not registered."""
        return self.made, self.untouched, os.getpid()

    async def told_async(self):
        return self.name

    def beside(self, name):
        other = self.get_fused_worker_by_name(name)
        return None if other is None else other.name

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self, value):
        return self.name, value


class Speaker(Role):
    """With the next class it makes two `<role>_<method>` one name: actor_rollout_generate."""

    @register(Dispatch.ONE_TO_ALL)
    def rollout_generate(self):
        return f"{self.name}.rollout_generate"


class Rollout(Role):
    """See Speaker."""

    @register(Dispatch.ONE_TO_ALL)
    def generate(self):
        return f"{self.name}.generate"

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def later(self, data):
        data.tensor("a").add_(1)
        return data


def both_roles():
    return {
        "actor": RayClassWithInitArgs(Speaker, "the actor", turn=True),
        "actor_rollout": RayClassWithInitArgs(ray.remote(Rollout), name="the rollout"),
    }


@pytest.fixture(scope="module")
def pool(ray_address):
    ray.init(address=ray_address, log_to_driver=False)
    with RayResourcePool([2]) as pool:
        yield pool
    ray.shutdown()


@pytest.fixture(scope="module")
def article(pool):
    actor_cls = RayClassWithInitArgs(cls=Actor)
    critic_cls = RayClassWithInitArgs(cls=Critic, config={"b": 10})
    colocated = create_colocated_worker_cls({"actor": actor_cls, "critic": critic_cls})
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=colocated, call_timeout=60)


@pytest.fixture(scope="module")
def bound(pool):
    return RayWorkerGroup(pool, create_colocated_worker_cls(both_roles()), call_timeout=60)


@pytest.fixture(scope="module")
def views(bound):
    return bound.spawn({"actor", "actor_rollout"})


@pytest.fixture(scope="module")
def lone(pool):
    return RayWorkerGroup(pool, both_roles()["actor_rollout"], call_timeout=60)


@pytest.fixture(scope="module")
def fused(pool):
    class Both(create_colocated_worker_raw_cls(both_roles())):
        """Adds methods that use both roles."""

        @register(Dispatch.DP_COMPUTE_PROTO)
        def chained(self, data):
            return self.actor.meshed(self.actor_rollout.meshed(data))

        @register(Dispatch.ONE_TO_ALL)
        async def asked(self):
            return await self.actor_rollout.inherited_async(self.actor.name)

    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Both)), call_timeout=60)
    group.fuse({"actor", "actor_rollout"})
    return group


def zeros(n=4, **options):
    return DataProto.from_dict({"a": torch.zeros(n)}, **options)


def a(data):
    return data.batch["a"].tolist()


def processes(group):
    """Process numbers of the workers, by a function of the driver's."""
    ask = zeros(group.world_size)
    return a(group.execute_with_func_generator(lambda _, part: part.__class__.from_dict({"a": pid()}), ask))


def pid():
    return torch.tensor([os.getpid()])


# -- the article ----------------------------------------------------------------------------------------------------


def test_the_example_gives_the_published_numbers(article):
    data = zeros(10)
    spawned = article.spawn(prefix_set={"actor", "critic"})
    assert a(spawned["actor"].add(data)) == a(article.actor_add(data)) == [0.0] * 5 + [1.0] * 5
    assert a(spawned["critic"].sub(data)) == a(article.critic_sub(data)) == [-10.0] * 5 + [-10.0] * 5
    assert a(data) == [0.0] * 10


def test_the_bound_class_and_the_names_on_it():
    roles = {"actor": RayClassWithInitArgs(cls=Actor), "critic": RayClassWithInitArgs(cls=Critic, config={"b": 10})}
    colocated = create_colocated_worker_cls(roles)
    plain = colocated.cls.__ray_actor_class__
    assert isinstance(colocated, RayClassWithInitArgs)
    assert (plain.__name__, plain.__base__) == ("WorkerDict", Worker)
    for cls in (colocated.cls, plain):
        assert callable(cls.actor_add)
        assert callable(cls.critic_sub)
    assert (plain.actor_add.__name__, plain.critic_sub.__name__) == ("actor_add", "critic_sub")


def test_two_processes_for_two_roles(article):
    spawned = article.spawn({"actor", "critic"})
    assert article.world_size == len(set(processes(article))) == 2
    assert processes(spawned["actor"]) == processes(spawned["critic"]) == processes(article)
    assert spawned["actor"].workers == spawned["critic"].workers == article.workers


def test_the_set_up_of_a_process_happens_once_for_its_three_workers(views):
    """DISABLE_WORKER_INIT, old trap: nothing read it. The roles are made in their order, and know their rank."""
    for rank, (made, untouched, _) in enumerate(views["actor_rollout"].execute_all_sync("told")):
        assert made == [("the actor", "1", rank, 2), ("the rollout", "1", rank, 2)]
        assert untouched
    assert views["actor"].execute_func_rank_zero(os.environ.get, "DISABLE_WORKER_INIT") is None


# -- views ----------------------------------------------------------------------------------------------------------


def test_no_role_gets_the_methods_of_another_whose_name_begins_alike(bound, views):
    """D9, old trap: routing by name prefix gave the group `actor` the method `rollout_gen` of `actor_rollout`."""
    assert views["actor"].rollout_generate() == ["the actor.rollout_generate"] * 2
    assert views["actor_rollout"].generate() == ["the rollout.generate"] * 2
    assert not hasattr(views["actor"], "generate")
    assert not hasattr(views["actor_rollout"], "rollout_generate")
    assert not hasattr(views["actor"], "rollout_later")
    assert "actor_rollout_generate" not in bound.method_names, "it would be the name of two methods"


def test_methods_that_both_roles_inherit_answer_for_their_role(bound, views):
    assert views["actor"].inherited(1, key=2) == [("the actor", rank, (1,), {"key": 2}) for rank in range(2)]
    assert views["actor_rollout"].inherited() == [("the rollout", rank, (), {}) for rank in range(2)]
    assert bound.actor_inherited() == views["actor"].inherited()
    assert bound.actor_rollout_inherited() == views["actor_rollout"].inherited()
    assert bound.ray_cls_with_init.plain.actor_inherited.__doc__ == "Says who it is."


def test_an_unknown_role_is_an_error_that_lists_the_roles(bound, lone):
    """D9, old trap: a role that does not exist gave a group without methods, and no word."""
    with pytest.raises(GroupError, match=r"no role \['critic'\] .* has \['actor', 'actor_rollout'\]"):
        bound.spawn({"actor", "critic"})
    with pytest.raises(GroupError, match=r"no role \['actor'\]"):
        lone.spawn({"actor"})


def test_views_keep_what_the_group_knows(bound, views):
    """Old trap (spec 1.8): views forgot the master address, the device and the environment."""
    for view in views.values():
        for name in ("master_address", "master_port", "device_name", "name_prefix", "worker_names", "world_size"):
            assert getattr(view, name) == getattr(bound, name), name
        assert view.execute_all_sync("get_master_addr_port") == [(bound.master_address, bound.master_port)] * 2


def test_each_role_has_meshes_of_its_own(bound, views):
    assert (views["actor"].dispatch_info("mesh"), views["actor_rollout"].dispatch_info("mesh")) == ([1, 0], [0, 1])
    assert a(views["actor"].meshed(zeros())) == [10.0, 10.0, 0.0, 0.0]
    assert a(views["actor_rollout"].meshed(zeros())) == [0.0, 0.0, 10.0, 10.0]
    with pytest.raises(GroupError, match=r"not registered in WorkerDict.*call a bound role by its own group"):
        bound.actor_meshed(zeros())


def test_methods_that_are_not_registered_are_reached_alike_apart_and_together(views, lone):
    """D10, old trap: they were reachable in a group of their own, and not in a WorkerDict."""
    for group in (views["actor_rollout"], lone):
        assert group.execute_all_sync("told_async") == ["the rollout"] * 2
        assert group.execute_rank_zero_sync("told_async") == "the rollout"
        pids = [pid for _, _, pid in ray.get(group.execute_all("told"), timeout=60)]
        assert pids == processes(group)
        with pytest.raises(AttributeError, match="told"):
            _ = group.told


def test_async_methods_by_every_way_there_is(bound, views, lone):
    wanted = [("the rollout", 3)] * 2
    for answer in (
        views["actor_rollout"].inherited_async(3),
        lone.inherited_async(3),
        bound.actor_rollout_inherited_async(3),
        bound.execute_all_sync("actor_rollout_inherited_async", 3),
        ray.get([worker.actor_rollout_inherited_async.remote(3) for worker in bound.workers], timeout=60),
    ):
        assert answer == wanted


def test_an_async_method_that_does_not_block_gives_a_future(views, lone):
    for group in (views["actor_rollout"], lone):
        future = group.later(group.later(zeros(3, auto_padding=True)).get(timeout=60))
        assert isinstance(future, DataProtoFuture)
        assert a(future.get(timeout=60)) == [2.0] * 3


def test_direct_methods_of_a_role_are_called_on_the_handle(views, bound):
    """Those of a role with "rollout" in its name keep theirs: other programs look for that name on the handle."""
    with pytest.raises(GroupError, match=r"group.workers\[i\]"):
        views["actor_rollout"].direct(1)
    assert ray.get(bound.workers[1].direct.remote(1), timeout=60) == ("the rollout", 1)
    assert ray.get(bound.workers[1].actor_direct.remote(1), timeout=60) == ("the actor", 1)


def test_roles_reach_one_another_by_name_and_a_lone_one_reaches_nobody(views, fused, lone):
    """Old trap (spec 1.8): the roles of a WorkerDict did not see each other."""
    for actor in (views["actor"], fused.actor):
        assert actor.execute_all_sync("beside", "actor_rollout") == ["the rollout"] * 2
        assert actor.execute_all_sync("beside", "critic") == [None] * 2
    assert lone.execute_all_sync("beside", "actor") == [None] * 2


# -- fused ----------------------------------------------------------------------------------------------------------


def test_a_class_derived_from_the_fused_one_combines_its_roles(fused, views):
    data = zeros()
    wanted = a(views["actor_rollout"].meshed(views["actor_rollout"].meshed(data)))
    assert a(fused.chained(data)) == wanted == [0.0, 0.0, 20.0, 20.0]
    assert a(data) == [0.0] * 4


def test_fused_roles_are_groups_of_their_own(fused, views):
    assert fused.actor.inherited(1) == views["actor"].inherited(1)
    assert a(fused.actor.meshed(zeros())) == [10.0, 10.0, 0.0, 0.0]
    assert processes(fused.actor) == processes(fused.actor_rollout) == processes(fused)
    assert fused.actor.execute_all_sync("told_async") == ["the actor"] * 2


def test_fused_classes_run_async_methods(fused):
    """D11, old trap: "cannot pickle coroutine", because the forwarder was a plain function."""
    assert fused.actor_rollout.inherited_async(3) == [("the rollout", 3)] * 2
    assert fused.asked() == [("the rollout", "the actor")] * 2
    assert a(fused.actor_rollout.later(zeros()).get(timeout=60)) == [1.0] * 4


def test_the_fused_class_itself():
    raw = create_colocated_worker_raw_cls(both_roles())
    assert (raw.__name__, raw.__base__) == ("FusedWorker_actor_actor_rollout", Worker)
    bound = create_colocated_worker_cls_fused(both_roles())
    assert bound.fused_worker_used
    assert not create_colocated_worker_cls(both_roles()).fused_worker_used
    assert bound.cls.__ray_actor_class__.__name__ == raw.__name__
