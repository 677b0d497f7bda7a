"""`titanrl manifest`: the Kubernetes objects of a run, checked without a cluster."""

from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.cluster.kubernetes import check_mesh
from tests.cluster.requests import Refused
from titanrl.commands import jobs
from titanrl.commands.jobs import objects
from titanrl.config import load_config
from titanrl.hosts.kubernetes import mesh_name, object_name, token_of

PODS = (
    "device=cpu",
    "hosts.kind=kubernetes",
    "hosts.trusted_network=true",
    "hosts.kubernetes.image=registry/titan:1",
    "hosts.kubernetes.volumes=[{claim: shared, mount_path: /mnt/titan}, {claim: models, mount_path: /models, read_only: true}]",
)
ALL = (
    "hosts.kubernetes.node_selector={pool: gpu}",
    "hosts.kubernetes.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    "hosts.kubernetes.labels={kueue.x-k8s.io/queue-name: research}",
    "hosts.kubernetes.env={NCCL_SOCKET_IFNAME: eth0}",
    "hosts.kubernetes.cpu='64'",
    "hosts.kubernetes.memory=800Gi",
    "hosts.kubernetes.shared_memory=256Gi",
    "hosts.kubernetes.controller_memory=64Gi",
    "hosts.kubernetes.pod_spec={priorityClassName: high, imagePullSecrets: [{name: registry}]}",
    "hosts.kubernetes.namespace=research",
)
MODELS = {
    "ServiceAccount": client.V1ServiceAccount,
    "Role": client.V1Role,
    "RoleBinding": client.V1RoleBinding,
    "ConfigMap": client.V1ConfigMap,
    "Job": client.V1Job,
}
Json = dict[str, Any]


def manifest(*overrides: str, resume: str | None = None) -> list[Json]:
    return objects(load_config("configs/quickstart.yaml", [*PODS, *overrides]), "name: quickstart\n", resume)


def named(found: list[Json], kind: str) -> list[Json]:
    return [one for one in found if one["kind"] == kind]


@pytest.mark.parametrize("overrides", [(), ALL])
def test_meshes_match_operator_schema(overrides: tuple[str, ...]) -> None:
    meshes = named(manifest(*overrides), "MonarchMesh")
    for mesh in meshes:
        check_mesh(mesh)
    assert [mesh["metadata"]["name"] for mesh in meshes] == ["quickstarttrainers", "quickstartgenerators"]


def test_schema_rejects_wrong_and_unknown_fields() -> None:
    mesh = named(manifest(), "MonarchMesh")[0]
    with pytest.raises(Refused, match=r"replicas: 'two' is not of type 'integer'"):
        check_mesh({**mesh, "spec": {**mesh["spec"], "replicas": "two"}})
    mesh["spec"]["podTemplate"]["spec"]["nodeSelectors"] = {}
    with pytest.raises(Refused, match="'nodeSelectors' was unexpected"):
        check_mesh(mesh)


@pytest.mark.parametrize("overrides", [(), ALL])
def test_other_objects_match_kubernetes_schema(overrides: tuple[str, ...]) -> None:
    found = [one for one in manifest(*overrides) if one["kind"] != "MonarchMesh"]
    assert [one["kind"] for one in found] == list(MODELS)
    for one in found:
        known = client.ApiClient().sanitize_for_serialization(MODELS[one["kind"]].from_dict(one))
        assert known == one, "the client drops fields that Kubernetes does not have"


def test_pods_request_configured_resources() -> None:
    trainers, _ = named(manifest(*ALL, "hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2"), "MonarchMesh")
    assert trainers["spec"]["replicas"] == 2
    assert trainers["metadata"]["namespace"] == "research"
    template = trainers["spec"]["podTemplate"]
    assert template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["priorityClassName"] == "high"
    assert spec["automountServiceAccountToken"] is False
    assert spec["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Gi"}},
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "volume-1", "persistentVolumeClaim": {"claimName": "models"}},
    ]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "800Gi"}, "no accelerators on CPU"
    assert container["volumeMounts"][2] == {"name": "volume-1", "mountPath": "/models", "readOnly": True}
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
    assert container["command"] == ["python", "-u", "-m", "titanrl.hosts.holder", "listen", "26601"]
    assert container["workingDir"] == "/mnt/titan"


