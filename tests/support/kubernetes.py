"""A cluster for the manifests of deploy/kubernetes: each container is a process of this machine.

The controllers follow the published rules. A Job starts a pod for each completion index and, when one fails,
another one, up to `backoffLimit` or `backoffLimitPerIndex`. A JobSet applies the first rule of its failure
policy that matches a failed Job, and its success policy. Kubeflow Trainer makes a JobSet of a TrainJob and
its TrainingRuntime. A pod's environment holds what its manifest lists, resolved as by a kubelet, and what the
image has: nothing of the test's.

`Cluster.translate` is what a real cluster does not need: paths of volumes become folders of the test, and
HOST:PORT becomes a port of 127.0.0.1, if that name leads to a pod with that port. A reference to anything
that is not there fails the test.

Not here: images, scheduling, delays between restarts, networks, permissions.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from offbeat.runtime.launch import find_free_port
from support.run_logs import wait_until

# What the image has, whichever manifest uses it: its programs, and one thread a process for small machines.
IMAGE = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "OMP_NUM_THREADS": "1"}

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_ADDRESS = re.compile(r"([A-Za-z0-9.-]+):(\d+)")
_BACKOFF_LIMIT = 6  # the default of a Job

Manifest = dict[str, Any]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) by the variable, where there is one, and $$ by $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


@dataclass
class Pod:
    """One pod, with one container.

    Attributes:
        job, index: which pod of which Job.
        number: how many pods of that index there were before.
        metadata: labels and annotations.
        log: what the container has written.
    """

    job: Job
    index: int
    number: int
    metadata: dict[str, dict[str, str]]
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Ends all processes at once, as when the host is lost."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def evict(self) -> None:
        """Ends the container as a kubelet does: by SIGTERM, and by SIGKILL when the grace period is over."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(self.job.template["spec"].get("terminationGracePeriodSeconds", 30))
        self.kill()


@dataclass
class Job:
    """A Job and its controller.

    Attributes:
        uid: new whenever a Job is created.
        labels: that its owner, a JobSet, gives it and its pods; also the pods' annotations.
        pods: the last pod of each index.
        failures: how many pods of each index have failed.
    """

    cluster: Cluster
    name: str
    spec: Manifest
    labels: dict[str, str] = field(default_factory=dict)
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    pods: dict[int, Pod] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)
    is_complete: bool = False
    has_failed: bool = False

    @property
    def template(self) -> Manifest:
        return self.spec["template"]

    @property
    def is_indexed(self) -> bool:
        return self.spec.get("completionMode") == "Indexed"

    @property
    def pod_labels(self) -> dict[str, str]:
        own = {"batch.kubernetes.io/job-name": self.name, "batch.kubernetes.io/controller-uid": self.uid}
        return {**self.template.get("metadata", {}).get("labels", {}), **self.labels, **own}

    def reconcile(self) -> None:
        """Starts the pods that are missing, and others for those that have failed, as far as limits allow."""
        if self.is_complete or self.has_failed:
            return
        assert self.template["spec"]["restartPolicy"] == "Never"
        done = set()
        for index in range(self.spec.get("completions", 1)):
            pod = self.pods.get(index)
            code = None if pod is None else pod.process.poll()
            if pod is not None and code is None:
                continue
            if code == 0:
                done.add(index)
                continue
            if pod is not None:
                self.failures[index] += 1
                if self._is_beyond_limit(index):
                    self.has_failed = True
                    self.delete()
                    return
            self.pods[index] = self.cluster.start_pod(self, index)
        self.is_complete = len(done) == self.spec.get("completions", 1)

    def _is_beyond_limit(self, index: int) -> bool:
        if "backoffLimitPerIndex" in self.spec:
            assert self.is_indexed
            return self.failures[index] > self.spec["backoffLimitPerIndex"]
        return self.failures.total() > self.spec.get("backoffLimit", _BACKOFF_LIMIT)

    def delete(self) -> None:
        for pod in self.pods.values():
            pod.evict()


