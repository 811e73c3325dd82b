"""What is wrong with an address, or with this machine, is told before anything is begun."""

from __future__ import annotations

import importlib.util
import socket
import sys
import time

import pytest

from compress.cluster.connect import connected, split_address
from compress.errors import MissingExtraError, RecipeError, ServerError

HAS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray`")


@pytest.mark.parametrize(
    "address", ["", "auto", "head", "head:", ":6379", "head:port", "head:0", "head:70000", "a b:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(RecipeError, match="--ray can't be"):
        split_address(address)


def test_rays_client_is_refused_with_the_way_that_there_is() -> None:
    with pytest.raises(RecipeError) as caught:
        split_address("ray://head:10001")
    assert "--num-cpus 0" in caught.value.mend


@pytest.mark.parametrize(("address", "parts"), [("head:6379", ("head", 6379)), ("[::1]:80", ("::1", 80))])
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError) as caught, connected("127.0.0.1:1"):
        pass
    assert ".[ray]" in caught.value.mend


@HAS_RAY
@pytest.mark.filterwarnings("ignore::FutureWarning:ray")
def test_a_port_that_nothing_listens_on_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(ServerError, match="can't reach the Ray cluster"), connected(f"127.0.0.1:{port}"):
        pass
    assert time.monotonic() - begun < 60
