"""Addresses of clients: one spelling each, and what one client is bounded by."""

from __future__ import annotations

import contextlib
import ipaddress

__all__ = ["bounded_by", "plain"]

NETWORK = 64  # bits that tell one client of IPv6 from others: the rest is its own to choose


def plain(host: str) -> str:
    """One spelling of an address: a socket for both families has those of IPv4 as of IPv6."""
    if ":" in host:
        with contextlib.suppress(ValueError):
            address = ipaddress.IPv6Address(host)
            return str(address.ipv4_mapped or address)
    return host


def bounded_by(host: str) -> str:
    """The address, or for IPv6 its network of 64 bits; "" for what has none."""
    host = plain(host)
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network(f"{host.partition('%')[0]}/{NETWORK}", strict=False))
    except ValueError:
        return host
