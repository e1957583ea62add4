"""A run as Kubernetes reads it: an Indexed Job with a headless service, or a JobSet. Pure.

Pod 0 runs `shoal train`, the others `shoal agent`; they find pod 0 by its name in the service, and
its keys in a secret that is mounted as a file, so that no key is in a manifest, an environment or
a command line. A pod that is preempted, drained or evicted gets SIGTERM, the run saves, and its
pods exit with 75, which is retried and not counted. Exit code 2 (usage) fails the job at once, and
so does 1 (the recipe failed) of pod 0. The others exit with 75 instead of 1, since whether a run
has failed is for pod 0 to say. Read next: `on_kubernetes.py`, which applies these.
"""

import json
import os
import re
import secrets
import shlex
from typing import Annotated, Any, Literal

import msgspec

from shoal.cluster.engine import JobRequest
from shoal.errors import UsageError, nearest

Manifest = dict[str, Any]

PORT = 29400  # at which pod 0 listens for the others
SECRET_AT, INVITATION_FILE = "/var/run/shoal", "invitation"
OURS = {"app.kubernetes.io/managed-by": "shoal"}
INSTANCE = "app.kubernetes.io/instance"
RUN_DIR = "shoal/run-dir"
USER = 1000  # of the processes in a pod, unless the address says otherwise
GRACE_S = 120  # between SIGTERM and the end of a pod, for the run to save
RETRIES = 6  # of pods that ended by themselves, other than by 75, 1 or 2
KEPT_S = 7 * 24 * 3600  # after a job's end
MOST_NAME = 45  # JobSet adds to it, and 63 is the most
_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
INDEX = "JOB_COMPLETION_INDEX"
NOT_PLAIN = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")

FIRST = "exec {train}"
OTHERS = """\
trap 'exit 75' TERM
until {python} -c '{listens}' 2>/dev/null; do sleep 2; done
{agent} &
agent=$!
trap 'told=yes; kill -TERM "$agent" 2>/dev/null' TERM
wait "$agent"; code=$?
while [ "$told" ]; do told=; wait "$agent"; code=$?; done
[ "$code" = 1 ] && exit 75  # whether the run has failed is for pod 0 to say
exit "$code\""""
LISTENS = "import socket; socket.create_connection(({host}, {port}), 5)"
LIVES = "grep -q '^State:.[RSD]' /proc/1/status"  # it has not been stopped


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What follows `--on kubernetes:`, as in image=registry/name:1,claim=runs."""

    image: str  # with Shoal, the recipe and what it imports
    claim: str  # a PersistentVolumeClaim for run directories
    mount: str = "/runs"  # where it is mounted
    kind: Literal["job", "jobset"] = "job"
    namespace: str = ""  # default: that of kubectl's context
    memory: str = ""  # of each pod, as in 8Gi
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 0  # of each pod
    priority_class: str = ""
    python: str = "python"
    user: Annotated[int, msgspec.Meta(ge=1)] = USER


def parse_options(address: str) -> KubernetesOptions:
    """UsageError names what is missing or unknown."""
    known = [name.replace("_", "-") for name in KubernetesOptions.__struct_fields__]
    found: dict[str, str] = {}
    for part in filter(None, address.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise UsageError(f"--on kubernetes:{part}: {name!r} is unknown. {nearest(name, known)}")
        found[name.replace("-", "_")] = value
    for name in ("image", "claim"):
        if not found.get(name):
            raise UsageError(
                f"--on kubernetes:{address} names no {name}. Give an image with Shoal and the "
                "recipe, and the claim of a volume for run directories: --on kubernetes:image="
                "registry.example/train:1,claim=runs."
            )
    for name in {"claim", "namespace", "priority_class"} & found.keys():
        if not re.fullmatch(_NAME, found[name]):
            raise UsageError(
                f"--on kubernetes:{name.replace('_', '-')}={found[name]} is not a name that "
                "Kubernetes allows: small letters, digits and - between them."
            )
    if re.search(r"\s", found["image"]):
        raise UsageError(f"--on kubernetes:image={found['image']}: an image has no spaces.")
    try:
        return msgspec.convert(found, KubernetesOptions, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--on kubernetes:{address}: {error}.") from None


def new_name(name: str) -> str:
    """A name for a job that no other has, as Kubernetes allows it."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"shoal-{plain}".rstrip("-")
    return f"{plain[: MOST_NAME - 6].rstrip('-')}-{secrets.token_hex(3)[:5]}"