def test_colocated_generators_have_no_separate_pods() -> None:
    (trainers,) = named(manifest("placement.generator=trainers"), "MonarchMesh")
    assert trainers["metadata"]["name"].endswith("trainers")


def test_pods_request_accelerators() -> None:
    for mesh in named(manifest("device=cuda", "hosts.devices_per_host=4"), "MonarchMesh"):
        (container,) = mesh["spec"]["podTemplate"]["spec"]["containers"]
        assert container["resources"] == {"requests": {"nvidia.com/gpu": "4"}, "limits": {"nvidia.com/gpu": "4"}}


def test_controller_has_service_account_and_job_in_namespace() -> None:
    found = manifest(*ALL)
    (binding,), (job,) = named(found, "RoleBinding"), named(found, "Job")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "titanrl-quickstart", "namespace": "research"}]
    spec = job["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "titanrl-quickstart"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["containers"][0]["command"][3:] == ["titanrl.commands", "train", "--config", "/run/titanrl/run.yaml"]
    assert (job["spec"]["backoffLimit"], job["spec"]["ttlSecondsAfterFinished"]) == (0, 300)
    own = manifest("hosts.kubernetes.service_account=mine")
    assert not named(own, "Role")
    assert named(own, "Job")[0]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_resumed_run_reads_its_own_configuration() -> None:
    (job,) = named(manifest(resume="/mnt/titan/runs/a"), "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][4:] == ["train", "--resume", "/mnt/titan/runs/a"]


def test_only_prints_one_part_of_the_manifest() -> None:
    config = load_config("configs/quickstart.yaml", PODS)
    assert {one["kind"] for one in objects(config, "", only="meshes")} == {"MonarchMesh"}
    assert [one["kind"] for one in objects(config, "", only="controller")] == list(MODELS)


def test_doctor_job_checks_hosts_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    jobs.manifest(["--config", "configs/quickstart.yaml", *PODS, "--doctor"])
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert {one["metadata"]["name"] for one in found} == {"titanrl-quickstart-doctor"}
    (container,) = named(found, "Job")[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["doctor", "--config", "/run/titanrl/run.yaml"]
    assert named(found, "MonarchMesh") == []
    with pytest.raises(SystemExit):
        jobs.manifest(["--config", "configs/quickstart.yaml", *PODS, "--doctor", "--only", "meshes"])
    assert "cannot be combined" in capsys.readouterr().err


def test_each_manifest_has_a_new_secret() -> None:
    first, second = (token_of(named(manifest(), "MonarchMesh")[0]) for _ in range(2))
    assert len(first) == 32
    assert first != second


@pytest.mark.parametrize(
    ("run", "mesh", "label"),
    [
        ("qwen3_32b-A", "qwen332batrainers", "titanrl-qwen3-32b-a"),
        ("1st", "run1sttrainers", "titanrl-1st"),
        ("é", "runtrainers", "titanrl"),
    ],
)
def test_names_are_valid_in_kubernetes(run: str, mesh: str, label: str) -> None:
    assert (mesh_name(run, "trainers"), object_name(run)) == (mesh, label)


def test_long_names_are_truncated() -> None:
    assert len(mesh_name("a" * 100, "generators", "0123ab") + "-svc") == 63
    assert len(object_name("a" * 100)) == 62


def test_command_prints_the_configuration_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    jobs.manifest(["--config", "quickstart", *PODS, "num_steps=7"])
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["kind"] for one in found] == ["MonarchMesh", "MonarchMesh", *MODELS]
    text = named(found, "ConfigMap")[0]["data"]["run.yaml"]
    assert "output_dir" not in text, "only keys that were written"
    assert yaml.safe_load(text)["num_steps"] == 7


def test_command_rejects_other_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        jobs.manifest(["--config", "quickstart"])
    assert "set hosts.kind to kubernetes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        jobs.manifest(["--config", "quickstart", "hosts.kind=kubernetes"])
    assert "hosts.kubernetes.image" in capsys.readouterr().err
