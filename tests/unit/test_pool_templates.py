"""Base job templates: what Prefect's workers expect of them, and what a training run needs on top."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.templating import apply_values

FOLDER = Path(__file__).parents[2] / "infra" / "pools"
KUBERNETES = json.loads((FOLDER / "kubernetes.json").read_text())
SLURM = json.loads((FOLDER / "slurm.json").read_text())
POOLS = {"kubernetes": KUBERNETES, "process": SLURM}
PUBLISHED: dict[str, Any] = {
    kind: worker["default_base_job_configuration"]
    for group in json.loads(
        files("prefect.server.api.collections_data.views").joinpath("aggregate-worker-metadata.json").read_text()
    ).values()
    for kind, worker in group.items()
    if kind in POOLS
}
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def placeholders(value: object) -> set[str]:
    return set(re.findall(r"\{\{\s*([\w.]+)\s*\}\}", json.dumps(value)))


def rendered(template: dict[str, Any], **values: object) -> Any:
    """The job of a template with its defaults, as a worker makes it."""
    properties = template["variables"]["properties"]
    defaults = {name: p["default"] for name, p in properties.items() if "default" in p}
    return apply_values(template["job_configuration"], {"name": "run", **defaults, **values})


@pytest.mark.parametrize("kind", POOLS)
def test_every_placeholder_is_a_variable_and_every_variable_is_used(kind: str) -> None:
    template = POOLS[kind]
    assert placeholders(template["job_configuration"]) == template["variables"]["properties"].keys()


@pytest.mark.parametrize("kind", POOLS)
def test_every_variable_is_typed_told_and_its_default_is_of_that_type(kind: str) -> None:
    for name, variable in POOLS[kind]["variables"]["properties"].items():
        assert variable["title"], name
        assert variable["description"], name
        if "default" in variable:
            assert isinstance(variable["default"], TYPES[variable["type"]]), name
            assert not isinstance(variable["default"], bool) or variable["type"] == "boolean", name


@pytest.mark.parametrize("kind", POOLS)
def test_what_prefects_own_worker_knows_is_all_there(kind: str) -> None:
    ours, theirs = POOLS[kind], PUBLISHED[kind]
    assert ours["job_configuration"].keys() == theirs["job_configuration"].keys()
    assert ours["variables"]["properties"].keys() >= theirs["variables"]["properties"].keys()
    for name, variable in theirs["variables"]["properties"].items():
        assert ours["variables"]["properties"][name].get("type") == variable.get("type"), name
    assert ours["variables"].get("definitions") == theirs["variables"].get("definitions")


def leaves(value: object, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in leaves(part, (*path, key)).items()}
    if isinstance(value, list):
        return {k: v for index, part in enumerate(value) for k, v in leaves(part, (*path, index)).items()}
    return {path: value}


def test_the_kubernetes_job_is_the_workers_own_with_more() -> None:
    """The worker refuses a manifest whose fixed fields differ from its own."""
    ours, theirs = (t["job_configuration"]["job_manifest"] for t in (KUBERNETES, PUBLISHED["kubernetes"]))
    assert leaves(theirs).items() <= leaves(ours).items()


def test_a_pod_has_a_whole_node_of_gcds_and_no_other_of_the_pool_beside_it() -> None:
    spec = rendered(KUBERNETES)["job_manifest"]["spec"]["template"]
    container = spec["spec"]["containers"][0]
    assert container["resources"]["limits"]["amd.com/gpu"] == container["resources"]["requests"]["amd.com/gpu"] == 8
    (rule,) = spec["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= spec["metadata"]["labels"].items()
    assert spec["spec"]["nodeSelector"]


def test_a_pod_has_shared_memory_scratch_and_the_bundle_where_the_image_looks() -> None:
    job = rendered(KUBERNETES)
    spec = job["job_manifest"]["spec"]["template"]["spec"]
    mounts = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[mounts[job["env"]["TIDE_TARGET_BUNDLE"]]]["persistentVolumeClaim"]["readOnly"]
    assert job["env"]["TIDE_HOME"].startswith("/scratch/")


def test_a_pod_is_tried_once_ends_in_time_and_is_cleaned_up() -> None:
    spec = rendered(KUBERNETES)["job_manifest"]["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


def test_secrets_come_from_kubernetes_and_stand_in_no_template() -> None:
    (source,) = rendered(KUBERNETES)["job_manifest"]["spec"]["template"]["spec"]["containers"][0]["envFrom"]
    assert source == {"secretRef": {"name": "tide-train"}}
    for template in POOLS.values():
        names = template["variables"]["properties"]["env"]["default"]
        assert not [name for name in names if re.search(r"SECRET|KEY|PASSWORD|AUTH", name)]
        assert names["TIDE_TRAIN_DEVICE"] == "gpu"


def test_a_pod_runs_as_the_images_user_without_privileges() -> None:
    spec = rendered(KUBERNETES)["job_manifest"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_slurm_job_runs_the_command_of_the_deployment_on_one_node() -> None:
    command = rendered(SLURM, command="python -m prefect.engine", account="ml")["command"].split()
    options, inner = command[: command.index("--")], command[command.index("--") + 1 :]
    assert options[:3] == ["python", "-m", "infra.pools.slurm"]
    assert {"--partition=mi250", "--account=ml", "--gres=gpu:8", "--exclusive"} < set(options)
    assert inner == ["python", "-m", "prefect.engine"]
