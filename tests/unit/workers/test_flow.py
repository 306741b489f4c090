"""The self-driven flow ends for every topology and every choice of counts, and its ledger balances."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hocket.errors import ConfigError, PlacementError, RewardError, WorkerDied
from hocket.models.policy import named_weights, token_logprobs
from hocket.observe.metrics import read_metrics
from hocket.observe.report import write_report
from hocket.observe.trace import read_trace
from hocket.workers import DetachedTrainer, PPOTrainer, balance, split_experience_batch

TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (5, 3)]


@pytest.mark.parametrize(("makers", "trainers"), TOPOLOGIES)
@pytest.mark.parametrize("limit", [0, 1, None])
def test_every_topology_ends_and_balances(topology, pipeline, loader, makers, trainers, limit):
    """D4: odd sizes, and steps that no arithmetic fits: more than there is for some, fewer for others."""
    made, learned = topology(makers, trainers, trainer={"train_batch_size": 5, "buffer_limit": limit})
    steps = [3 + 2 * i for i in range(makers)]
    jobs = [
        lambda i=i, maker=maker: maker.workingloop(loader(3, 7, 1), num_steps=steps[i]) for i, maker in enumerate(made)
    ]
    jobs += [lambda j=j, trainer=trainer: trainer.fit(3 + 4 * j, 2) for j, trainer in enumerate(learned)]
    reports = pipeline.run(jobs)
    found = balance(reports)
    assert found["made"] > 0
    assert found["trained"] > 0
    for report in reports[makers:]:
        assert report.ended_by in ("it has made all its steps", "all its makers have ended")
        assert report.trained <= 5 * report.steps


@pytest.mark.parametrize(("makers", "trainers"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_is_bounded_for_every_topology(topology, pipeline, loader, makers, trainers, bound):
    """D8: by admission, so that nothing is thrown away."""
    options = {"train_batch_size": 4, "max_staleness": bound}
    made, learned = topology(makers, trainers, trainer=options)
    jobs = [lambda maker=maker: maker.workingloop(loader(3, 4, 2), num_steps=8) for maker in made]
    jobs += [lambda trainer=trainer: trainer.fit(100, 1) for trainer in learned]
    reports = pipeline.run(jobs)
    found = balance(reports)
    assert found["made"] == found["trained"] == makers * (3 + 4 + 2 + 3 + 4 + 2 + 3 + 4)
    seen = [step["staleness/max"] for report in reports[makers:] for step in report.metrics]
    assert max(seen) <= bound
    assert all(report.version == report.steps for report in reports[makers:])


def test_bounded_staleness_with_groups_over_two_trainers(topology, pipeline, loader):
    options = {"train_batch_size": 6, "max_staleness": 0}
    made, learned = topology(1, 2, maker={"group_size": 3, "route": "groups"}, trainer=options)
    jobs = [lambda: made[0].workingloop(loader(5, 3), num_steps=4)]
    jobs += [lambda trainer=trainer: trainer.fit(100, 1) for trainer in learned]
    found = balance(pipeline.run(jobs))
    assert found["made"] == found["trained"] == (5 + 3) * 2 * 3


def test_a_slow_trainer_slows_a_fast_maker(make_maker, make_trainer, pipeline, loader):
    """D6: 200 batches, and never more than the limit outstanding."""
    seen = []

    class Slow(PPOTrainer):
        def training_step(self, experience):
            time.sleep(0.01)
            seen.append(self.buffer.outstanding)
            return super().training_step(experience)

    maker = make_maker("m", ["t"], max_new_tokens=1)
    make_trainer("t", ["m"], kind=Slow, train_batch_size=2, buffer_limit=3)
    jobs = [lambda: maker.workingloop(loader(2), num_steps=200), lambda: pipeline.parts["t"].fit(200, 10)]
    made, trained = pipeline.run(jobs)
    assert balance([made, trained])["trained"] == 400
    assert max(seen) <= 6
    assert trained.steps == len(seen) == 200


def test_makers_share_nothing(topology, pipeline):
    """D30: disjoint prompts by the loader's two arguments, and different answers to one prompt."""
    asked = torch.arange(12).reshape(12, 1) + 20
    made, learned = topology(2, 1)
    for i, maker in enumerate(made):
        maker._place = (i, 2)
    taken, take = [], learned[0].buffer.put
    learned[0].buffer.put = lambda maker, seq, items, **more: (
        taken.append((maker, items)),
        take(maker, seq, items, **more),
    )[1]
    jobs = [lambda maker=maker: maker.workingloop(lambda rank, n: [asked[rank::n]]) for maker in made]
    pipeline.run([*jobs, lambda: learned[0].fit(10, 1)])
    prompts = {
        name: {int(ids[0]) for who, items in taken if who == name for ids in items.tensor("input_ids")}
        for name in ("maker_0", "maker_1")
    }
    assert prompts == {"maker_0": set(range(20, 32, 2)), "maker_1": set(range(21, 32, 2))}
    uids = [uid for _, items in taken for uid in items.non_tensor_batch["uid"]]
    assert len(set(uids)) == len(uids) == 12


