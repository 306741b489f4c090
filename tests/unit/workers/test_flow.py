"""The self-driven flow ends for every topology and every choice of counts, and its ledger balances."""

import pytest

from hocket.workers import balance

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
