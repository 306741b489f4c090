"""An option that cannot be is refused before a process starts, by name, with what was found and what is wanted."""

import inspect

import pytest
import ray

from hocket.algorithms.presets import GRPO, PPO
from hocket.errors import ConfigError
from hocket.workers import (
    DetachedPPOTrainer,
    DetachedTrainer,
    ExperienceMaker,
    ExperienceMakerHolder,
    MakerCallback,
    PPOTrainer,
    TrainerCallback,
    env_info,
)
from hocket.workers.detached_trainer import TRAINER_OPTIONS
from hocket.workers.experience_maker import MAKER_OPTIONS
from hocket.workers.generation import GENERATION
from hocket.workers.ppo_trainer import PPO_OPTIONS

WHOLE, FRACTION = [0, -1, 2.5, True, "8", None], [0, -0.1, float("nan"), float("inf"), "1", None]
BOTH = {
    "strategy_fn": ["single", None],
    "model_fn": ["gpt2", None],
    "env_info": [[], "auto", {"rank": 0, "world_size": 1}, {"rank": "2", "world_size": "2"}],
    "update_lora_weights": [True],
    "algorithm": ["grpo", GRPO, 1],
    "threads": WHOLE,
    "seed": [-1, 0.5, 1 << 32, None],
    "timeout": FRACTION,
    "join_timeout": [-1, None],
}
MAKER = BOTH | {
    "detached_trainer_name_list": [[], "trainer_0", [0], None],
    "kl_coef": [-0.1, "0.1"],
    "callbacks": [[TrainerCallback()], [MakerCallback], MakerCallback(), None],
    "group_size": WHOLE,
    "route": ["random"],
    "arbitrate": ["newest"],
    "max_new_tokens": WHOLE,
    "max_length": WHOLE[:-1],
    "temperature": FRACTION,
    "top_k": [-1, 0.5],
    "top_p": [0, 1.5, -0.1, None],
}
TRAINER = BOTH | {
    "experience_maker_holder_name_list": ["maker_0", [0], None],
    "train_batch_size": WHOLE,
    "buffer_limit": [-1, 0.5],
    "callbacks": [[MakerCallback()], [TrainerCallback], [print], TrainerCallback(), None],
    "max_staleness": [-1, 0.5],
    "replay": ["tokens", None],
    "actor_lr": FRACTION,
    "critic_lr": FRACTION[:-1],
    "max_grad_norm": FRACTION,
    "micro_batch_tokens": WHOLE,
    "eps_clip": FRACTION,
    "value_clip": FRACTION,
    "temperature": FRACTION,
    "ptx_coef": [1, -0.1, "0.5"],
    "ptx_loader_fn": ["text"],
    "chunk_bytes": WHOLE,
}


def cases(table):
    return [
        pytest.param(name, value, id=f"{name}={value!r}"[:40]) for name, values in table.items() for value in values
    ]


def refused(make, name, value):
    with pytest.raises(ConfigError) as caught:
        make(value)
    line = next(line for line in caught.value.message.splitlines() if line.startswith(f"found {name}="))
    assert line.startswith(f"found {name}={value!r}; wanted ")


@pytest.mark.parametrize(("name", "value"), cases(MAKER))
def test_makers(name, value):
    good = {"detached_trainer_name_list": ["t"], "strategy_fn": print, "model_fn": print}
    for kind in (ExperienceMaker, ExperienceMakerHolder.remote):
        refused(lambda wrong, kind=kind: kind(**good | {name: wrong}), name, value)
    assert not ray.is_initialized()


@pytest.mark.parametrize(("name", "value"), cases(TRAINER))
def test_trainers(name, value):
    good = {"experience_maker_holder_name_list": ["m"], "strategy_fn": print, "model_fn": print}
    for kind in (PPOTrainer, DetachedPPOTrainer.remote):
        refused(lambda wrong, kind=kind: kind(**good | {name: wrong}), name, value)
    assert not ray.is_initialized()


class Counting(DetachedTrainer):
    """A user's own."""

    def training_step(self, experience):
        return {}

    def _update_remote_makers(self, fully_update=False, **kwargs):
        pass


@pytest.mark.parametrize(("name", "value"), cases({name: TRAINER[name] for name in TRAINER_OPTIONS}))
def test_trainers_of_the_users_own(name, value):
    refused(lambda wrong: Counting(**{"experience_maker_holder_name_list": []} | {name: wrong}), name, value)


def test_every_option_with_bounds_is_staged_here():
    assert MAKER.keys() - GENERATION.keys() == MAKER_OPTIONS.keys()
    assert TRAINER.keys() == PPO_OPTIONS.keys()


@pytest.mark.parametrize("kind", [ExperienceMaker, PPOTrainer])
def test_defaults_pass(kind):
    """Also those that are None."""
    found = inspect.signature(kind).parameters.values()
    kind.check_arguments({p.name: p.default for p in found if p.default is not p.empty})
    kind.check_arguments({"algorithm": GRPO(), "env_info": env_info(2)[1], "critic_lr": 1, "seed": 0})


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        DetachedPPOTrainer.remote(["m"], print, print, train_batch_size=2.5, actor_lr=0)
    assert caught.value.message.splitlines() == [
        "found train_batch_size=2.5; wanted a whole number of 1 or more",
        "found actor_lr=0; wanted a number above 0",
    ]


def test_an_algorithm_by_its_name():
    with pytest.raises(
        ConfigError, match=r"algorithm='grpo'; .* give GRPO\(\) or PPO\(\) from hocket.algorithms.presets"
    ):
        PPOTrainer(["m"], print, print, algorithm="grpo")


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match="found eps_clip or value_clip beside algorithm="):
        DetachedPPOTrainer.remote(["m"], print, print, algorithm=PPO(), eps_clip=0.1)
    with pytest.raises(ConfigError, match=r"found ptx_coef=0.5 and no ptx_loader_fn"):
        DetachedPPOTrainer.remote(["m"], print, print, ptx_coef=0.5)
    with pytest.raises(ConfigError, match=r"kl_coef=0.1, but the algorithm has kl_coef=0.2"):
        ExperienceMakerHolder.remote(["t"], print, print, kl_coef=0.1, algorithm=GRPO(kl_coef=0.2))


@pytest.mark.parametrize("size", [0, -1, 1.5, "2"])
def test_an_empty_group(size):
    refused(env_info, "world_size", size)
