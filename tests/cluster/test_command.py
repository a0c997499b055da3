"""`lmstate cluster` against the API of a running front, and the YAML that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from lmstate.cli.app import app
from lmstate.cluster.application import AppSpec
from lmstate.cluster.ray_cluster import SETTINGS
from lmstate.cluster.rolling import drain_all
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.cluster.helpers import fleet
from tests.serve.running import load_tiny, running
from tests.waiting import wait_until


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments], env={"LMSTATE_API_KEY": "", **environment})


def test_status_and_drain_of_a_running_front(tmp_path: Path) -> None:
    model, store = load_tiny(tmp_path / "model"), f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()
    engines = [Engine(model, rows=4, store=store) for _ in "ab"]
    with (
        fleet(*engines, store=store, files=FrontFiles(model.tokenizer)) as (cluster, channels),
        running(cluster.front, Settings("tiny", port=0)) as server,
        server.client() as client,
    ):
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        for _ in "ab":
            client.post("/v1/sessions/one/send", json={"text": "Hello " * 20, "max_tokens": 3}).raise_for_status()
        home = next(rank for rank, channel in enumerate(channels) if channel.taken)
        wait_until(lambda: (cluster.status()[home].hit_rate or 0) > 0)

        told = json.loads(run("status", "--url", server.url, "--session", "one", "--json").output)
        assert told["session"] == {"name": "one", "rank": home}
        assert [each["rank"] for each in told["data"]] == [0, 1]
        assert [each["sessions"] for each in told["data"]] == [int(rank == home) for rank in (0, 1)]
        shown = run("status", "--url", server.url, "--session", "one").output
        assert f"session one: replica {home}" in shown and "yes" in shown and " % " in shown
        assert "on no replica that this server knows" in run("status", "--url", server.url, "--session", "two").output

        assert run("drain", "7", "--url", server.url).exit_code == 1
        assert run("drain", "first", "--url", server.url).exit_code == 2
        result = run("drain", str(home), "--url", server.url)
        assert result.exit_code == 0, result.output
        assert channels[home].served._drained and not channels[1 - home].served._drained
        assert [status.takes for status in cluster.status()] == [rank != home for rank in (0, 1)]
        turn = client.post("/v1/sessions/one/send", json={"text": "Again", "max_tokens": 3}).json()
        assert turn["generation"] == 4, "the other replica goes on with the session"


def test_draining_is_for_the_first_key(tmp_path: Path) -> None:
    model = load_tiny(tmp_path)
    body = {"rank": 0}
    with fleet(Engine(model), files=FrontFiles(model.tokenizer)) as (cluster, channels):
        for keys, host, asked, status in (
            (("first", "second"), "127.0.0.1", "second", 403),
            ((), "0.0.0.0", "", 403),
            (("first", "second"), "127.0.0.1", "first", 200),
        ):
            with running(cluster.front, Settings("tiny", host, 0, keys)) as server, server.client() as client:
                headers = {"authorization": f"Bearer {asked}"} if asked else {}
                assert client.get("/v1/replicas", headers=headers).status_code == 200
                assert client.post("/v1/replicas/drain", json=body, headers=headers).status_code == status
                assert channels[0].served._drained == (status == 200)
    with Engine(model) as engine, running(engine, Settings("tiny", port=0)) as server, server.client() as client:
        (alone,) = client.get("/v1/replicas").json()["data"]
        assert alone["rank"] == 0 and alone["takes"]
        assert "nothing would replace" in client.post("/v1/replicas/drain", json=body).json()["error"]["message"]


def test_replicas_are_drained_one_after_the_other() -> None:
    ids, log = {0: "a", 1: "b"}, list[str]()
    waiting = dict[int, int]()

    def ask(path: str, body: dict[str, Any] | None = None, wait: float = 0.0) -> dict[str, Any]:
        if body is not None:
            assert not waiting, "the one before was replaced"
            log.append(f"drain {body['rank']}")
            waiting[body["rank"]] = 3
            return {"stored": True}
        for rank in list(waiting):
            waiting[rank] -= 1
            if not waiting[rank]:
                ids[rank] += "'"
                del waiting[rank]
        return {"data": [{"rank": rank, "id": id, "takes": rank not in waiting} for rank, id in ids.items()]}

    assert list(drain_all(ask, 1.0, rest=lambda _: None)) == [(0, True), (1, True)]
    assert log == ["drain 0", "drain 1"] and ids == {0: "a'", 1: "b'"}
    with pytest.raises(TimeoutError, match="replica 0 was drained, and not replaced"):
        waiting[9] = 10**9  # nothing is replaced any more
        stuck = {"data": [{"rank": 0, "id": "a", "takes": True}]}
        list(drain_all(lambda path, body=None, wait=0.0: {"stored": True} if body else stuck, 0.0, -1.0))


HERE = "127.0.0.1:1"

# ---- the fields of KubeRay's RayService (ray.io/v1) and of Kubernetes that are used
POD = {"metadata": {"labels": dict}, "spec": {"containers": list, "terminationGracePeriodSeconds": int}}
FIELDS: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "upgradeStrategy": {"type": str},
        "excludeHeadPodFromServeSvc": bool,
        "serveConfigV2": str,
        "rayClusterConfig": {
            "rayVersion": str,
            "authOptions": {"mode": str},
            "enableInTreeAutoscaling": bool,
            "headGroupSpec": {"rayStartParams": dict, "template": POD},
            "workerGroupSpecs": list,
        },
    },
}
GROUP = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "rayStartParams": dict,
    "template": POD,
}


def check(told: Any, kind: Any) -> None:
    if isinstance(kind, dict):
        assert told.keys() == kind.keys()
        for name, value in told.items():
            check(value, kind[name])
    else:
        assert type(told) is kind


def written(*arguments: str) -> list[Any]:
    result = run("yaml", *arguments)
    assert result.exit_code == 0, result.output
    return list(yaml.safe_load_all(result.output))


def test_the_yaml_is_a_ray_service() -> None:
    given = (
        "smollm2",
        "--store",
        "redis://redis:6379/0",
        "--max-replicas",
        "6",
        "--set",
        "threads=4",
        "--set",
        "kv_bits=8",
    )
    service, policy = written(*given, "--image", "registry/lmstate:1", "--name", "chat")
    check(service, FIELDS)
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    check(group, GROUP)
    assert (service["kind"], service["metadata"]["name"]) == ("RayService", "chat")
    assert cluster["authOptions"] == {"mode": "token"} and cluster["enableInTreeAutoscaling"]
    assert service["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 6)
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        environment = {
            one["name"]: one.get("value") or one["valueFrom"]["secretKeyRef"]["key"] for one in container["env"]
        }
        assert environment.items() >= {**SETTINGS, "LMSTATE_API_KEY": "api-key"}.items()
        assert template["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "5"

    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "lmstate.cluster:app"
    assert application["autoscaling_policy"] == {"policy_function": "lmstate.cluster.scaling:by_waiting_seconds"}
    spec = AppSpec.of(application["args"])
    assert (spec.model, spec.store, spec.ranks) == ("smollm2", "redis://redis:6379/0", 6)
    assert (spec.threads, spec.kv_bits, spec.fronts) == (4, 8, 2)
    assert policy["kind"] == "NetworkPolicy"


def test_a_pod_has_a_processor_for_each_process_of_its_replica() -> None:
    service, _ = written("smollm2", "--store", "none", "--parallel", "3", "--set", "threads=2", "--set", "fronts=5")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "4"
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    spec = AppSpec.of(application["args"])
    assert (spec.parallel, spec.processors, spec.fronts) == (3, 3, 5)


def test_a_changed_option_starts_a_second_cluster() -> None:
    def release(*arguments: str) -> str:
        pods = written("smollm2", "--store", "none", *arguments)[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
        return next(
            one["value"] for one in pods["template"]["spec"]["containers"][0]["env"] if one["name"] == "LMSTATE_RELEASE"
        )

    assert release() == release() != release("--set", "rows=3") != release("--image", "lmstate:2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["yaml", "smollm2"], "without a store"),
        (["yaml", "smollm2", "--store", "/folder"], "a folder"),
        (["yaml", "smollm2", "--store", "none", "--max-replicas", "1"], "at least replicas"),
        (["yaml", "smollm2", "--store", "none", "--name", "Chat"], "a-z"),
        (["yaml", "smollm2", "--store", "none", "--pod-memory", "much"], "16Gi"),
        (["yaml", "smollm2", "--store", "none", "--set", "rwos=3"], "rwos"),
        (["yaml", "smollm2", "--store", "none", "--set", "rows"], "NAME=VALUE"),
        (["yaml", "smollm2", "--store", "none", "--set", "parallel=2"], "the command asks for it"),
        (["yaml", "smollm2", "--store", "none", "--parallel", "2", "--set", "device=cuda"], "is on the CPU"),
        (["yaml", "smollm2", "--store", "none", "--set", "threads=0"], "at least 1"),
        (
            ["deploy", "smollm2", "--cluster", "127.0.0.1:1", "--store", "none", "--host", "0.0.0.0"],
            "no API key is set",
        ),
        (["deploy", "smollm2", "--cluster", "127.0.0.1:1"], "without a store"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.cluster.ray_cluster.check_ray", lambda: None)
    result = run(*arguments, COLUMNS="500")
    assert result.exit_code == 2 and said in result.output