class JobSet:
    """A JobSet and its controller.

    Attributes:
        jobs: by the name of the replicated job and the index.
        restarts: of everything.
        job_restarts: of one Job alone.
        state: "", "Completed" or "Failed".
    """

    def __init__(self, cluster: Cluster, name: str, spec: Manifest) -> None:
        self.cluster, self.name, self.spec, self.state = cluster, name, spec, ""
        self.uid = str(uuid.uuid4())
        self.restarts = 0
        self.job_restarts: Counter[tuple[str, int]] = Counter()
        self._counted_restarts = 0
        self._replicated = {one["name"]: one for one in spec["replicatedJobs"]}
        self.jobs: dict[tuple[str, int], Job] = {}
        self._create_all()

    def _create_all(self) -> None:
        for name, replicated in self._replicated.items():
            for index in range(replicated.get("replicas", 1)):
                self._create(name, index)

    def _create(self, replicated: str, index: int) -> None:
        found = self._replicated[replicated]
        labels = {
            "jobset-name": self.name,
            "jobset-uid": self.uid,
            "replicatedjob-name": replicated,
            "replicatedjob-replicas": str(found.get("replicas", 1)),
            "job-index": str(index),
            "restart-attempt": str(self.restarts),
            "job-restart-attempt": str(self.job_restarts[replicated, index]),
        }
        if "coordinator" in self.spec:
            one = self.spec["coordinator"]
            labels["coordinator"] = self._host(
                one["replicatedJob"], one.get("jobIndex", 0), one.get("podIndex", 0)
            )
        self.jobs[replicated, index] = Job(
            self.cluster,
            f"{self.name}-{replicated}-{index}",
            {"completionMode": "Indexed", **found["template"]["spec"]},
            {f"jobset.sigs.k8s.io/{name}": value for name, value in labels.items()},
        )

    def _host(self, replicated: str, index: int, pod: int) -> str:
        subdomain = self.spec.get("network", {}).get("subdomain", self.name)
        return f"{self.name}-{replicated}-{index}-{pod}.{subdomain}"

    def hosts(self) -> dict[str, tuple[Job, int]]:
        if not self.spec.get("network", {}).get("enableDNSHostnames", True):
            return {}
        return {
            self._host(replicated, index, pod): (job, pod)
            for (replicated, index), job in self.jobs.items()
            for pod in range(job.spec.get("completions", 1))
        }

    def reconcile(self) -> None:
        if self.state:
            return
        for job in self.jobs.values():
            job.reconcile()
        for place, job in list(self.jobs.items()):
            if job.has_failed and not self.state:
                self._on_failure(place)
        policy = self.spec.get("successPolicy", {"operator": "All"})
        targets = policy.get("targetReplicatedJobs") or list(self._replicated)
        ends = [job.is_complete for (replicated, _), job in self.jobs.items() if replicated in targets]
        if not self.state and {"All": all, "Any": any}[policy["operator"]](ends):
            self._end("Completed")

    def _on_failure(self, place: tuple[str, int]) -> None:
        policy = self.spec.get("failurePolicy")
        if policy is None:
            return self._end("Failed")
        action = "RestartJobSet"  # if no rule matches
        for rule in policy.get("rules", []):
            assert not {"onJobFailureReasons", "onJobFailureMessagePatterns"} & set(rule)
            if not rule.get("targetReplicatedJobs") or place[0] in rule["targetReplicatedJobs"]:
                action = rule["action"]
                break
        if not action.endswith("IgnoreMaxRestarts"):
            if action == "FailJobSet" or self._counted_restarts >= policy.get("maxRestarts", 0):
                return self._end("Failed")
            self._counted_restarts += 1
        if action.startswith("RestartJobSet"):
            self.restarts += 1
            for job in self.jobs.values():
                job.delete()
            return self._create_all()
        self.job_restarts[place] += 1
        return self._create(*place)

    def _end(self, state: str) -> None:
        self.state = state
        for job in self.jobs.values():
            if not job.is_complete:
                job.delete()


