"""The port where a group meets: nobody else is given it, and the store of rank 0 can listen on it."""

import socket
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from hocket.errors import PlacementError
from hocket.single_controller.processes import PortHolder


def bind(port, *, reusable=False):
    with closing(socket.socket()) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reusable)
        plain.bind(("", port))


def free_range(length):
    """The first of so many ports in a row that are free now."""
    for first in range(20000, 30000, length):
        try:
            for port in range(first, first + length):
                bind(port)
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def test_holders_of_one_range_get_its_ports_in_turn_and_then_an_error():
    first = free_range(2)
    one, two = PortHolder([first, first + 2]), PortHolder([first, first + 2])
    assert (one.port(), two.port()) == (first, first + 1)
    with pytest.raises(PlacementError, match=f"no port in .*{first}, {first + 2}.* is free"):
        PortHolder([first, first + 2])
    del one
    assert PortHolder([first, first + 2]).port() == first


def test_without_a_range_holders_get_different_ports():
    holders = [PortHolder() for _ in range(20)]
    assert len({holder.port() for holder in holders}) == 20


def test_a_plain_bind_of_a_held_port_is_refused():
    holder = PortHolder()
    with pytest.raises(OSError, match="in use"):
        bind(holder.port())


def test_a_port_that_somebody_listens_on_is_passed_over():
    first = free_range(2)
    with closing(socket.socket()) as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("", first))
        busy.listen()
        assert PortHolder([first, first + 2]).port() == first + 1


@pytest.mark.parametrize("use_libuv", [True, False])
def test_torchs_store_listens_on_a_held_port_and_is_the_only_one(use_libuv):
    holder = PortHolder()
    port, wait = holder.port(), timedelta(seconds=20)
    store = TCPStore("127.0.0.1", port, 2, True, wait, wait_for_workers=False, use_libuv=use_libuv)
    other = TCPStore("127.0.0.1", port, 2, False, wait, wait_for_workers=False, use_libuv=use_libuv)
    other.set("met", "here")
    assert store.get("met") == b"here"
    with pytest.raises(OSError, match="in use"):
        bind(port, reusable=True)
    assert PortHolder([port, port + 2]).port() == port + 1