def first_address(name: str, options: KubernetesOptions) -> str:
    """The name at which pods find pod 0."""
    return f"{name}-first-0-0.{name}" if options.kind == "jobset" else f"{name}-0.{name}"


def secret_manifest(name: str, options: KubernetesOptions, invitation: str) -> Manifest:
    """The keys of one run. Only `submit` makes it; it is never printed."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(f"{name}-keys", name, options),
        "type": "Opaque",
        "immutable": True,
        "stringData": {INVITATION_FILE: invitation},
    }


def manifests(request: JobRequest, name: str, options: KubernetesOptions) -> list[Manifest]:
    """All but the secret, in the order in which they are applied."""
    refuse_unusable(request, options)
    if options.kind == "jobset":
        return [_job_set(request, name, options)]
    return [_service(name, options), _job(request, name, options)]


def refuse_unusable(request: JobRequest, options: KubernetesOptions) -> None:
    if request.priority:
        raise UsageError(
            f"--priority {request.priority} has no effect on Kubernetes, where priorities are "
            "classes with names. Name one: --on kubernetes:...,priority-class=NAME."
        )
    if not options.mount.startswith("/"):
        raise UsageError(f"mount={options.mount} must be an absolute path, as in mount=/runs.")


def run_dir_in_pods(request: JobRequest, options: KubernetesOptions) -> str:
    """On the volume, by the same name as here, where only the record of the job is."""
    mount = options.mount.rstrip("/")
    if request.run_dir.startswith(f"{mount}/"):
        return request.run_dir
    return f"{mount}/{os.path.basename(request.run_dir)}"


def yaml_text(documents: list[Manifest]) -> str:
    """As YAML, which is all that a manifest needs: mappings, lists, numbers and strings."""
    return "---\n".join("\n".join(_yaml(document, "")) + "\n" for document in documents)


def _yaml(value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        lines = []
        for key, inner in value.items():
            lines += _entry(f"{indent}{_scalar(key)}:", inner, indent + "  ")
        return lines
    lines = []
    for inner in value:
        first, *rest = _entry(f"{indent}-", inner, indent + "  ")
        if first == f"{indent}-":  # its content begins in the same line
            first, rest = f"{indent}- {rest[0].lstrip(' ')}", rest[1:]
        lines += [first, *rest]
    return lines


def _entry(head: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [head, *_yaml(value, indent)]
    if isinstance(value, str) and re.fullmatch(r"[!-~][ -~]*(\n[ -~]+)+", value):
        return [f"{head} |-", *(indent + line for line in value.split("\n"))]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    """Strings are quoted as JSON does, unless nothing else could be meant by them."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", value)
    if is_plain and value.lower() not in NOT_PLAIN:
        return str(value)
    if not isinstance(value, str):
        return json.dumps(value)
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if character < "\x7f" else f"\\U{ord(character):08x}"


def _metadata(name: str, instance: str, options: KubernetesOptions) -> Manifest:
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **place, "labels": {**OURS, INSTANCE: instance}}