def test_a_bad_item_is_counted_and_the_run_goes_on(make_maker, make_trainer, pipeline, loader):
    """D7."""
    maker = make_maker("m", ["t"])
    trainer = make_trainer("t", ["m"], train_batch_size=3)
    make = maker.maker.make

    def spoiled(unit, **more):
        made = make(unit, **more)
        made.batch["score"][0] = torch.nan
        return made

    maker.maker.make = spoiled
    reports = pipeline.run([lambda: maker.workingloop(loader(4, 4, 4)), lambda: trainer.fit(9, 1)])
    found = balance(reports)
    assert (found["made"], found["trained"], found["refused: its score is not finite"]) == (12, 9, 3)


def test_a_loop_that_fails_ends_the_other_side(make_maker, make_trainer, pipeline, loader, caplog):
    caplog.set_level("INFO", "hocket")
    maker = make_maker("m", ["t"], reward=lambda completion: 1 / 0)
    trainer = make_trainer("t", ["m"])
    with ThreadPoolExecutor(2) as pool:
        made, trained = pool.submit(maker.workingloop, loader(4)), pool.submit(trainer.fit, 3, 1)
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            made.result(30)
        ended_by = trained.result(30).ended_by
        assert ended_by.startswith("all its makers have ended; m: it ended with an error: RewardError: ")
        assert "ZeroDivisionError" in ended_by
        assert "\n" not in ended_by
        assert trained.result().steps == 0
    assert any("t goes on without m: it ended with an error: RewardError" in line for line in caplog.messages)
    assert any("m made 0 samples: it ended with an error: RewardError" in line for line in caplog.messages)


def test_a_maker_that_fails_is_told_of_beside_the_steps_that_the_others_made(
    make_maker, make_trainer, pipeline, loader
):
    """And the trainer's failure, in the same words, by the maker."""
    makers = [make_maker("good", ["t"]), make_maker("bad", ["t"], reward=lambda completion: 1 / 0)]
    trainer = make_trainer("t", ["good", "bad"], train_batch_size=4)
    with ThreadPoolExecutor(3) as pool:
        failed = pool.submit(makers[1].workingloop, loader(4))
        assert isinstance(failed.exception(30), RewardError)
        running = [pool.submit(makers[0].workingloop, loader(4, 4)), pool.submit(trainer.fit, 2, 1)]
        reports = [one.result(30) for one in running]
    assert reports[1].ended_by.startswith("it has made all its steps; bad: it ended with an error: RewardError: ")
    assert balance(reports)["trained"] == 8


@pytest.mark.parametrize("counts", [(100, 0, 1), (0, 1, 1), (1, 1, 0), (100, 2.5, 1), (True, 1, 1)])
def test_a_trainer_that_cannot_fit_ends_its_makers(make_maker, make_trainer, pipeline, loader, counts, caplog):
    """Not at their deadline."""
    maker = make_maker("m", ["t"])
    trainer = make_trainer("t", ["m"])
    with ThreadPoolExecutor(2) as pool:
        made, trained = pool.submit(maker.workingloop, loader(4), num_steps=3), pool.submit(trainer.fit, *counts)
        with pytest.raises(ConfigError, match=r"found \w+=(0|2.5|True); wanted a whole number of 1 or more"):
            trained.result(10)
        assert made.result(10).ended_by.startswith(
            "all its trainers have ended; t: it ended with an error: ConfigError: "
        )
    assert any("m goes on without t: it ended with an error: ConfigError" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"num_steps": -1}, "found num_steps=-1; wanted a whole number of 0 or more"),
        ({"num_steps": 2.5}, "found num_steps=2.5; wanted a whole number"),
        ({"num_epochs": 0}, "found num_epochs=0; wanted a whole number of 1 or more"),
        ({"dataloader_fn": [1]}, r"found dataloader_fn=\[1\]; wanted a function"),
    ],
)
def test_a_maker_that_cannot_work_ends_its_trainers(make_maker, make_trainer, pipeline, loader, wrong, text):
    maker = make_maker("m", ["t"])
    trainer = make_trainer("t", ["m"])
    with ThreadPoolExecutor(2) as pool:
        trained = pool.submit(trainer.fit, 3, 1)
        with pytest.raises(ConfigError, match=text):
            maker.workingloop(**{"dataloader_fn": loader(4)} | wrong)
        assert "; m: it ended with an error: ConfigError: found " in trained.result(10).ended_by


