"""A RayService for KubeRay, as YAML."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from lmstate.cluster.application import AppSpec
from lmstate.cluster.ray_cluster import SETTINGS

RAY = "2.60.0"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # KubeRay adds to it, and a name of Kubernetes has 63 characters
POLICY = "lmstate.cluster.scaling:by_waiting_seconds"
POD_PROCESSORS = 1  # of a pod beside its engine: a front, and Ray itself
PORT = 8000  # where KubeRay's service asks Serve's proxies


@dataclass(frozen=True)
class Pods:
    """Kubernetes' side of the service. `image` has lmstate[ray] and Ray of version `RAY`."""

    name: str = "lmstate"
    image: str = "lmstate:latest"
    memory: str = "16Gi"  # of each pod: the weights, `memory` of the engine, and 2 GiB for Ray

    def check(self) -> None:
        """Raises ValueError for names and sizes that Kubernetes refuses."""
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r} was asked for; it has 1 to 40 of a-z, 0-9 and -, first a letter")
        if not re.fullmatch(r"[1-9][0-9]*(Mi|Gi|Ti|M|G|T)?", self.memory):
            raise ValueError(f"a pod memory of {self.memory!r} was asked for; give a size such as 16Gi")
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(f"{self.image!r} is not the name of an image")


def manifest(spec: AppSpec, pods: Pods) -> str:
    """The YAML of a secret's place, a RayService and a NetworkPolicy.

    A change of an option changes the pods too, so that KubeRay starts a second cluster, and moves the traffic once its
    engines answer. Sessions are in the store, which both have.
    """
    pods.check()
    config = serve_config(spec)
    release = hashlib.sha256(json.dumps([config, pods.image], sort_keys=True).encode()).hexdigest()[:12]
    documents = (_service(spec, pods, config, release), _network_policy(pods))
    head = (
        f"# kubectl create secret generic {pods.name}-keys --from-literal=api-key=KEY\n"
        "# The key is the clients'. Ray's own token is made by KubeRay (1.6 or newer).\n"
    )
    return head + "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def serve_config(spec: AppSpec) -> dict[str, Any]:
    """The application as Serve's configuration has it."""
    default = {field.name: field.default for field in msgspec.structs.fields(AppSpec)}
    told = {name: value for name, value in msgspec.to_builtins(spec).items() if value != default[name]}
    one: dict[str, Any] = {
        "name": "lmstate",
        "import_path": "lmstate.cluster:app",
        "route_prefix": "/",
        "args": {**told, "store": spec.store or "none"},
    }
    if spec.max_replicas is not None:
        one["autoscaling_policy"] = {"policy_function": POLICY}
    return {"proxy_location": "EveryNode", "http_options": {"host": spec.host, "port": PORT}, "applications": [one]}


def _service(spec: AppSpec, pods: Pods, config: dict[str, Any], release: str) -> dict[str, Any]:
    resources = {"cpu": str(spec.processors + POD_PROCESSORS), "memory": pods.memory}
    gpu = spec.device is not None and spec.device != "cpu"
    worker = {**resources, "nvidia.com/gpu": "1"} if gpu else resources
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": pods.name},
        "spec": {
            "upgradeStrategy": {"type": "NewCluster"},
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": "\n".join(_lines(config)) + "\n",
            "rayClusterConfig": {
                "rayVersion": RAY,
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": spec.max_replicas is not None,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # it runs no engine
                    "template": _pod(pods, "ray-head", {"cpu": "1", "memory": "4Gi"}, release),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "engines",
                        "replicas": spec.replicas,
                        "minReplicas": spec.replicas,
                        "maxReplicas": spec.ranks,
                        "rayStartParams": {},
                        "template": _pod(pods, "ray-worker", worker, release),
                    }
                ],
            },
        },
    }


def _pod(pods: Pods, container: str, resources: dict[str, str], release: str) -> dict[str, Any]:
    def secret(name: str, key: str, optional: bool) -> dict[str, Any]:
        place = {"name": f"{pods.name}-keys", "key": key, "optional": optional}
        return {"name": name, "valueFrom": {"secretKeyRef": place}}

    plain = {**SETTINGS, "LMSTATE_RELEASE": release}
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": pods.name}},
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": pods.image,
                    "env": [
                        *({"name": name, "value": value} for name, value in plain.items()),
                        secret("LMSTATE_API_KEY", "api-key", optional=False),
                        secret("LMSTATE_STORE_KEY", "store-key", optional=True),
                    ],
                    "resources": {"requests": resources, "limits": resources},
                }
            ],
            "terminationGracePeriodSeconds": 150,  # answers have 120 seconds
        },
    }


def _network_policy(pods: Pods) -> dict[str, Any]:
    """Ray's ports are for the pods of the service and for KubeRay; clients reach Serve's proxies alone."""
    own = {"matchLabels": {"app.kubernetes.io/name": pods.name}}
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": pods.name},
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [{"namespaceSelector": {}, "podSelector": operator}]},
                {"ports": [{"protocol": "TCP", "port": PORT}]},
            ],
        },
    }


def _lines(value: Any) -> list[str]:
    """YAML of objects, lists and scalars. Texts are JSON's, which are YAML's as well."""
    if isinstance(value, dict) and value:
        return [line for name, one in value.items() for line in _entry(name, one)]
    if isinstance(value, list) and value:
        return [line for one in value for line in _item(_lines(one))]
    return [json.dumps(value)]


def _entry(name: str, value: Any) -> list[str]:
    head = f"{name}:"
    if isinstance(value, str) and value.endswith("\n"):
        return [f"{head} |", *(f"  {line}" for line in value.splitlines())]
    lines = _lines(value)
    nested = isinstance(value, dict | list) and value
    return [head, *(f"  {line}" for line in lines)] if nested else [f"{head} {lines[0]}"]


def _item(lines: list[str]) -> list[str]:
    return [f"- {lines[0]}", *(f"  {line}" for line in lines[1:])]
