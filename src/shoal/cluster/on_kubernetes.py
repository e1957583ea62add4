"""Runs on Kubernetes: manifests that the user's own kubectl applies, and pods that join.

`KubernetesEngine` creates the job of `kubernetes_manifests.py` and then, as things that it owns and
that go with it, the service and the secret with the run's keys; pods wait for these. It reads what
became of the job, and nothing of ours runs meanwhile. Inside the job's first pod, where the run is
started, `KubernetesStarter` has nothing to start: the other pods run `shoal agent` already, with
the same secret, and Kubernetes replaces those that are lost.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.cluster.engine import JobRequest, JobState, State
from shoal.cluster.invitation import Invitation
from shoal.cluster.kubernetes_manifests import (
    INSTANCE,
    INVITATION_FILE,
    OURS,
    PORT,
    RUN_DIR,
    SECRET_AT,
    Manifest,
    first_address,
    manifests,
    new_name,
    parse_options,
    secret_manifest,
    yaml_text,
)
from shoal.comm.wire import new_keys
from shoal.errors import UsageError

ANSWER_S = 90.0
FILE_VARIABLE = "SHOAL_INVITATION_FILE"  # another place of the mounted invitation
KINDS = "jobs.batch,jobsets.jobset.x-k8s.io"
WITHOUT_KEYS = """\
# Not printed: the secret {name}-keys, with keys that only this run has. `shoal submit` makes and
# applies it. To apply these manifests yourself, make one with
#   shoal agent --new-invitation {address}:{port} > {file}
#   kubectl create secret generic {name}-keys --from-file={file} && rm {file}
"""


class KubernetesEngine:
    """Runs as Indexed Jobs, or JobSets. `address` is image=...,claim=... and so on."""

    def __init__(self, address: str = ""):
        self._address = address

    def describe(self, request: JobRequest) -> str:
        """The manifests, without the secret: keys are not for a screen."""
        options = parse_options(self._address)
        name = new_name(request.name)
        note = WITHOUT_KEYS.format(
            name=name, address=first_address(name, options), port=PORT, file=INVITATION_FILE
        )
        return note + yaml_text(manifests(request, name, options))

    def submit(self, request: JobRequest) -> str:
        options = parse_options(self._address)
        name = new_name(request.name)
        *others, job = manifests(request, name, options)
        invitation = new_invitation(f"{first_address(name, options)}:{PORT}")
        others.append(secret_manifest(name, options, invitation.encode().decode()))
        create = ["create", "--filename", "-", "--output=json"]
        made = json.loads(kubectl(*create, given=json.dumps(job)))
        kind, _, place = _where(made)
        try:
            items = [_owned(each, made) for each in others]
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
            kubectl(*create, *place, given=text)
        except UsageError:
            kubectl("delete", kind, name, *place, "--wait=false")  # and what it owns
            raise
        return f"{made['metadata']['namespace']}/{name}"

    def state(self, job: str) -> JobState:
        return job_state(self._find(job))

    def jobs(self) -> list[JobState]:
        """In the namespace of the address, or of kubectl's context."""
        space = parse_options(self._address).namespace if self._address else ""
        place = ["--namespace", space] if space else []
        found = get_items(*place, "--selector", _labels(OURS))
        states = [job_state(item) for item in found if not is_part(item)]
        return sorted(states, key=lambda state: ["running", "queued"].count(state.state) == 0)

    def stop(self, job: str, *, now: bool) -> None:
        """Suspend the job: its pods get SIGTERM, save and are not made again. `now` deletes it."""
        found = self._find(job)
        kind, name, place = _where(found)
        if now:
            kubectl("delete", kind, name, *place, "--cascade=background", "--wait=false")
        else:
            patch = json.dumps({"spec": {"suspend": True}})
            kubectl("patch", kind, name, *place, "--type=merge", f"--patch={patch}")

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        """What pod 0 printed."""
        _, name, place = _where(self._find(job))
        index = {"batch.kubernetes.io/job-completion-index": "0", INSTANCE: name}
        words = ["logs", *place, "--selector", _labels(index), "--tail=-1", "--container=shoal"]
        return follow_lines([*words, "--follow"]) if follow else iter(kubectl(*words).splitlines())

    def _find(self, job: str) -> Manifest:
        space, _, name = job.removeprefix("kubernetes:").rpartition("/")
        place = ["--namespace", space] if space else []
        found = get_items(*place, "--selector", _labels({**OURS, INSTANCE: name}))
        for item in found:
            if not is_part(item):
                return item
        raise UsageError(
            f"Kubernetes has no job {name!r} of Shoal in "
            f"{f'the namespace {space!r}' if space else 'the namespace of your context'}."
        )


