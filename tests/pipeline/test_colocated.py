"""The colocated program on the worker-group layer: one process, and experience that never comes to the driver."""

import io

import pytest

from hocket.observe.console import make_console
from hocket.run.cluster import cluster
from hocket.run.folder import RunFolder
from hocket.run.prepare import check_input, prepare
from hocket.run.session import Session
from hocket.run.start import OneProcess
from hocket.single_controller import DataProtoFuture

pytestmark = pytest.mark.ray


def test_experience_goes_from_maker_to_trainer_as_futures(make_config, ray_address):
    config = make_config(placement="colocated", ray={"address": ray_address})
    folder = RunFolder(config)
    console = make_console(title="test", total_steps=2, stream=io.StringIO())
    session = Session(config, folder, prepare(check_input(config), folder.path, print), console)
    with cluster(ray_address, config.placement.bundles):
        maker, trainer = OneProcess(session, config.placement)()
        assert maker.workers is trainer.workers  # one set of processes, two views
        maker.receive(*trainer.publish(0))
        experience = [maker.make(unit, at_least=0) for unit in session.units(0)]
        assert experience
        assert all(isinstance(one, DataProtoFuture) for one in experience)
        samples = sum(session.samples_of(unit) for unit in session.units(0))
        assert trainer.train(experience, step=0)["samples"] == samples
        assert sum(map(len, (one.get() for one in experience))) == samples