class Absent:
    """The peer of a name that no actor has."""

    name = "absent"

    def call(self, method, *args):
        raise WorkerDied("no actor named 'absent' appeared")

    def lost(self):
        return None


def test_a_maker_that_misses_one_trainer_ends_the_others(make_maker, make_trainer, pipeline, loader):
    maker = make_maker(
        "m", ["t", "absent"], connect=lambda name: Absent() if name == "absent" else pipeline.connect(name)
    )
    trainer = make_trainer("t", ["m"])
    with ThreadPoolExecutor(2) as pool:
        trained = pool.submit(trainer.fit, 3, 1)
        with pytest.raises(WorkerDied, match="no actor named 'absent' appeared"):
            maker.workingloop(loader(4))
        assert trained.result(10).ended_by.endswith("WorkerDied: no actor named 'absent' appeared")


def test_replayed_epochs(make_maker, make_trainer, pipeline, loader):
    """Every sample is used so many times; the order of batches, or of rows, is drawn again."""
    for replay in ("batches", "rows"):
        maker = make_maker("m", ["t"])
        trainer = make_trainer("t", ["m"], train_batch_size=4, replay=replay)
        reports = pipeline.run([lambda m=maker: m.workingloop(loader(3, 4)), lambda t=trainer: t.fit(10, 2, 3)])
        assert balance(reports)["trained"] == 7
        assert len(reports[1].metrics) == 2 * 3
        assert reports[1].steps == 2


def test_the_makers_kl_coefficient_is_the_trainers(make_maker, make_trainer, pipeline, loader):
    for coef, there in ((0.0, False), (0.3, True)):
        maker = make_maker("m", ["t"], kl_coef=coef)
        trainer = make_trainer("t", ["m"], train_batch_size=4)
        reports = pipeline.run([lambda m=maker: m.workingloop(loader(4)), lambda t=trainer: t.fit(1, 1)])
        assert ("kl/ref" in reports[1].metrics[0]) == there


def test_a_makers_critic_is_synced_with_the_policy(make_maker, make_trainer, make_critic, tiny, pipeline, loader):
    actor, critic = tiny(), make_critic()

    def models():
        return actor, critic, lambda completion: float(len(completion)), copy.deepcopy(actor)

    maker = make_maker("m", ["t"], model_fn=models, sync_models_from_trainers=True)
    trainer = make_trainer("t", ["m"], train_batch_size=4)
    pipeline.run([lambda: maker.workingloop(loader(4, 4, 4)), lambda: trainer.fit(3, 1)])
    maker.maker._swap(3)
    theirs, ours = named_weights(trainer.trainer.critic), named_weights(critic)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not torch.equal(ours["score.weight"], torch.zeros_like(ours["score.weight"]))


class OwnTrainer(DetachedTrainer):
    """A user's own: it counts."""

    def __init__(self, *names, **options):
        super().__init__(*names, **options)
        self.steps, self.pushes = [], 0

    def training_step(self, experience):
        self.steps.append(experience.sequences.shape[0])
        return {"rows": float(self.steps[-1])}

    def _update_remote_makers(self, fully_update=False, **kwargs):
        self.pushes += 1


def test_the_abstract_trainer_needs_no_ray_and_no_maker(experience):
    with pytest.raises(TypeError, match="abstract"):
        DetachedTrainer([])
    trainer = OwnTrainer([], train_batch_size=3, name="own")
    ack = trainer.buffer_extend(split_experience_batch(experience([6] * 7)))
    assert (ack.accepted, trainer.buffer_get_length()) == (7, 2)
    trainer.buffer_append(experience([6, 9]))
    trainer.buffer.end("buffer_extend")
    report = trainer.fit(total_steps=5, update_steps=2)
    assert trainer.steps == [3, 3, 3]
    assert (report.steps, report.trained, report.ended_by) == (3, 9, "all its makers have ended")
    assert trainer.pushes == 2
    with pytest.raises(ConfigError, match="found update_steps=0; wanted a whole number of 1 or more"):
        trainer.fit(5, 0)


