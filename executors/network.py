"""Which network interface gloo uses. Called by each worker process before the ranks meet."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915
"""Linux ioctl: IPv4 address of an interface (netdevice(7))."""


def use_interface_of(address: str) -> None:
    """Let gloo use the interface that has `address`, unless the user chose one by GLOO_SOCKET_IFNAME.

    Left alone it takes the address that the host's name resolves to, which on many hosts is a loopback address that
    other nodes cannot reach, or does not resolve at all.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = interface_of(address)
    if name is None:
        logger.warning("no network interface has address %s: gloo picks one by the host's name", address)
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue  # No IPv4 address.
            # struct ifreq: 16 bytes of name, then sockaddr_in with the address at offset 4.
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
