"""Promises of deploy/: Kubernetes takes the manifests, and with them a job outlives each of its pods.

The core resources are checked against the schemas of kubernetes-validate, JobSet and Kubeflow Trainer, which
it does not have, by their published fields. Then each manifest's containers run as processes, with just the
environment that it gives, and a controller restarts them as it says: see `support.kubernetes`.
"""

import fcntl
import json
import os
import re
import tomllib
from functools import cache

import pytest

from offbeat.events import ClusterView, Joined, Lost, Ready, StepFinished
from support.run_logs import entries_of
from support.source_files import ROOT

pytest.importorskip("yaml", reason="needs PyYAML: `make test-kubernetes` installs it")

import yaml

from support.kubernetes import Cluster, expand
from support.kubernetes_script import EPOCHS, GATE_STEP, SAMPLES

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSIONS = ("1.29", "1.37")  # of Kubernetes, the oldest and the newest to check against

# Published fields, of which a manifest has some. Of jobset.x-k8s.io/v1alpha2 (JobSet 0.12): the types
# JobSetSpec, Network, SuccessPolicy, FailurePolicy, FailurePolicyRule, Coordinator, ReplicatedJob. Of
# trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.3): TrainingRuntimeSpec, MLPolicy, TrainJobSpec,
# RuntimeRef, Trainer.
JOB_SET = {
    "replicatedJobs",
    "network",
    "successPolicy",
    "failurePolicy",
    "startupPolicy",
    "suspend",
    "coordinator",
}
JOB_SET |= {"managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies"}
NETWORK = {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
SUCCESS_POLICY = {"operator", "targetReplicatedJobs"}
FAILURE_POLICY = {"maxRestarts", "restartStrategy", "rules"}
RULE = {"name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"}
ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
ACTIONS |= {"RestartJob", "RestartJobAndIgnoreMaxRestarts"}
RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
COORDINATOR = {"replicatedJob", "jobIndex", "podIndex"}
REPLICATED_JOB = {"name", "groupName", "template", "replicas", "dependsOn"}
REPLICAS_MAX = 1024  # with RestartJob
RUNTIME = {"mlPolicy", "podGroupPolicy", "template"}
ML_POLICY = {"numNodes", "torch", "mpi", "flux", "jax", "xgboost"}
TRAIN_JOB = {
    "runtimeRef",
    "initializer",
    "trainer",
    "labels",
    "annotations",
    "runtimePatches",
    "suspend",
    "managedBy",
}
RUNTIME_REF = {"name", "apiGroup", "kind"}
TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}


def name_of(path):
    return path.name


@cache
def documents(path):
    return tuple(yaml.safe_load_all(path.read_text()))


def job_set_spec(manifest):
    """The spec of a JobSet, or of the one in a TrainingRuntime; None for other kinds."""
    match manifest["kind"]:
        case "JobSet":
            return manifest["spec"]
        case "TrainingRuntime":
            return manifest["spec"]["template"]["spec"]
    return None


def jobs(manifest):
    """The Jobs that a manifest describes, as resources of their own."""
    if manifest["kind"] == "Job":
        return [manifest]
    spec = job_set_spec(manifest) or {"replicatedJobs": []}
    heads = {"apiVersion": "batch/v1", "kind": "Job"}
    return [{**heads, "metadata": {"name": one["name"]}, **one["template"]} for one in spec["replicatedJobs"]]


def jobs_of(path):
    return [job for manifest in documents(path) for job in jobs(manifest)]


# What the manifests say ------------------------------------------------------------------------------------