def test_a_run_folder_gets_metrics_spans_and_samples(make_maker, make_trainer, pipeline, loader, tmp_path):
    maker = make_maker("m", ["t"], run_dir=str(tmp_path))
    trainer = make_trainer("t", ["m"], train_batch_size=4, run_dir=str(tmp_path))
    pipeline.run([lambda: maker.workingloop(loader(4, 4, 4)), lambda: trainer.fit(3, 1)])
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert {span.name for span in read_trace(tmp_path / "trace-m.json")} >= {"generate", "reward", "sync"}
    assert {span.name for span in read_trace(tmp_path / "trace-t.json")} >= {"sync"}
    assert len((tmp_path / "samples" / "m.jsonl").read_text().splitlines()) == 2
    assert "<html" in write_report(tmp_path).read_text()


def test_pretraining_text_has_its_share_of_the_loss(make_maker, make_trainer, pipeline, loader):
    """A text that the policy repeats becomes likely, although the reward says nothing about it."""
    text = torch.tensor([[40, 41, 42, 43, 44, 45]])
    lost = {}
    for coef in (0.0, 0.9):
        options = {"ptx_coef": coef, "ptx_loader_fn": lambda: [text]} if coef else {}
        maker = make_maker("m", ["t"])
        trainer = make_trainer("t", ["m"], train_batch_size=4, actor_lr=1e-2, **options)
        reports = pipeline.run([lambda m=maker: m.workingloop(loader(*[4] * 12)), lambda t=trainer: t.fit(12, 1)])
        with torch.no_grad():
            found = token_logprobs(trainer.trainer.policy, text, torch.tensor([6]))["logprobs"]
        lost[coef] = -float(found.sum()) / 5
        assert ("ptx/loss" in reports[1].metrics[0]) == bool(coef)
    assert lost[0.9] < 0.5 * lost[0.0]
    with pytest.raises(ConfigError, match=r"found ptx_coef=0.5 and no ptx_loader_fn"):
        make_trainer("t", ["m"], ptx_coef=0.5)


@pytest.mark.parametrize("bound", [None, 0])
def test_loops_may_be_run_again(make_maker, make_trainer, pipeline, loader, bound):
    """The second time goes on with the weights and the version of the first."""
    maker = make_maker("m", ["t"], sync_models_from_trainers=True)
    trainer = make_trainer("t", ["m"], train_batch_size=4, max_staleness=bound)
    for round in (1, 2):

        def loop():
            while trainer.buffer.closed:  # a trainer that has ended says so to makers, until its next fit begins
                time.sleep(0.001)
            return maker.workingloop(loader(4, 4, 4))

        reports = pipeline.run([loop, lambda: trainer.fit(3, 1)])
        assert balance(reports)["trained"] == 12
        assert (reports[1].steps, reports[1].version) == (3, 3 * round)
        if bound == 0:
            assert {step["staleness/max"] for step in reports[1].metrics} == {0}


def test_a_trainer_that_nobody_feeds_says_so_early(make_maker, make_trainer, pipeline, loader):
    """D37: not at its deadline."""
    maker = make_maker("m", ["fed"])
    make_trainer("fed", [])
    starving = make_trainer("starving", ["m"], join_timeout=0.2)
    fed = pipeline.parts["fed"]
    with pytest.raises(PlacementError, match=r"starving starves: no maker has joined .*weights to \(m\)"):
        pipeline.run([lambda: starving.fit(1, 1), lambda: fed.fit(1, 1), lambda: maker.workingloop(loader(8), 1)])


def test_a_maker_that_nobody_sends_weights_to_says_so_early(make_maker, make_trainer, pipeline, loader):
    maker = make_maker("m", ["t"], sync_models_from_trainers=True, join_timeout=0.2)
    trainer = make_trainer("t", [])
    with pytest.raises(PlacementError, match=r"m waits for its first weights .*none of t names it"):
        pipeline.run([lambda: maker.workingloop(loader(8), 1), lambda: trainer.fit(1, 1)])


def test_a_trainer_that_comes_late_is_waited_for(make_maker, make_trainer, pipeline, loader):
    """Each names the other: then only the deadline ends the wait."""
    maker = make_maker("m", ["t"], sync_models_from_trainers=True, join_timeout=0.2)
    trainer = make_trainer("t", ["m"], join_timeout=0.2)

    def late():
        time.sleep(1.0)
        return trainer.fit(1, 1)

    made, trained = pipeline.run([lambda: maker.workingloop(loader(8), 1), late])
    assert balance([made, trained])["trained"] == 8
