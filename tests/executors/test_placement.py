"""Which rank goes where: decided from bundles and nodes alone, so mostly provable without a cluster of many nodes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from executors import placement
from executors.base import ResourcesUnavailableError


def node(name: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": f"ip-{name}", "Alive": True, "Resources": resources}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("a", CPU=4.0, GPU=3.0), node("b", CPU=8.0, GPU=4.0), {**node("c", CPU=99.0), "Alive": False}]
    monkeypatch.setattr(placement.ray, "nodes", lambda: nodes)


def test_tensor_parallel_ranks_share_a_node_and_stages_take_the_next() -> None:
    bundles = {index: {"GPU": 1.0} for index in range(6)}
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "b"}
    assert placement._assign(bundles, nodes, 2, 2, {"GPU": 1.0}) == [0, 2, 1, 3]
    assert placement._assign(bundles, nodes, 3, 2, {"GPU": 1.0}) == [0, 2, 4, 1, 3, 5]
    assert placement._assign(bundles, nodes, 4, 1, {"GPU": 1.0}) == [0, 1, 2, 3]
    assert placement._assign(bundles, nodes, 7, 1, {"GPU": 1.0}) is None


def test_bundles_without_the_resource_are_passed_over_and_large_ones_hold_several_ranks() -> None:
    bundles = {0: {"CPU": 1.0}, 1: {"GPU": 2.0, "CPU": 1.0}, 2: {"GPU": 1.0}}
    nodes = dict.fromkeys(bundles, "a")
    assert placement._assign(bundles, nodes, 3, 1, {"GPU": 1.0}) == [1, 1, 2]


def test_fractions_fill_a_resource_exactly() -> None:
    assert placement._fits({"GPU": 1.0}, {"GPU": 0.1}) == 10
    assert placement._fits({"GPU": 1.0, "CPU": 3.0}, {"GPU": 0.3, "CPU": 2.0}) == 1
    assert placement._fits({}, {"GPU": 0.3}) == 0


def test_places_count_the_workers_of_each_node_in_rank_order(two_nodes: None) -> None:
    places = placement._places([0, 1, 1, 0], {0: "a", 1: "b"})
    assert [(p.node_ip, p.local_rank, p.num_workers_on_node) for p in places] == [
        ("ip-a", 0, 2), ("ip-b", 0, 2), ("ip-b", 1, 2), ("ip-a", 1, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bundles", "strategy", "possible"),
    [
        ([{"GPU": 4.0}], "PACK", True),
        ([{"GPU": 4.0}] * 2, "PACK", False),
        ([{"GPU": 1.0}] * 7, "PACK", True),
        ([{"GPU": 1.0}] * 8, "PACK", False),
        ([{"GPU": 1.0}] * 4, "STRICT_PACK", True),
        ([{"GPU": 1.0}] * 5, "STRICT_PACK", False),
        ([{"GPU": 3.0}] * 2, "STRICT_SPREAD", True),
        ([{"GPU": 1.0}] * 3, "STRICT_SPREAD", False),
        ([{"TPU": 1.0}], "PACK", False),
    ],
)
def test_what_never_fits_is_known_before_asking_for_it(
    two_nodes: None, bundles: list[dict[str, float]], strategy: str, possible: bool
) -> None:
    assert (placement._never_fits(bundles, strategy) is None) == possible


def test_a_refusal_lists_what_is_needed_and_each_nodes_resources(
    two_nodes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"a": {"GPU": 1.0}, "b": {}}
    monkeypatch.setattr(placement.ray._private.state, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(placement, "remove_orphaned_placement_groups", lambda: None)
    with pytest.raises(ResourcesUnavailableError) as error:
        placement._place_in_own(4, 2, {"GPU": 1.0}, "PACK", 0.0)
    assert str(error.value) == (
        "tensor_parallel_size 4 × pipeline_parallel_size 2 needs 8 workers with 1 GPU each, more than the cluster can "
        "give, even when it is idle; it has node ip-a: 3 GPU (1 GPU free), node ip-b: 4 GPU (0 GPU free)"
    )


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_nodes_that_may_join_are_waited_for_only_if_asked() -> None:
    too_much = {"CPU": 1000.0}
    with pytest.raises(ResourcesUnavailableError, match=r"even when it is idle; it has node [^;]*$"):
        placement.place_workers(2, 1, too_much, strategy=None, deadline_s=time.monotonic() + 60)
    with pytest.raises(ResourcesUnavailableError, match=r"even when it is idle; it has .*; waited \d+ s"):
        placement.place_workers(2, 1, too_much, strategy=None, deadline_s=time.monotonic(), wait_for_nodes=True)
    groups = ray.util.placement_group_table().values()
    assert not [group for group in groups if group["state"] != "REMOVED"], "a group is left behind"
