"""How to ask for one seed."""


def pytest_addoption(parser):
    parser.addoption("--simulated-seed", type=int, default=None, help="play this seed of the simulation only")