class Cluster:
    """What was applied, and its pods; leaving the `with` block ends them.

    Args:
        folder: for volumes and logs.
        config_maps, secrets: their files, by name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config_maps: Mapping[str, Mapping[str, str]],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._folder = folder
        self._services: dict[str, Manifest] = {}
        self._runtimes: dict[str, Manifest] = {}
        self._ports: dict[tuple[str, int, int], int] = {}  # of this machine: by Job, index and port
        self._numbers: Counter[tuple[str, int]] = Counter()
        self.jobs: dict[str, Job] = {}
        self.job_sets: dict[str, JobSet] = {}
        self.pods: list[Pod] = []
        for kind, volumes in (("configMap", config_maps), ("secret", secrets)):
            for name, files in volumes.items():
                (folder / kind / name).mkdir(parents=True)
                for file, content in files.items():
                    (folder / kind / name / file).write_text(content)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.kill()

    def apply(self, path: Path) -> None:
        """As `kubectl apply --filename`."""
        for manifest in yaml.safe_load_all(path.read_text()):
            name, spec = manifest["metadata"]["name"], manifest["spec"]
            match manifest["kind"]:
                case "PersistentVolumeClaim":
                    self.claim(name).mkdir(parents=True)
                case "Service":
                    self._services[name] = spec
                case "Job":
                    self.jobs[name] = Job(self, name, spec)
                case "JobSet":
                    self.job_sets[name] = JobSet(self, name, spec)
                case "TrainingRuntime":
                    self._runtimes[name] = spec
                case "TrainJob":
                    self.job_sets[name] = JobSet(self, name, self._job_set_of(spec))

    def _job_set_of(self, train_job: Manifest) -> Manifest:
        """The JobSet that Kubeflow Trainer makes of a TrainJob."""
        runtime = copy.deepcopy(self._runtimes[train_job["runtimeRef"]["name"]])
        assert set(runtime["mlPolicy"]) == {"numNodes"}
        spec: Manifest = runtime["template"]["spec"]
        for replicated in spec["replicatedJobs"]:
            labels = replicated["template"].get("metadata", {}).get("labels", {})
            if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
                nodes = train_job["trainer"].get("numNodes", runtime["mlPolicy"]["numNodes"])
                replicated["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
        return spec

    def claim(self, name: str) -> Path:
        """The folder of a volume."""
        return self._folder / "persistentVolumeClaim" / name

    # Controllers -------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        for one in [*self.jobs.values(), *self.job_sets.values()]:
            one.reconcile()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Lets the controllers work until the condition holds."""

        def holds() -> bool:
            self.reconcile()
            return condition()

        try:
            wait_until(holds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs()}") from None

    def _logs(self) -> str:
        return "\n".join(
            f"--- {pod.log.name}: {pod.process.poll()}\n{pod.log.read_text()}" for pod in self.pods
        )

    def _all_jobs(self) -> Iterator[Job]:
        yield from self.jobs.values()
        for job_set in self.job_sets.values():
            yield from job_set.jobs.values()

    def pod(self, job: str, index: int = 0) -> Pod:
        """The last pod of a Job and index."""
        (found,) = [one for one in self._all_jobs() if one.name == job]
        return found.pods[index]

    def pods_started(self, job: str, index: int = 0) -> int:
        """How many pods of a Job and index there were, also before the Job was created again."""
        return self._numbers[job, index]

    # A kubelet ---------------------------------------------------------------------------------------------

    def start_pod(self, job: Job, index: int) -> Pod:
        labels = job.pod_labels
        annotations = dict(job.labels)
        if job.is_indexed:
            labels["batch.kubernetes.io/job-completion-index"] = str(index)
            annotations["batch.kubernetes.io/job-completion-index"] = str(index)
        metadata = {"labels": labels, "annotations": annotations}
        (container,) = job.template["spec"]["containers"]
        variables = {"JOB_COMPLETION_INDEX": str(index)} if job.is_indexed else {}
        for one in container.get("env", []):
            if "value" in one:
                variables[one["name"]] = expand(one["value"], variables)
            else:
                found = _FIELD.fullmatch(one["valueFrom"]["fieldRef"]["fieldPath"])
                assert found, f"{one['name']} refers to something that is not modelled"
                assert found[2] in metadata[found[1]], f"no pod of {job.name} has {found[0]}"
                variables[one["name"]] = metadata[found[1]][found[2]]
        command = [expand(word, variables) for word in [*container["command"], *container.get("args", [])]]
        number = self._numbers[job.name, index]
        self._numbers[job.name, index] += 1
        log = self._folder / f"{job.name}-{index}.{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.translate(word, job, index) for word in command],
                env=IMAGE | {name: self.translate(text, job, index) for name, text in variables.items()},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pod = Pod(job, index, number, metadata, log, process)
        self.pods.append(pod)
        return pod

    def translate(self, text: str, job: Job, index: int) -> str:
        """What a word of a container's command or environment is on this machine."""
        spec = job.template["spec"]
        volumes = {one["name"]: one for one in spec.get("volumes", [])}
        for mount in spec["containers"][0].get("volumeMounts", []):
            text = text.replace(f"{mount['mountPath']}/", f"{self._volume(volumes[mount['name']])}/")
        found = _ADDRESS.fullmatch(text)
        if found is None:
            return text
        if found[1] == "0.0.0.0":
            target, pod = job, index
        else:
            target, pod = self._lookup(found[1], int(found[2]))
        return f"127.0.0.1:{self._port(target, pod, int(found[2]))}"

    def _volume(self, volume: Manifest) -> Path:
        for kind, name in (
            ("configMap", "name"),
            ("secret", "secretName"),
            ("persistentVolumeClaim", "claimName"),
        ):
            if kind in volume:
                path = self._folder / kind / volume[kind][name]
                assert path.is_dir(), f"there is no {kind} {volume[kind][name]}"
                return path
        raise AssertionError(f"a volume that is not modelled: {volume}")

    def _lookup(self, host: str, port: int) -> tuple[Job, int]:
        """The pod to which a host name leads: of a JobSet's pod, or of a Service."""
        for job_set in self.job_sets.values():
            if host in job_set.hosts():
                return job_set.hosts()[host]
        assert host in self._services, f"no host has the name {host}"
        service = self._services[host]
        assert port in [one["port"] for one in service["ports"]], f"the service {host} has no port {port}"
        (job,) = [one for one in self._all_jobs() if service["selector"].items() <= one.pod_labels.items()]
        return job, 0

    def _port(self, job: Job, index: int, port: int) -> int:
        (container,) = job.template["spec"]["containers"]
        open_ports = [one["containerPort"] for one in container.get("ports", [])]
        assert port in open_ports, f"pods of {job.name} have no port {port}"
        key = (job.name, index, port)
        if key not in self._ports:
            self._ports[key] = find_free_port()
        return self._ports[key]