class KubernetesStarter:
    """In the first pod of a job, whose other pods come by themselves."""

    is_host = True

    def __init__(self, num_hosts: int, environment: Mapping[str, str] = os.environ):
        self.num_hosts = num_hosts
        path = Path(environment.get(FILE_VARIABLE) or f"{SECRET_AT}/{INVITATION_FILE}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(
                f"--on kubernetes: this is not a pod of `shoal submit`: {path}, where the secret "
                f"of the run is mounted, cannot be read ({error.strerror}). Queue the run with "
                "`shoal submit RECIPE --on kubernetes:image=...,claim=...`."
            ) from error
        self.invitation = Invitation.decode(content, str(path))  # which the other pods have too

    def start(self, invitation: bytes, count: int) -> None:
        """Kubernetes starts pods, and others in the place of lost ones."""

    def poll(self) -> list[str]:
        return []

    def close(self) -> None:
        """The other pods end with the run."""


def new_invitation(address: str) -> Invitation:
    """An invitation to a run that will listen at host:port, with new keys."""
    try:
        return Invitation(f"tcp://{address}", new_keys())
    except ValueError as error:
        raise UsageError(f"{address!r} must be HOST:PORT: {error}.") from None


def job_state(item: Manifest) -> JobState:
    """What a Job or a JobSet says of itself, in the words that all engines share."""
    metadata, status = item["metadata"], item.get("status", {})
    state, code, reason = meaning(item["kind"], item["spec"], status)
    space = metadata.get("namespace", "")
    return JobState(
        job=f"kubernetes:{space}/{metadata['name']}" if space else f"kubernetes:{metadata['name']}",
        state=state,
        run_dir=metadata.get("annotations", {}).get(RUN_DIR, ""),
        name=metadata["name"],
        exit_code=code,
        reason=reason,
    )


def meaning(kind: str, spec: Manifest, status: Manifest) -> tuple[State, int | None, str]:
    """State, exit code and reason. Kubernetes keeps no exit code of a job, only why it failed: by
    the rule for exit code 1 or 2, or otherwise."""
    true = {c["type"]: c for c in status.get("conditions", []) if c.get("status") == "True"}
    if "Complete" in true or "Completed" in true:
        return "done", 0, ""
    if failed := true.get("Failed") or true.get("FailureTarget"):
        message = failed.get("message", "")
        if failed.get("reason") == "DeadlineExceeded":
            return "stopped", 75, "its time limit has passed; what it saved can be gone on from"
        return "failed", 2 if "exit code 2" in message else 1, message or failed.get("reason", "")
    if spec.get("suspend"):
        if status.get("active", 0) or status.get("terminating", 0):
            return "running", None, "it was asked to save and end"
        return "stopped", 75, "it was asked to save and end"
    if kind == "JobSet":
        jobs = status.get("replicatedJobsStatus", [])
        is_up = any(job.get("active", 0) or job.get("ready", 0) for job in jobs)
    else:
        is_up = status.get("ready", 0) > 0
    return ("running", None, "") if is_up else ("queued", None, "its pods are not ready yet")


def is_part(item: Manifest) -> bool:
    """Whether a Job belongs to a JobSet, which is shown in its place."""
    return bool(item["metadata"].get("ownerReferences"))


def get_items(*words: str) -> list[Manifest]:
    """Jobs and JobSets; a cluster without JobSet has none of those."""
    found: list[Manifest] = []
    for kind in KINDS.split(","):
        try:
            found += json.loads(kubectl("get", kind, *words, "--output=json"))["items"]
        except UsageError as error:
            if kind.startswith("jobs.") or "doesn't have a resource type" not in str(error):
                raise
    return found


def kubectl(*words: str, given: str = "") -> str:
    """What kubectl prints; UsageError has its own error, in a sentence."""
    try:
        done = subprocess.run(
            ["kubectl", *words],
            input=given,
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UsageError(_NO_KUBECTL) from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"kubectl had no answer within {ANSWER_S:g} s.") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        why = lines[-1].removeprefix("error: ").rstrip(".?") if lines else "it said nothing"
        raise UsageError(
            f"kubectl {words[0]} failed: {why}. `kubectl cluster-info` says which cluster it asks."
        )
    return done.stdout


def follow_lines(words: list[str]) -> Iterator[str]:
    """The lines that kubectl prints, as they come; it ends when they are no longer wanted."""
    try:
        process = subprocess.Popen(["kubectl", *words], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UsageError(_NO_KUBECTL) from None
    assert process.stdout is not None
    try:
        with process.stdout as lines:
            yield from (line.rstrip("\n") for line in lines)
    finally:
        process.terminate()
        process.wait()


_NO_KUBECTL = (
    "kubectl is not installed here. Install it and choose a cluster (kubectl config "
    "use-context), or print the manifests with --dry-run and apply them elsewhere."
)


def _owned(item: Manifest, owner: Manifest) -> Manifest:
    """The same, to be removed with its owner."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return item | {"metadata": item["metadata"] | {"ownerReferences": [reference]}}


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _where(item: Manifest) -> tuple[str, str, list[str]]:
    kind = "jobsets.jobset.x-k8s.io" if item["kind"] == "JobSet" else "jobs.batch"
    metadata: dict[str, Any] = item["metadata"]
    return kind, metadata["name"], ["--namespace", metadata.get("namespace", "default")]
