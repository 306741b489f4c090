"""Every sample is in exactly one account."""

import threading

import pytest

from hocket.errors import HocketError, RewardError
from hocket.run.ledger import Ledger


def test_the_life_of_samples():
    ledger = Ledger()
    ledger.started(8)
    ledger.started(8)
    ledger.made(8)
    ledger.trained(8)
    with pytest.raises(RewardError), ledger.failing(3):
        raise RewardError("broken")
    with ledger.failing(2):
        pass
    assert ledger.balance() == {
        "ledger/produced": 16.0,
        "ledger/trained": 8.0,
        "ledger/buffered": 0.0,
        "ledger/in_flight": 5.0,
        "ledger/failed": 3.0,
    }


def test_an_empty_ledger_balances():
    assert sum(Ledger().balance().values()) == 0


@pytest.mark.parametrize("act", [lambda ledger: ledger.trained(1), lambda ledger: ledger.made(9)])
def test_more_than_there_was_does_not_balance(act):
    ledger = Ledger()
    ledger.started(8)
    act(ledger)
    with pytest.raises(HocketError, match=r"the ledger does not balance: produced 8, accounts .*-1"):
        ledger.balance()


def test_samples_out_of_nowhere_do_not_balance():
    ledger = Ledger()
    ledger.accounts["trained"] += 1
    with pytest.raises(HocketError, match="does not balance: produced 0"):
        ledger.balance()


def test_it_balances_at_every_moment_under_threads():
    ledger = Ledger()

    def work():
        for _ in range(200):
            ledger.started(4)
            ledger.made(4)
            ledger.trained(4)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ledger.balance()
    assert ledger.balance()["ledger/trained"] == 3200
