"""Where workers run: in a placement group of the executor's own, or the one its process already sits in.

Called by `executors.ray_executor`. An own group has one bundle for each pipeline stage, so that its TP ranks share a
node, wherever a node is large enough; else one for each rank. Once the group is up, rank → bundle → node is fixed.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from executors.base import ExecutorFailedError, ResourcesUnavailableError
from executors.placement_guard import PlacementGuard

logger = logging.getLogger(__name__)

NAME_PREFIX = "engine-actors"
_POLL_S = 0.25
_FIRST_WAIT_MESSAGE_S = 5.0

Resources = Mapping[str, float]


@dataclass(frozen=True)
class WorkerPlace:
    """Where one rank runs.

    Attributes:
        local_rank: Number among this engine's workers on the node, in rank order.
        num_workers_on_node: This engine's workers on the node.
    """

    rank: int
    bundle_index: int
    node_id: str
    node_ip: str
    local_rank: int
    num_workers_on_node: int


@dataclass(frozen=True)
class Placement:
    """A placement group that is up, and the ranks' places in it, in rank order.

    Attributes:
        guard: Removes the executor's own group should this process be killed, where Ray would not.
    """

    group: PlacementGroup
    is_own: bool
    places: tuple[WorkerPlace, ...]
    guard: PlacementGuard | None = None

    def remove(self) -> None:
        """Give the group back, with everything that runs in it, if it is the executor's own. Idempotent."""
        if self.is_own:
            ray.util.remove_placement_group(self.group)
        if self.guard is not None:
            self.guard.release()


def place_workers(
    tp_size: int,
    pp_size: int,
    demand: Resources,
    *,
    strategy: str | None,
    deadline_s: float,
    wait_for_nodes: bool = False,
) -> Placement:
    """Find room for tp_size × pp_size workers, waiting for busy resources until the deadline.

    The caller's current placement group is used where it captures child tasks, or has room. Otherwise one is made.

    Args:
        demand: Resources of one worker, e.g. {"CPU": 1.0}.
        strategy: Of an own group; None is "PACK".
        deadline_s: `time.monotonic()` of the deadline.
        wait_for_nodes: See ParallelConfig.

    Raises:
        ResourcesUnavailableError: The cluster (or the caller's group) never has room, or had none in time.
    """
    current = ray.util.get_current_placement_group()
    if current is not None:
        if wait_for_nodes:
            _wait_until_rescheduled(current, deadline_s)
        captures = ray._private.worker.global_worker.should_capture_child_tasks_in_placement_group
        bundles = _free_bundles(current, available=not captures)
        if captures or sum(_fits(bundle, demand) for bundle in bundles.values()) >= tp_size * pp_size:
            return _place_in_current(current, tp_size, pp_size, demand, deadline_s)
    return _place_in_own(tp_size, pp_size, demand, strategy or "PACK", deadline_s, wait_for_nodes)


def owner_name() -> str:
    """What the names of this process's placement groups contain: its actor id, or job id for a driver."""
    context = ray.get_runtime_context()
    actor_id = context.get_actor_id()
    return actor_id if actor_id is not None else f"job-{context.get_job_id()}"


def remove_placement_groups_of(owner: str) -> None:
    """Remove every placement group that the executor of `owner` (an actor id in hex) made.

    For whoever sees an EngineCore actor die and does not want to wait for the group's guard.
    """
    _remove_groups(lambda group_owner: group_owner == owner)


def remove_orphaned_placement_groups() -> None:
    """Remove the groups of executors whose actor has died, e.g. with its node, and so with the group's guard."""
    _remove_groups(_is_dead_actor)


def _remove_groups(is_wanted: Callable[[str], bool]) -> None:
    for group_id, info in ray.util.placement_group_table().items():
        name, state = info["name"], info["state"]
        if not name.startswith(NAME_PREFIX + ".") or state == "REMOVED":
            continue
        if is_wanted(name.split(".")[1]):
            logger.info("removing placement group %s, left behind by an engine that died", name)
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))


def _is_dead_actor(owner: str) -> bool:
    if owner.startswith("job-"):
        return False  # Ray removes a driver's groups.
    info = ray._private.state.state.actor_table(owner)
    return bool(info) and info["State"] == "DEAD"


