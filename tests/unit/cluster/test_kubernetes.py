"""Manifests of a run: valid for today's Kubernetes, without keys, and what a job's status means.

No cluster is there. kubectl is a script that writes down what it was asked, and answers.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from shoal.cluster import on_kubernetes
from shoal.cluster.engine import JobRequest
from shoal.cluster.invitation import Invitation
from shoal.cluster.kubernetes_manifests import (
    MOST_NAME,
    PORT,
    Manifest,
    manifests,
    new_name,
    parse_options,
    secret_manifest,
    yaml_text,
)
from shoal.cluster.on_kubernetes import KubernetesEngine, KubernetesStarter, meaning, new_invitation
from shoal.errors import UsageError

ADDRESS = "image=registry.example/train:1,claim=runs"
ALL = f"{ADDRESS},memory=8Gi,gpus=2,priority-class=high,namespace=lab,user=1234,mount=/data"
REQUEST = JobRequest(
    name="charlm small",
    arguments=("recipes/charlm.py:small", "--plan", "data=4", "--run-dir", "/a/r-1", "--resume"),
    directory="/projects/someone",
    run_dir="/a/r-1",
    num_hosts=3,
    cores=4,
    time_limit_s=3600.0,
)
VERSION = kubernetes_validate.latest_version()


def changed(**changes: Any) -> JobRequest:
    return JobRequest(
        **{name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__} | changes
    )


@pytest.mark.parametrize("address", [ADDRESS, ALL])
@pytest.mark.parametrize("request_", [REQUEST, changed(num_hosts=1, cores=0, time_limit_s=None)])
def test_job_service_and_secret_are_valid(address: str, request_: JobRequest) -> None:
    options = parse_options(address)
    documents = manifests(request_, "a-run", options)
    documents.append(secret_manifest("a-run", options, "text"))
    assert [each["kind"] for each in documents] == ["Service", "Job", "Secret"]
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_validation_sees_a_misspelt_field() -> None:
    _, job = manifests(REQUEST, "a-run", parse_options(ADDRESS))
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


@pytest.mark.parametrize("address", [f"{ADDRESS},kind=jobset", f"{ALL},kind=jobset"])
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_a_job_set_is_valid(address: str, num_hosts: int) -> None:
    (found,) = manifests(changed(num_hosts=num_hosts), "a-run", parse_options(address))
    known = JobsetV1alpha2JobSet.from_dict(found)
    assert known is not None
    assert lost(found, known.to_dict()) == []  # the model drops fields that it does not know
    for part in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}}
        kubernetes_validate.validate(job | part["template"], VERSION, strict=True)
    counts = [part["template"]["spec"]["completions"] for part in found["spec"]["replicatedJobs"]]
    assert counts == ([1, 2] if num_hosts == 3 else [1])


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict):
        gone = [f"{path}.{key}" for key in before if key not in after]
        inner = [lost(v, after[k], f"{path}.{k}") for k, v in before.items() if k in after]
    elif isinstance(before, list):
        gone = [] if len(before) == len(after) else [path]
        inner = [lost(x, y, f"{path}[]") for x, y in zip(before, after)]
    else:
        return [] if before == after else [path]
    return gone + [each for found in inner for each in found]


def pod_of(job: Manifest) -> Manifest:
    found: Manifest = job["spec"]["template"]["spec"]
    return found


def test_what_the_job_does() -> None:
    service, job = manifests(REQUEST, "a-run", parse_options(ALL))
    pod, spec = pod_of(job), job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["activeDeadlineSeconds"] == 3600
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert rules == [("FailJob", [1, 2]), ("Ignore", [75]), ("Ignore", None)]
    assert pod["subdomain"] == service["metadata"]["name"] == "a-run"
    assert service["spec"]["clusterIP"] == "None" and pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"] == 1234
    assert pod["priorityClassName"] == "high" and pod["terminationGracePeriodSeconds"] >= 60
    container = pod["containers"][0]
    assert container["resources"]["requests"] == {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": 2}
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    script = container["command"][-1]
    assert "--run-dir /data/r-1 --resume --nodes 3" in script
    assert f'create_connection(("a-run-0.a-run", {PORT}), 5)' in script


@pytest.mark.parametrize(("code", "given"), [(0, 0), (1, 75), (2, 2), (75, 75), (143, 143)])
def test_agents_leave_it_to_pod_0_to_fail(tmp_path: Path, code: int, given: int) -> None:
    """The script of a pod as a shell runs it, with a Python that ends with some code."""
    options = parse_options(f"{ADDRESS},python={tmp_path}/python")
    (tmp_path / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexit {code}\n')
    (tmp_path / "python").chmod(0o755)
    _, job = manifests(REQUEST, "a-run", options)
    script = pod_of(job)["containers"][0]["command"][-1].replace(
        "/var/run/shoal/invitation", "/dev/null"
    )
    for index, expected in (("0", code), ("2", given)):
        environment = os.environ | {"JOB_COMPLETION_INDEX": index}
        done = subprocess.run(["/bin/sh", "-c", script], env=environment, check=False)
        assert done.returncode == expected


def test_a_dry_run_prints_all_but_the_keys() -> None:
    text = KubernetesEngine(ALL).describe(REQUEST)
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert "server_secret" not in text and "stringData" not in text
    assert re.search(r"shoal agent --new-invitation charlm-small-\w{5}-0\.charlm-small-", text)


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\ufeff"), max_size=20)
VALUES = st.recursive(
    PLAIN | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(PLAIN, VALUES, min_size=1, max_size=4))
def test_yaml_reads_what_was_written(document: dict[str, Any]) -> None:
    assert list(yaml.safe_load_all(yaml_text([document, {"a": "b"}]))) == [document, {"a": "b"}]


@given(st.text(max_size=80))
def test_names_are_labels_of_dns(name: str) -> None:
    found = new_name(name)
    assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])", found) and len(found) <= MOST_NAME


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "names no image"),
        ("image=a", "names no claim"),
        ("image=a,claim=My_Runs", "is not a name that Kubernetes allows"),
        ("image=a b,claim=c", "has no spaces"),
        ("image=a,claim=b,cliam=c", "'cliam' is unknown. Did you mean 'claim'?"),
        ("image=a,claim=b,kind=pod", "Invalid enum value 'pod'"),
        ("image=a,claim=b,gpus=many", "Expected `int`"),
        ("image=a,claim=b,user=0", ">= 1"),
    ],
)
def test_bad_options_are_refused(address: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        KubernetesEngine(address).describe(REQUEST)


def test_a_priority_is_a_class() -> None:
    with pytest.raises(UsageError, match="priority-class=NAME"):
        KubernetesEngine(ADDRESS).describe(changed(priority=5))


def condition(kind: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", **more}]}


@pytest.mark.parametrize(
    ("kind", "spec", "status", "expected"),
    [
        ("Job", {}, {}, ("queued", None)),
        ("Job", {}, {"active": 2, "ready": 0}, ("queued", None)),
        ("Job", {}, {"active": 2, "ready": 1}, ("running", None)),
        ("Job", {}, condition("Complete"), ("done", 0)),
        (
            "Job",
            {},
            condition("Failed", message="Container shoal failed with exit code 2"),
            ("failed", 2),
        ),
        ("Job", {}, condition("Failed", reason="BackoffLimitExceeded"), ("failed", 1)),
        ("Job", {}, condition("Failed", reason="DeadlineExceeded"), ("stopped", 75)),
        ("Job", {"suspend": True}, {"terminating": 1}, ("running", None)),
        ("Job", {"suspend": True}, {}, ("stopped", 75)),
        ("JobSet", {}, {"replicatedJobsStatus": [{"active": 1}]}, ("running", None)),
        ("JobSet", {}, condition("Completed"), ("done", 0)),
    ],
)
def test_what_a_status_means(kind: str, spec: Manifest, status: Manifest, expected: object) -> None:
    assert meaning(kind, spec, status)[:2] == expected


FAKE = """#!/usr/bin/env python3
import json, sys
words, given = sys.argv[1:], sys.stdin.read()
with open({log!r}, "a") as log:
    log.write(json.dumps([words, given]) + "\\n")