def _service(name: str, options: KubernetesOptions) -> Manifest:
    """Gives each pod a name. Pods that are not ready have one too: they wait for each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, name, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {**OURS, INSTANCE: name},
            "ports": [{"name": "shoal", "port": PORT}],
        },
    }


def _job(request: JobRequest, name: str, options: KubernetesOptions) -> Manifest:
    """One template for all pods, which look at their index."""
    first, others = _scripts(request, name, options)
    script = first
    if request.num_hosts > 1:
        script = f'if [ "${INDEX}" = 0 ]; then\n  {first}\nfi\n{others}'
    ready = f'[ "${INDEX}" != 0 ] || {_readiness(options)}'
    pod = _pod(request, name, options, script, ready if request.num_hosts > 1 else "")
    metadata = _metadata(name, name, options) | {"annotations": {RUN_DIR: request.run_dir}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            **_job_spec(request.num_hosts, [1, 2]),
            **_deadline(request),
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {
                "metadata": {"labels": {**OURS, INSTANCE: name}},
                "spec": {"subdomain": name, **pod},
            },
        },
    }


def _readiness(options: KubernetesOptions) -> str:
    """Whether pod 0 listens, asked inside it."""
    listens = LISTENS.format(host="socket.gethostname()", port=PORT)
    return f"{shlex.quote(options.python)} -c {shlex.quote(listens)}"


def _job_set(request: JobRequest, name: str, options: KubernetesOptions) -> Manifest:
    """A job for pod 0 and one for the others; JobSet makes the service. All begin again together
    when one of the two has failed."""
    first, others = _scripts(request, name, options)
    ready = _readiness(options) if request.num_hosts > 1 else ""
    parts = [("first", 1, first, ready, [1, 2])]
    if request.num_hosts > 1:
        parts.append(("others", request.num_hosts - 1, others, "", [2]))
    jobs = [
        {
            "name": part,
            "replicas": 1,
            "template": {
                "spec": {
                    **_job_spec(count, fatal),
                    **_deadline(request),
                    "template": {
                        "metadata": {"labels": {**OURS, INSTANCE: name}},
                        "spec": _pod(request, name, options, script, probe),
                    },
                }
            },
        }
        for part, count, script, probe, fatal in parts
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, name, options) | {"annotations": {RUN_DIR: request.run_dir}},
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["first"]},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": KEPT_S,
            "replicatedJobs": jobs,
        },
    }


def _job_spec(count: int, fatal: list[int]) -> Manifest:
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": RETRIES,
        "podReplacementPolicy": "Failed",  # the run directory has one owner at a time
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _codes(fatal)},
                {"action": "Ignore", "onExitCodes": _codes([75])},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
    }


def _codes(values: list[int]) -> Manifest:
    return {"containerName": "shoal", "operator": "In", "values": values}


def _deadline(request: JobRequest) -> Manifest:
    """Upon which pods get SIGTERM, save, and are not started again."""
    limit = request.time_limit_s
    return {} if limit is None else {"activeDeadlineSeconds": max(1, round(limit))}


def _scripts(request: JobRequest, name: str, options: KubernetesOptions) -> tuple[str, str]:
    """What pod 0 runs, and what the others run, as text for a shell."""
    shoal = [options.python, "-m", "shoal"]
    there = run_dir_in_pods(request, options)
    words = [there if word == request.run_dir else word for word in request.arguments]
    train = shlex.join([*shoal, "train", *words, "--nodes", str(request.num_hosts)])
    agent = f"{shlex.join([*shoal, 'agent'])} < {SECRET_AT}/{INVITATION_FILE}"
    listens = LISTENS.format(host=f'"{first_address(name, options)}"', port=PORT)
    others = OTHERS.format(agent=agent, listens=listens, python=shlex.quote(options.python))
    return FIRST.format(train=train), others


def _pod(
    request: JobRequest, name: str, options: KubernetesOptions, script: str, ready: str
) -> Manifest:
    priority = {"priorityClassName": options.priority_class} if options.priority_class else {}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **priority,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, options, script, ready)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "keys", "secret": {"secretName": f"{name}-keys", "defaultMode": 0o440}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(
    request: JobRequest, options: KubernetesOptions, script: str, ready: str
) -> Manifest:
    cores = {"cpu": str(request.cores)} if request.cores else {}
    memory = {"memory": options.memory} if options.memory else {}
    gpus = {"nvidia.com/gpu": options.gpus} if options.gpus else {}
    probes: Manifest = {
        "startupProbe": {"exec": _shell(LIVES), "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {"exec": _shell(LIVES), "periodSeconds": 20, "failureThreshold": 6},
    }
    if ready:
        probes["readinessProbe"] = {"exec": _shell(ready), "periodSeconds": 10}
        probes["readinessProbe"]["timeoutSeconds"] = 10
    return {
        "name": "shoal",
        "image": options.image,
        "command": ["/bin/sh", "-c", script],
        "ports": [{"name": "shoal", "containerPort": PORT}],
        "resources": {
            "requests": {**cores, **memory, **gpus},
            "limits": {**memory, **gpus},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **probes,
        "volumeMounts": [
            {"name": "runs", "mountPath": options.mount},
            {"name": "keys", "mountPath": SECRET_AT, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def _shell(text: str) -> Manifest:
    return {"command": ["/bin/sh", "-c", text]}
