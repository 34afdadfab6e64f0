"""Putting an application on Ray Serve from one process and watching over it: what `engine-actors serve` does.

Starts Ray here, or joins a cluster; starts Serve at the address asked for, or uses one that runs. Waiting always says
what for; it ends where no node can come and the machine cannot hold a replica.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from engine_actors.ray_places import cluster_to_join
from engine_actors.serve.direct import can_be_direct, direct_environment, remove_direct_files
from engine_actors.serve.llm_config import LLMConfig

logger = logging.getLogger(__name__)

POLL_S = 0.5
START_ATTEMPTS = 3
"""Ray gives its own processes 30 s to start, which a busy machine may need more than once."""
DELETE_POLL_S = 0.2
QUIET_RAY = {
    # Of a Ray that is started here, whose agent otherwise wakes ten times a second for events nobody collects.
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "2",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "30",
    "REPORTER_UPDATE_INTERVAL_MS": "15000",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # of the proxy too: Ray starts its processes at 15
}
QUIET_SERVE = {
    # Serve's own 0.1 s costs 6 % of a processor in the controller and the GCS: time that workers on CPUs need.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
}
"""Environment of Ray's and Serve's processes; what the caller's own environment says counts more."""
Say = Callable[[str], None]


class LaunchError(Exception):
    """The application cannot be served; the text says why."""


@dataclass(frozen=True)
class LaunchOptions:
    """Where and how.

    Attributes:
        host: Address the HTTP server listens on.
        app_name: Of the Serve application.
        ray_address: Cluster to join ("auto", "host:port", "ray://…" is not possible); None is RAY_ADDRESS, or none: Ray
            is then started here, with this machine's processors and GPUs.
        proxy: "auto" (HAProxy where it can reach all replicas), "haproxy" or "ray".
        startup_timeout_s: For all models to load.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    app_name: str = "llm"
    route_prefix: str = "/"
    ray_address: str | None = None
    proxy: str = "auto"
    startup_timeout_s: float = 1800.0


@dataclass
class RunningApp:
    """An application that serves.

    Attributes:
        url: Without a trailing slash.
        handle: Of its ingress deployment.
        owns_ray: Ray was started here and ends with this process.
    """

    url: str
    handle: Any
    options: LaunchOptions
    owns_ray: bool

    def status(self) -> str:
        """E.g. "RUNNING", "DEPLOYING", "UNHEALTHY"."""
        from ray.serve.context import _get_global_client

        # serve.status() tells of everything there is, for 30 ms of this process and 10 of the controller.
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return "DELETED"
        state = str(client.get_serve_status(self.options.app_name).app_status.status.value)
        return "DELETED" if state == "NOT_STARTED" else state

    def stop(self, timeout_s: float) -> None:
        """Take the application down: requests in flight may go on for so long, then they are cut."""
        from ray import serve

        if not self.owns_ray:
            serve.delete(self.options.app_name, _blocking=timeout_s > 0)
            return
        try:
            self._stop_ray(timeout_s)
        finally:
            remove_direct_files()

    def _stop_ray(self, timeout_s: float) -> None:
        from ray import serve

        if timeout_s > 0:
            try:
                serve.delete(self.options.app_name, _blocking=False)
            except Exception as error:  # Ray is stopped all the same; what it raises when it is half gone is its own
                logger.warning("Serve could not drain %s, which is cut: %s", self.options.app_name, error)
                timeout_s = 0.0
            deadline_s = time.monotonic() + timeout_s
            while time.monotonic() < deadline_s and self.status() != "DELETED":
                time.sleep(DELETE_POLL_S)
        ray.shutdown()


def launch(configs: Sequence[LLMConfig], options: LaunchOptions, say: Say) -> RunningApp:
    """Serve the models; returns when they answer.

    Args:
        say: Told what is being waited for, a line at a time.

    Raises:
        LaunchError: The port is taken, the cluster has too little room, or an engine cannot start.
        ValueError: A wrong configuration.
    """
    address = options.ray_address or os.environ.get("RAY_ADDRESS")
    environment = _environment(options, address)
    os.environ.update(environment)  # before anything imports ray.serve, here and in Ray's processes
    owns_ray = _start_ray(address, say)
    try:
        url = _start_serve(options, environment)
        handle = _deploy(configs, options)
        _wait_until_running(configs, options, say, may_grow=not owns_ray)
    except BaseException:
        if owns_ray:
            ray.shutdown()
            remove_direct_files()
        raise
    return RunningApp(url, handle, options, owns_ray)


def _environment(options: LaunchOptions, address: str | None) -> dict[str, str]:
    quiet = {name: os.environ.get(name, value) for name, value in QUIET_SERVE.items()}
    if options.proxy == "ray":
        return quiet
    direct = can_be_direct(options.host, 1 if address is None else 2)
    if options.proxy == "haproxy" and not direct:
        raise LaunchError(
            f"HAProxy cannot be used with host {options.host!r}: it is missing (a part of ray[serve]), or would not "
            f"reach replicas on other nodes; use host 0.0.0.0, or proxy 'ray'"
        )
    return {**quiet, **direct_environment()} if direct else quiet


def _start_ray(address: str | None, say: Say) -> bool:
    if ray.is_initialized():
        return False
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    say("Starting Ray on this machine" if address is None else f"Joining the Ray cluster at {address}")
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(address or cluster_to_join(), include_dashboard=False if address is None else None,
                     log_to_driver=False, logging_level=logging.WARNING, namespace="engine-actors")  # fmt: skip
            break
        except Exception as error:  # Ray raises plain Exceptions here too
            ray.shutdown()
            where = "started on this machine" if address is None else f"reached at {address!r}"
            if address is not None or "timed out" not in str(error) or attempt == START_ATTEMPTS:
                raise LaunchError(f"Ray cannot be {where}: {error}") from error
            say(f"Trying again: {error}")
    return address is None


def _start_serve(options: LaunchOptions, environment: Mapping[str, str]) -> str:
    """Start Serve unless it runs already; the URL clients use."""
    from ray import serve
    from ray.serve.schema import ServeInstanceDetails  # noqa: F401  fails early where ray[serve] is not installed

    running = _running_http_config()
    if running is None:
        _check_port_is_free(options)
        controller = {"runtime_env": {"env_vars": dict(environment)}}
        try:
            serve.start(http_options={"host": options.host, "port": options.port}, controller_options=controller)
        except (RayError, RuntimeError, TimeoutError) as error:
            raise LaunchError(f"Ray Serve cannot be started: {error}") from error
        running = (options.host, options.port)
    elif running != (options.host, options.port):
        logger.warning("Serve runs already, at %s:%d; host and port asked for are ignored", *running)
    host, port = running
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{shown}:{port}{options.route_prefix.rstrip('/')}"


def _running_http_config() -> tuple[str, int] | None:
    """Host and port of a Serve that runs in this cluster."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    config = ray.get(controller.get_http_config.remote(), timeout=30)
    return str(config.host), int(config.port)