def test_there_are_manifests():
    assert {path.stem for path in MANIFESTS} == {
        "indexed-job",
        "jobset",
        "jobset-servers",
        "training-runtime",
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_core_resources_and_the_jobs_of_others_follow_the_schemas(path, version):
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    core = [one for one in documents(path) if one["apiVersion"] in ("v1", "batch/v1")]
    for resource in [*core, *jobs_of(path)]:
        validate.validate(resource, version, strict=True)


def only(found, published):
    assert set(found) <= published


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_job_sets_have_published_fields_only(path):
    for manifest in documents(path):
        spec = job_set_spec(manifest)
        if spec is None:
            continue
        if manifest["kind"] == "JobSet":
            assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        names = [one["name"] for one in spec["replicatedJobs"]]
        only(spec, JOB_SET)
        only(spec["network"], NETWORK)
        only(spec["coordinator"], COORDINATOR)
        assert spec["coordinator"]["replicatedJob"] in names
        only(spec["successPolicy"], SUCCESS_POLICY)
        assert spec["successPolicy"]["operator"] in ("All", "Any")
        only(spec["successPolicy"]["targetReplicatedJobs"], set(names))
        only(spec["failurePolicy"], FAILURE_POLICY)
        for rule in spec["failurePolicy"].get("rules", []):
            only(rule, RULE)
            assert rule["action"] in ACTIONS
            assert RULE_NAME.fullmatch(rule["name"])
            only(rule.get("targetReplicatedJobs", []), set(names))
        for replicated in spec["replicatedJobs"]:
            only(replicated, REPLICATED_JOB)
            only(replicated["template"], {"metadata", "spec"})
            assert 1 <= replicated["replicas"] <= REPLICAS_MAX


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_training_runtimes_have_published_fields_only(path):
    for manifest in documents(path):
        if manifest["apiVersion"] in ("v1", "batch/v1", "jobset.x-k8s.io/v1alpha2"):
            continue
        assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        spec = manifest["spec"]
        if manifest["kind"] == "TrainingRuntime":
            only(spec, RUNTIME)
            only(spec["mlPolicy"], ML_POLICY)
            only(spec["template"], {"metadata", "spec"})
        else:
            assert manifest["kind"] == "TrainJob"
            only(spec, TRAIN_JOB)
            only(spec["runtimeRef"], RUNTIME_REF)
            only(spec["trainer"], TRAINER)


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_sigterm_reaches_the_program_and_leaves_it_time(path):
    """No shell stands before it, and it is not process 1, which ignores SIGTERM without a handler."""
    for job in jobs_of(path):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"][0] in ("python", "offbeat")
        assert pod["shareProcessNamespace"] is True
        is_coordinator = container["command"][:2] == ["offbeat", "coordinator"]
        assert pod["terminationGracePeriodSeconds"] >= (5 if is_coordinator else 60)


def test_the_numbers_of_workers_and_servers_are_the_same_wherever_a_manifest_has_it():
    _, _, _, worker = documents(DEPLOY / "kubernetes" / "indexed-job.yaml")
    _, runtime, _ = documents(DEPLOY / "kubernetes" / "training-runtime.yaml")
    _, on_servers = documents(DEPLOY / "kubernetes" / "jobset-servers.yaml")
    replicated = {one["name"]: one for one in on_servers["spec"]["replicatedJobs"]}
    assert replicated["server"]["replicas"] == int(
        variable(replicated["worker"]["template"], "OFFBEAT_SERVERS_APART")
    )
    assert {worker["spec"]["parallelism"], worker["spec"]["completions"]} == {
        int(variable(worker, "WORLD_SIZE"))
    }
    (node,) = [one for one in jobs(runtime) if one["metadata"].get("labels")]
    assert runtime["spec"]["mlPolicy"]["numNodes"] == int(variable(node, "WORLD_SIZE"))


def variable(job, name):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one.get("value") for one in container["env"]}[name]


def test_the_image_is_built_of_files_that_exist_for_the_user_of_the_pods():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    sources = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert "src" in sources
    assert all((ROOT / name).exists() for name in sources)
    (image,) = [line.removeprefix("FROM python:").split("-")[0] for line in lines if line.startswith("FROM ")]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(
        ">="
    )
    assert [*map(int, image.split("."))] >= [*map(int, oldest.split("."))]
    (user,) = [int(line.split()[1]) for line in lines if line.startswith("USER ")]
    for path in MANIFESTS:
        for job in jobs_of(path):
            assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == user


def test_references_to_variables_are_resolved_as_by_a_kubelet():
    assert expand("a/$(X)/$(Y)/$$(X)/$X", {"X": "1"}) == "a/1/$(Y)/$(X)/$X"


# What a controller does with them --------------------------------------------------------------------------


SCRIPT = ROOT / "tests" / "support" / "kubernetes_script.py"
PARTIAL, ON_SERVERS = "partial:limit=1000000", "ssp:s=2"
PLACES = {  # by manifest: the Jobs of the coordinator and of each worker, with the index of the pod
    "jobset": (("offbeat-coordinator-0", 0), [(f"offbeat-worker-{rank}", 0) for rank in range(4)]),
    "indexed-job": (("offbeat-coordinator", 0), [("offbeat-worker", rank) for rank in range(4)]),
    "training-runtime": (("offbeat-coordinator-0", 0), [("offbeat-node-0", rank) for rank in range(4)]),
}


