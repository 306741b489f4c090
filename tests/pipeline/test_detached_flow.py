"""The article's flow on a real cluster: makers run `workingloop`, trainers run `fit`, nobody controls them."""

import gc
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.job_config import JobConfig
from transformers import AutoModelForCausalLM

from hocket.algorithms.presets import GRPO, PPO
from hocket.errors import ConfigError, PlacementError, WeightSyncError, WorkerDied
from hocket.run.prepare import check_input, prepare
from hocket.run.train import train
from hocket.workers import (
    DetachedPPOTrainer,
    ExperienceMakerHolder,
    MakerCallback,
    TrainerCallback,
    balance,
    env_info,
    get_actor_from_args,
    get_critic_from_args,
    get_strategy_from_args,
    target_makers,
    target_trainers,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def connect(address):
    place = JobConfig(_py_driver_sys_path=[str(Path(__file__).parent)])  # the workers import this file
    ray.init(address=address, namespace=f"flow-{time.time_ns()}", log_to_driver=False, job_config=place)


@pytest.fixture
def connected(ray_address):
    """This process as a driver of the tests' cluster, in a namespace of its own."""
    connect(ray_address)
    yield
    gc.collect()  # handles of this session: to Ray, dropping them later may look like dropping another one's
    ray.shutdown()


@pytest.fixture
def start(make_config, tmp_path):
    """The folder of the tests' small model, and the units of its first steps."""
    prepared = prepare(check_input(make_config(placement="local")), tmp_path / "start", print)
    return prepared.blueprint.model, prepared.schedule


def models(folder, *, critic=False):
    """Four models of a maker: policy, maybe a critic, a rule, the reference."""
    actor = get_actor_from_args(folder)
    return actor, get_critic_from_args(folder) if critic else None, "digits", get_actor_from_args(folder)


def make_maker(i, trainers, folder, **options):
    given = {"tokenizer": folder, "group_size": 4, "max_new_tokens": 6, "seed": 5, "timeout": 60, "kl_coef": 0.05}
    return ExperienceMakerHolder.options(name=f"maker_{i}", num_cpus=0.1, max_concurrency=2).remote(
        detached_trainer_name_list=[f"trainer_{j}" for j in trainers],
        strategy_fn=lambda: get_strategy_from_args("colossalai_zero2"),
        model_fn=options.pop("model_fn", partial(models, folder)),
        sync_models_from_trainers=options.pop("sync", True),
        **given | options,
    )


def make_trainer(j, makers, folder, **options):
    given = {"train_batch_size": 16, "actor_lr": 1e-3, "tokenizer": folder, "timeout": 60}
    return DetachedPPOTrainer.options(name=f"trainer_{j}", num_cpus=0.1, max_concurrency=2).remote(
        experience_maker_holder_name_list=[f"maker_{i}" for i in makers],
        strategy_fn=lambda: get_strategy_from_args("ddp"),
        model_fn=lambda: (get_actor_from_args(folder), get_critic_from_args(folder)),
        **given | options,
    )


def unit_loader(schedule, steps):
    """The very units that hocket's own program hands out."""
    return lambda: [unit for step in range(steps) for unit in schedule.units(step)]


@pytest.mark.parametrize(("algo", "placement"), [("ppo", "detached(makers=1)"), ("grpo", "local")])
def test_lockstep_learns_what_the_controller_learns(make_config, ray_address, start, algo, placement):
    """Two ways to drive one data plane: max_staleness=0 and the same units give the same weights, bit by bit."""
    settings = {"minibatches": 1, "max_steps": 3}
    wanted = train(
        make_config(
            placement=placement,
            ray={"address": ray_address},
            algo={"name": algo},
            trainer=settings,
            eval={"path": None},
        ),
        stream=open(os.devnull, "w"),  # noqa: SIM115
    )
    folder, schedule = start
    algorithm = {"ppo": PPO(kl_coef=0.05), "grpo": GRPO(kl_coef=0.05)}[algo]
    connect(ray_address)
    try:
        maker = make_maker(0, [0], folder, algorithm=algorithm, kl_coef=None)
        trainer = make_trainer(0, [0], folder, algorithm=algorithm, max_staleness=0)
        made, fitted = ray.get([maker.workingloop.remote(unit_loader(schedule, 3)), trainer.fit.remote(3, 1)])
        assert balance([made, fitted]) == {"made": 48, "trained": 48, "refused": 0, "left": 0}
        assert [step["staleness/max"] for step in fitted.metrics] == [0, 0, 0]
        assert ray.get(trainer.sha256.remote()) == wanted["weights_sha256"]
    finally:
        ray.shutdown()


class Named:
    """Writes the hooks' names into a file, one a line, as they are called."""

    def __init__(self, path):
        self._path = path

    def __getattribute__(self, name):
        if name.startswith("on_"):
            with Path(super().__getattribute__("_path")).open("a") as file:
                file.write(name.removeprefix("on_") + "\n")
        return super().__getattribute__(name)


class MakerNames(Named, MakerCallback):
    pass


class TrainerNames(Named, TrainerCallback):
    pass


def test_two_to_two_crossed_as_one_group(connected, start, tmp_path):
    """Each maker lists both trainers and the other way round: legal, because the trainers are one group."""
    folder, schedule = start
    makers = [
        make_maker(
            i,
            [0, 1],
            folder,
            sync=True,
            callbacks=[MakerNames(tmp_path / f"maker{i}")],
            eval_performance=True,
            model_fn=partial(models, folder, critic=True),
        )
        for i in range(2)
    ]
    trainers = [
        make_trainer(
            j, [0, 1], folder, env_info=info, train_batch_size=6, callbacks=[TrainerNames(tmp_path / f"trainer{j}")]
        )
        for j, info in enumerate(env_info(2))
    ]
    loops = [maker.workingloop.remote(unit_loader(schedule, 2), num_steps=3 + 2 * i) for i, maker in enumerate(makers)]
    reports = ray.get(loops + [trainer.fit.remote(100, 2, 2) for trainer in trainers])
    found = balance(reports)
    assert found["made"] == found["trained"] == (3 + 5) * 8
    assert [report.ended_by for report in reports[2:]] == ["all its makers have ended"] * 2
    assert reports[2].steps == reports[3].steps
    assert [dict(step) for step in reports[2].metrics] == [dict(step) for step in reports[3].metrics]
    shas = ray.get([trainer.sha256.remote() for trainer in trainers])
    assert shas[0] == shas[1]
    hooks = (tmp_path / "maker0").read_text().split()
    batch = ["batch_start", "make_experience_start", "make_experience_end", "send_start", "send_end", "batch_end"]
    assert hooks == ["loop_start", *batch * 3, "loop_end"]
    told = (tmp_path / "trainer0").read_text().split()
    assert told[:4] == ["fit_start", "episode_start", "epoch_start", "batch_start"]
    assert told[-2:] == ["episode_end", "fit_end"]
    assert Counter(told)["batch_end"] == 2 * reports[2].steps
    ray.get(trainers[0].strategy_save_actor.remote(str(tmp_path / "saved")))
    ray.get(trainers[0].strategy_save_actor_optim.remote(str(tmp_path / "optim.pt")))
    assert torch.load(tmp_path / "optim.pt", weights_only=True)["state"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    old = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(loaded.lm_head.weight, old.lm_head.weight)


def test_two_sources_that_are_not_one_group_are_an_error_at_the_start(connected, start):
    """D1: the old module hung for ever here."""
    folder, schedule = start
    maker = make_maker(0, [0, 1], folder)
    trainers = [make_trainer(j, [0], folder) for j in range(2)]
    jobs = [maker.workingloop.remote(unit_loader(schedule, 1)), *[trainer.fit.remote(1, 1) for trainer in trainers]]
    with pytest.raises(WeightSyncError, match=r"maker_0 would get weights from trainer_\d and from trainer_\d"):
        ray.get(jobs)


def test_names_that_lead_nowhere_are_an_error_early(connected, start):
    """Not at the deadline: a trainer that no maker names, and a name that no actor has."""
    folder, schedule = start
    maker = make_maker(0, [0], folder, join_timeout=3)
    starving = make_trainer(1, [0], folder, join_timeout=3)
    astray = make_trainer(2, ["0_"], folder, join_timeout=3)
    loop = maker.workingloop.remote(unit_loader(schedule, 1))
    with pytest.raises(PlacementError, match=r"trainer_1 starves: no maker has joined within 3 s"):
        ray.get(starving.fit.remote(1, 1), timeout=40)
    with pytest.raises(WorkerDied, match=r"no actor named 'maker_0_' .*within 3 s \(there is 'maker_0'\)"):
        ray.get(astray.fit.remote(1, 1), timeout=40)
    with pytest.raises(WorkerDied, match=r"no actor named 'trainer_0' .*within 3 s \(there is 'trainer_[12]'\)"):
        ray.get(loop, timeout=40)


def test_latest_arbitration_does_not_deadlock(connected, start):
    folder, schedule = start
    maker = make_maker(0, [0, 1], folder, arbitrate="latest")
    trainers = [make_trainer(j, [0], folder, train_batch_size=8) for j in range(2)]
    jobs = [maker.workingloop.remote(unit_loader(schedule, 4)), *[trainer.fit.remote(4, 1) for trainer in trainers]]
    found = balance(ray.get(jobs))
    assert found["made"] == found["trained"] == 64


def test_weights_that_do_not_fit_are_named_on_both_sides(connected, start):
    folder, schedule = start
    other = {
        "model_type": "llama",
        "vocab_size": 99,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    maker = make_maker(0, [0], folder)
    trainer = DetachedPPOTrainer.options(name="trainer_0", num_cpus=0.1).remote(
        ["maker_0"],
        lambda: get_strategy_from_args("single"),
        lambda: (get_actor_from_args("llama", config=other), None),
        algorithm=GRPO(),
        timeout=30,
    )
    loop, fit = maker.workingloop.remote(unit_loader(schedule, 1)), trainer.fit.remote(1, 1)
    with pytest.raises(WeightSyncError, match=r"of trainer_0 do not fit maker_0: .* 1 are unknown, e.g. \['lm_head"):
        ray.get(fit)
    try:
        said = ray.get(loop).ended_by  # where the trainer was faster, the maker finds that it has ended
    except WorkerDied as error:
        said = error.message
        assert said.startswith("maker_0 waits for weights, but their source trainer_0 is gone: ")
    assert "it ended with an error: WeightSyncError: " in said
    assert "do not fit maker_0" in said


def test_what_cannot_be_is_refused_before_anything_starts(connected, start):
    folder, _ = start
    with pytest.raises(PlacementError, match=r"ExperienceMakerHolder asks for {'CPU': 1, 'GPU': 1}, and no node"):
        ExperienceMakerHolder.options(num_gpus=1).remote(["t"], lambda: None, lambda: None)
    with pytest.raises(ConfigError, match="has no option 'temprature'; did you mean 'temperature'"):
        make_maker(0, [0], folder, temprature=1.0)
    with pytest.raises(ConfigError, match="num_beams=4 is not supported"):
        make_maker(0, [0], folder, num_beams=4)
    with pytest.raises(ConfigError, match=r"found detached_trainer_name_list=\[\]; wanted a list of 1 or more"):
        make_maker(0, [], folder)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'bufer_limit'"):
        make_trainer(0, [0], folder, bufer_limit=3)
    with pytest.raises(ConfigError, match="found train_batch_size=0; wanted a whole number of 1 or more"):
        make_trainer(0, [0], folder, train_batch_size=0)
    with pytest.raises(ConfigError, match="missing a required argument"):
        DetachedPPOTrainer.remote(["maker_0"])


# --- kill -9 -----------------------------------------------------------------------------------------------


def pid(actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


def kill(actor):
    os.kill(pid(actor), signal.SIGKILL)


class MakerPause(MakerCallback):
    """Says in a file that it makes experience now, and takes for ever."""

    def __init__(self, path):
        self._path = path

    def on_make_experience_start(self):
        self._path.touch()
        time.sleep(600)


class TrainerPause(TrainerCallback):
    """Says in a file that it sends weights now, and takes so many seconds before and after."""

    def __init__(self, path, *, before=0, after=0):
        self._path, self._before, self._after = path, before, after

    def on_update_start(self):
        self._path.touch()
        time.sleep(self._before)

    def on_update_end(self):
        time.sleep(self._after)


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not happen"
        time.sleep(0.05)


def test_a_maker_killed_while_it_generates(connected, start, tmp_path):
    """Its credits are void, the trainer goes on with the other maker, and says so."""
    folder, schedule = start
    busy = MakerPause(tmp_path / "busy")
    makers = [make_maker(0, [0], folder, callbacks=[busy]), make_maker(1, [0], folder)]
    trainer = make_trainer(0, [0, 1], folder)
    loops = [maker.workingloop.remote(unit_loader(schedule, 3)) for maker in makers]
    fit = trainer.fit.remote(100, 1)
    wait_for(tmp_path / "busy")
    kill(makers[0])
    fitted, made = ray.get([fit, loops[1]], timeout=90)
    assert fitted.ended_by.startswith("all its makers have ended; maker_0: it died: the process ended without a word")
    assert fitted.trained == made.made == 48
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(loops[0])


def test_a_trainer_killed_while_it_sends_weights(connected, start, tmp_path):
    """The staging of the maker is dropped; it ends with the cause in words, because no trainer is left."""
    folder, schedule = start
    maker = make_maker(0, [0], folder, timeout=60)
    trainer = make_trainer(0, [0], folder, callbacks=[TrainerPause(tmp_path / "sending", after=600)], max_staleness=0)
    loop, fit = maker.workingloop.remote(unit_loader(schedule, 5)), trainer.fit.remote(5, 1)
    wait_for(tmp_path / "sending")
    kill(trainer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(fit, timeout=60)
    report = ray.get(loop, timeout=60)
    assert report.ended_by.startswith("all its trainers have ended; trainer_0: it died: ")
    assert report.made == report.sent["trainer_0"] + report.left.total()


@pytest.mark.slow
def test_a_maker_killed_while_it_receives(connected, start, tmp_path):
    """The trainer's push to the other maker goes on, and training too."""
    folder, schedule = start
    makers = [make_maker(i, [0], folder) for i in range(2)]
    trainer = make_trainer(0, [0, 1], folder, callbacks=[TrainerPause(tmp_path / "sending", before=3)])
    fit = trainer.fit.remote(100, 1)
    loops = [maker.workingloop.remote(unit_loader(schedule, 4)) for maker in makers]
    wait_for(tmp_path / "sending")
    os.kill(stopped := pid(makers[0]), signal.SIGSTOP)  # it will not answer the push
    time.sleep(4)
    os.kill(stopped, signal.SIGKILL)
    fitted, made = ray.get([fit, loops[1]], timeout=90)
    assert fitted.ended_by.startswith("all its makers have ended; maker_0: it died: ")
    assert made.made == 64
    assert fitted.accepted["maker_1"] == 64


class Slow(TrainerCallback):
    """A trainer of 0.05 s a step that notes what is outstanding."""

    def __init__(self, path):
        self.path = path

    def on_batch_end(self, metrics, experience):
        time.sleep(0.05)
        trainer = ray.get_runtime_context().get_actor_name()
        with self.path.open("a") as file:
            file.write(f"{ray.get(ray.get_actor(trainer).outstanding.remote())}\n")


class Watched(MakerCallback):
    """A maker that notes its own memory, in bytes, after each batch."""

    def __init__(self, path):
        self.path = path

    def on_batch_end(self):
        now = psutil.Process().memory_info()
        with self.path.open("a") as file:
            file.write(f"{now.rss - now.shared}\n")


@pytest.mark.slow
def test_a_fast_maker_waits_for_a_slow_trainer(connected, start, tmp_path):
    """D6: 200 batches, never more outstanding than the limit of credits, and the maker's memory stays flat."""
    folder, schedule = start
    unit = next(iter(schedule.units(0)))
    size, limit, steps = len(unit), 2, 200
    rss, outstanding = tmp_path / "rss", tmp_path / "outstanding"
    quick = {"max_new_tokens": 1, "sync": False, "callbacks": [Watched(rss)], "group_size": 1}
    maker = make_maker(0, [0], folder, **quick)
    trainer = make_trainer(0, [], folder, train_batch_size=size, buffer_limit=limit, callbacks=[Slow(outstanding)])
    loop = maker.workingloop.remote(lambda: [unit], num_steps=steps)
    reports = ray.get([loop, trainer.fit.remote(steps, 50)], timeout=200)
    assert balance(reports)["trained"] == size * steps
    assert max(map(int, outstanding.read_text().split())) <= limit * size
    memory = [int(line) for line in rss.read_text().split()]
    assert max(memory[-20:]) - min(memory[20:40]) < 16 << 20


def test_the_topology_helpers_agree_with_the_flow():
    assert [target_trainers(i, 3, 2) for i in range(3)] == [[0], [1], [0]]
    assert [target_makers(j, 2, 3) for j in range(2)] == [[0, 2], [1]]