def _check_port_is_free(options: LaunchOptions) -> None:
    try:
        socket.create_server((options.host, options.port)).close()
    except OSError as error:
        raise LaunchError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error


def _deploy(configs: Sequence[LLMConfig], options: LaunchOptions) -> Any:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from engine_actors.serve.builder import build_openai_app

    app = build_openai_app({"llm_configs": list(configs)})
    try:
        target = serve.RunTarget(app, name=options.app_name, route_prefix=options.route_prefix)
        return serve.run_many([target], wait_for_applications_running=False)[0]
    except RayServeException as error:
        raise LaunchError(str(error)) from error


def _wait_until_running(configs: Sequence[LLMConfig], options: LaunchOptions, say: Say, *, may_grow: bool) -> None:
    from ray import serve

    from engine_actors.serve.resources import room_problem

    deadline_s = time.monotonic() + options.startup_timeout_s
    names = ", ".join(config.model_id for config in configs)
    say(f"Loading {names}")
    told = ""
    while True:
        app = serve.status().applications.get(options.app_name)
        state = "" if app is None else app.status.value
        if state == "RUNNING":
            return
        texts = [each.message for each in (app.deployments.values() if app else ()) if each.message]
        if state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise LaunchError(f"{names} cannot be served: {_last_lines(texts) or (app.message if app else state)}")
        problem = next(filter(None, map(room_problem, configs)), None)
        if problem is not None and not may_grow:
            raise LaunchError(problem)
        text = problem or "; ".join(text.splitlines()[0] for text in texts)
        if time.monotonic() > deadline_s:
            raise LaunchError(f"{names} is not ready after {options.startup_timeout_s:g} s: {text or state}")
        if text and text != told:
            told = text
            say(text)
        time.sleep(POLL_S)


def _last_lines(texts: Sequence[str]) -> str:
    """The ends of Serve's messages: their last line has the root cause."""
    return "; ".join(lines[-1] for text in texts if (lines := [line for line in text.splitlines() if line.strip()]))