if words[0] == "create":
    made = json.loads(given)
    if {refuses!r} and made["kind"] == "List":
        sys.exit("Error from server (Forbidden): secrets is forbidden")
    made["metadata"] = made.get("metadata", {{}}) | {{"namespace": "lab", "uid": "u-1"}}
    print(json.dumps(made))
elif words[0] == "get" and words[1].startswith("jobsets"):
    sys.exit("error: the server doesn't have a resource type \\"jobsets\\"")
elif words[0] == "get":
    name = words[-2].rpartition("=")[2]
    job = {{"kind": "Job", "metadata": {{"name": name, "namespace": "lab"}}, "spec": {{}}}}
    print(json.dumps({{"items": [] if name == "unknown" else [job]}}))
"""


class Kubectl:
    def __init__(self, directory: Path, refuses: bool = False):
        self.log = directory / "log"
        path = directory / "kubectl"
        path.write_text(FAKE.format(log=str(self.log), refuses=refuses))
        path.chmod(0o755)

    def calls(self) -> list[tuple[list[str], str]]:
        return [tuple(json.loads(line)) for line in self.log.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_submit_makes_a_secret_that_the_job_owns(path: Path) -> None:
    kubectl = Kubectl(path)
    number = KubernetesEngine(ADDRESS).submit(REQUEST)
    assert re.fullmatch(r"lab/charlm-small-\w{5}", number)
    (_, job), (words, rest) = kubectl.calls()
    assert json.loads(job)["kind"] == "Job"
    service, secret = json.loads(rest)["items"]
    assert service["kind"] == "Service" and secret["kind"] == "Secret"
    assert [each["metadata"]["ownerReferences"][0]["uid"] for each in (service, secret)] == [
        "u-1"
    ] * 2
    invitation = Invitation.decode(secret["stringData"]["invitation"].encode(), "")
    assert invitation.keys is not None
    assert invitation.endpoint == (f"{number[4:]}-0.{number[4:]}", PORT)
    for words, text in kubectl.calls():
        assert invitation.keys.server_secret not in " ".join(words)
        assert text == rest or invitation.keys.server_secret not in text


def test_what_is_refused_in_part_is_removed(path: Path) -> None:
    kubectl = Kubectl(path, refuses=True)
    with pytest.raises(UsageError, match=r"kubectl create failed: .*secrets is forbidden"):
        KubernetesEngine(ADDRESS).submit(REQUEST)
    assert kubectl.calls()[-1][0][:2] == ["delete", "jobs.batch"]


def test_a_job_is_stopped_by_suspending_it(path: Path) -> None:
    kubectl = Kubectl(path)
    engine = KubernetesEngine()
    assert engine.state("lab/a-run").job == "kubernetes:lab/a-run"
    engine.stop("lab/a-run", now=False)
    assert '--patch={"spec": {"suspend": true}}' in kubectl.calls()[-1][0]
    engine.stop("lab/a-run", now=True)
    assert kubectl.calls()[-1][0][:3] == ["delete", "jobs.batch", "a-run"]
    with pytest.raises(UsageError, match="has no job 'unknown' of Shoal in the namespace 'lab'"):
        engine.state("lab/unknown")


def test_without_kubectl_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"kubectl is not installed here.*--dry-run"):
        KubernetesEngine(ADDRESS).submit(REQUEST)


def test_a_starter_reads_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "invitation"
    made = new_invitation("a-0.a:29400")
    file.write_bytes(made.encode())
    starter = KubernetesStarter(3, {on_kubernetes.FILE_VARIABLE: str(file)})
    assert (starter.num_hosts, starter.is_host, starter.invitation) == (3, True, made)
    with pytest.raises(UsageError, match="this is not a pod of `shoal submit`"):
        KubernetesStarter(3, {on_kubernetes.FILE_VARIABLE: str(tmp_path / "none")})
    for wrong in ("nothing", "a b:1", "a:0", "a:70000", ""):
        with pytest.raises(UsageError, match="must be HOST:PORT"):
            new_invitation(wrong)