class Gate:
    """A file of the ConfigMap, locked until the test lets the workers go on."""

    def __init__(self, path):
        self._lock = os.open(path, os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def open(self):
        fcntl.flock(self._lock, fcntl.LOCK_UN)


@pytest.fixture
def strategy():
    return PARTIAL


@pytest.fixture
def cluster(tmp_path, strategy):
    config_maps = {"offbeat-script": {"train.py": SCRIPT.read_text(), "gate": "", "strategy": strategy}}
    with Cluster(
        tmp_path, config_maps=config_maps, secrets={"offbeat-token": {"token": "a secret"}}
    ) as running:
        yield running


@pytest.fixture
def gate(cluster, tmp_path):
    return Gate(tmp_path / "configMap" / "offbeat-script" / "gate")


def run_log(cluster):
    """The run log, on the coordinator's volume; begun or not."""
    return next(cluster.claim("offbeat-state").glob("*.jsonl"), cluster.claim("offbeat-state") / "none")


def wait_for_entry(cluster, what, condition):
    cluster.wait_until(lambda: any(map(condition, entries_of(run_log(cluster)))), what)


def wait_for_restart(cluster, place, event, worker):
    """Waits until an event of the worker with this id is in the log, and the place has another pod."""
    wait_for_entry(
        cluster, f"{event.__name__} of {worker}", lambda one: isinstance(one, event) and one.worker == worker
    )
    cluster.wait_until(lambda: cluster.pods_started(*place) == 2, f"another pod of {place}")


def is_done(cluster):
    return all(one.state for one in cluster.job_sets.values()) and all(
        one.is_complete or one.has_failed for one in cluster.jobs.values()
    )


@pytest.mark.long
@pytest.mark.parametrize("name", PLACES)
def test_a_job_outlives_a_worker_rank_0_and_the_coordinator(cluster, gate, name):
    coordinator, workers = PLACES[name]
    cluster.apply(DEPLOY / "kubernetes" / f"{name}.yaml")
    for worker in range(4):
        wait_for_entry(
            cluster,
            f"worker {worker} at the gate",
            lambda one, worker=worker: (
                isinstance(one, Ready) and one.worker == worker and one.step >= GATE_STEP - 1
            ),
        )
    cluster.pod(*workers[1]).kill()
    wait_for_restart(cluster, workers[1], Lost, 1)
    cluster.pod(*workers[0]).evict()
    wait_for_restart(cluster, workers[0], Lost, 0)
    for newcomer in (4, 5):
        wait_for_entry(
            cluster,
            f"newcomer {newcomer}",
            lambda one, newcomer=newcomer: isinstance(one, Joined) and one.worker == newcomer,
        )
    cluster.pod(*coordinator).kill()
    cluster.wait_until(lambda: cluster.pods_started(*coordinator) == 2, "another coordinator")
    gate.open()
    cluster.wait_until(lambda: is_done(cluster), "an end of the job")

    ended = [cluster.pod(*place) for place in workers]
    assert [pod.process.poll() for pod in ended] == [0] * 4
    assert [cluster.pods_started(*place) for place in workers] == [2, 2, 1, 1]
    results = [json.loads(pod.log.read_text().splitlines()[-1]) for pod in ended]
    assert sorted(one["worker"] for one in results) == [2, 3, 4, 5]
    assert len({one["digest"] for one in results}) == 1
    for one in results:
        assert one["uses"] == [float(EPOCHS)] * SAMPLES
    for one in cluster.job_sets.values():
        assert (one.state, one.restarts) == ("Completed", 0)


def is_ring_without(gone):
    """Whether an entry of the run log is a complete ring of two servers, without those that are gone."""
    return lambda one: (
        isinstance(one, ClusterView) and len(one.ring) == 2 and not one.next_ring and not gone & {*one.ring}
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", [ON_SERVERS])
def test_a_job_outlives_each_of_its_servers_and_the_coordinator(cluster, gate):
    cluster.apply(DEPLOY / "kubernetes" / "jobset-servers.yaml")
    servers = ["offbeat-server-0", "offbeat-server-1"]
    wait_for_entry(cluster, "steps on servers", lambda one: isinstance(one, StepFinished) and one.step >= 5)
    gone = set()
    for server in servers:
        gone.add(server_of(cluster.pod(server)))
        cluster.pod(server).kill()
        cluster.wait_until(lambda server=server: cluster.pods_started(server) == 2, f"another {server}")
        wait_for_entry(cluster, "a ring with its successor", is_ring_without(frozenset(gone)))
    cluster.pod("offbeat-coordinator-0").kill()
    cluster.wait_until(lambda: cluster.pods_started("offbeat-coordinator-0") == 2, "another coordinator")
    gate.open()
    cluster.wait_until(lambda: is_done(cluster), "an end of the job")

    (job_set,) = cluster.job_sets.values()
    assert (job_set.state, job_set.restarts) == ("Completed", 0)
    ended = [cluster.pod(f"offbeat-worker-{rank}") for rank in range(4)]
    assert [pod.process.poll() for pod in ended] == [0] * 4
    results = [json.loads(pod.log.read_text().splitlines()[-1]) for pod in ended]
    assert len({one["digest"] for one in results}) == 1
    for epoch in range(EPOCHS):
        used = [number for one in results for number in one["used"].get(str(epoch), [])]
        assert sorted(used) == list(range(SAMPLES))


def server_of(pod):
    """The id of a server, which it has written when it joined."""
    return int(re.search(r"^server (\d+) of ", pod.log.read_text(), re.MULTILINE)[1])