def _place_in_own(
    tp_size: int, pp_size: int, demand: Resources, strategy: str, deadline_s: float, wait_for_nodes: bool = False
) -> Placement:
    remove_orphaned_placement_groups()
    stage = {name: amount * tp_size for name, amount in demand.items()}
    by_stage = _never_fits([stage] * pp_size, strategy) is None
    bundles = [stage] * pp_size if by_stage else [dict(demand)] * (tp_size * pp_size)
    problem = None if by_stage else _never_fits(bundles, strategy)
    if problem is not None and not wait_for_nodes:
        raise ResourcesUnavailableError(_shortage(tp_size, pp_size, demand, problem))
    name = f"{NAME_PREFIX}.{owner_name()}.{uuid.uuid4().hex[:8]}"
    group = ray.util.placement_group(bundles, strategy=strategy, name=name)
    guard = _guard_of(group)
    lost_its_node = False

    def is_settled() -> bool:
        nonlocal lost_its_node
        # Whole seconds are Ray's resolution here.
        if group.wait(timeout_seconds=1):
            return True
        lost_its_node = by_stage and _never_fits(bundles, strategy) is not None
        return lost_its_node

    try:
        _wait_until(
            is_settled,
            deadline_s,
            lambda: _shortage(tp_size, pp_size, demand, problem or "the rest is in use"),
        )
        if lost_its_node:  # smaller bundles may fit
            Placement(group, True, (), guard).remove()
            return _place_in_own(tp_size, pp_size, demand, strategy, deadline_s, wait_for_nodes)
        nodes = _bundle_nodes(group)
        order = [rank // tp_size if by_stage else rank for rank in range(tp_size * pp_size)]
        return Placement(group, True, _places(order, nodes), guard)
    except BaseException:
        Placement(group, True, (), guard).remove()
        raise


def _guard_of(group: PlacementGroup) -> PlacementGuard | None:
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None  # Ray removes a driver's groups.
    return PlacementGuard(context.gcs_address, group.id.hex())


def _wait_until_rescheduled(group: PlacementGroup, deadline_s: float) -> None:
    """A group that lost a node is placed anew by Ray, when there is room."""

    def is_up() -> bool:
        up = ray.util.placement_group_table(group)["state"] == "CREATED"
        if not up:
            time.sleep(_POLL_S)
        return up

    _wait_until(is_up, deadline_s, lambda: "the current placement group lost a node, and no other has room for it")


def _place_in_current(
    group: PlacementGroup, tp_size: int, pp_size: int, demand: Resources, deadline_s: float
) -> Placement:
    nodes = _bundle_nodes(group)

    def shortage(reason: str) -> str:
        free = _free_bundles(group, available=True)
        bundles = ", ".join(
            f"bundle {index} on {_node_ip(nodes[index])}: {_describe(total)} ({_describe(free[index])} free)"
            for index, total in _free_bundles(group, available=False).items()
        )
        return (
            f"{tp_size * pp_size} workers with {_describe(demand)} each do not fit into the current placement group, "
            f"{reason}; it has {bundles}"
        )

    if _assign(_free_bundles(group, available=False), nodes, tp_size, pp_size, demand) is None:
        raise ResourcesUnavailableError(shortage("even when it is empty"))
    order: list[int] | None = None

    def found() -> bool:
        nonlocal order
        order = _assign(_free_bundles(group, available=True), nodes, tp_size, pp_size, demand)
        if order is None:
            time.sleep(_POLL_S)
        return order is not None

    _wait_until(found, deadline_s, lambda: shortage("the rest is in use"))
    return Placement(group, False, _places(order or [], nodes))


def _assign(
    bundles: Mapping[int, Resources], nodes: Mapping[int, str], tp_size: int, pp_size: int, demand: Resources
) -> list[int] | None:
    """Bundle of each rank: each stage on the first node with room for all its TP ranks, else wherever there is room."""
    slots = [index for index, bundle in bundles.items() for _ in range(_fits(bundle, demand))]
    if len(slots) < tp_size * pp_size:
        return None
    order: list[int] = []
    for _ in range(pp_size):
        room = Counter(nodes[index] for index in slots)
        node = next((nodes[index] for index in slots if room[nodes[index]] >= tp_size), None)
        chosen = [index for index in slots if node is None or nodes[index] == node][:tp_size]
        for index in chosen:
            slots.remove(index)
        order += chosen
    return order


def _places(order: list[int], nodes: Mapping[int, str]) -> tuple[WorkerPlace, ...]:
    """`order` is the bundle of each rank."""
    total = Counter(nodes[index] for index in order)
    seen: Counter[str] = Counter()
    places = []
    for rank, index in enumerate(order):
        node = nodes[index]
        places.append(WorkerPlace(rank, index, node, _node_ip(node), seen[node], total[node]))
        seen[node] += 1
    return tuple(places)


def _wait_until(is_ready: Callable[[], bool], deadline_s: float, shortage: Callable[[], str]) -> None:
    start = time.monotonic()
    told = False
    while not is_ready():
        now = time.monotonic()
        if now >= deadline_s:
            raise ResourcesUnavailableError(f"{shortage()}; waited {now - start:.0f} s")
        if not told and now - start > _FIRST_WAIT_MESSAGE_S:
            told = True
            logger.warning("waiting for resources, %.0f s at most: %s", deadline_s - now, shortage())


def _never_fits(bundles: list[dict[str, float]], strategy: str) -> str | None:
    """Why even the empty cluster could not hold these equal bundles; None if it could."""
    rooms = [_fits(node["Resources"], bundles[0]) for node in _alive_nodes()]
    if strategy == "STRICT_PACK":
        return (
            None if max(rooms, default=0) >= len(bundles) else "placement_strategy STRICT_PACK needs one node for all"
        )
    if strategy == "STRICT_SPREAD":
        enough = sum(room > 0 for room in rooms) >= len(bundles)
        return None if enough else "placement_strategy STRICT_SPREAD needs a node for each"
    return None if sum(rooms) >= len(bundles) else "even when it is idle"


def _shortage(tp_size: int, pp_size: int, demand: Resources, reason: str) -> str:
    available = ray._private.state.available_resources_per_node()
    nodes = []
    for node in _alive_nodes():
        total = {name: node["Resources"].get(name, 0.0) for name in demand}
        free = {name: available.get(node["NodeID"], {}).get(name, 0.0) for name in demand}
        nodes.append(f"node {node['NodeManagerAddress']}: {_describe(total)} ({_describe(free)} free)")
    return (
        f"tensor_parallel_size {tp_size} × pipeline_parallel_size {pp_size} needs {tp_size * pp_size} workers with "
        f"{_describe(demand)} each, more than the cluster can give, {reason}; it has {', '.join(nodes)}"
    )


def _fits(resources: Resources, demand: Resources) -> int:
    """How many workers the resources hold. The tolerance is for sums of fractions."""
    return min(int((resources.get(name, 0.0) + 1e-6) / amount) for name, amount in demand.items() if amount > 0)


def _free_bundles(group: PlacementGroup, *, available: bool) -> dict[int, dict[str, float]]:
    """By bundle index, its resources: all of them, or those not in use."""
    bundles = {int(index): dict(bundle) for index, bundle in ray.util.placement_group_table(group)["bundles"].items()}
    if not available:
        return bundles
    # Ray names a bundle's share of a resource so; what is used up has no entry.
    free = ray.available_resources()
    group_id = group.id.hex()
    return {
        index: {name: free.get(f"{name}_group_{index}_{group_id}", 0.0) for name in bundle}
        for index, bundle in bundles.items()
    }


def _bundle_nodes(group: PlacementGroup) -> dict[int, str]:
    table = ray.util.placement_group_table(group)
    nodes = {int(index): node for index, node in table["bundles_to_node_id"].items()}
    if table["state"] != "CREATED" or not all(nodes.values()):
        raise ExecutorFailedError(f"placement group {group.id.hex()} is {table['state']}, expected CREATED")
    return nodes


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _node_ip(node_id: str) -> str:
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return str(node["NodeManagerAddress"])
    return node_id


def _describe(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
