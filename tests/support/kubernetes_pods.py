"""What Kubernetes and the JobSet controller make of a manifest: the environment of each pod, as far as a rank reads it."""

import re

import yaml

from tests.support.paths import CONFIGS


def manifests(name):
    """Return the objects of a file of configs/, by their kinds."""
    return {one["kind"]: one for one in yaml.safe_load_all((CONFIGS / name).read_text())}


def environ_of(container, about, index, key):
    """Return what a container is started with.

    Args:
        container: From the manifest.
        about: Labels and annotations of the pod; the controller writes both alike.
        index: The pod's completion index.
        key: What the secret holds.
    """
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    for one in container["env"]:
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[one["name"]] = key
        elif "fieldRef" in source:
            found[one["name"]] = about[
                re.fullmatch(
                    r"metadata\.(?:labels|annotations)\['(.+)'\]", source["fieldRef"]["fieldPath"]
                )[1]
            ]
        else:
            found[one["name"]] = one["value"]
    return found


def pods_of_set(key, attempt=0):
    """Return the environments of the pods of configs/kubernetes-jobset.yaml, by their host names."""
    document = manifests("kubernetes-jobset.yaml")["JobSet"]
    name, spec = document["metadata"]["name"], document["spec"]
    jobs = [(one, number) for one in spec["replicatedJobs"] for number in range(one["replicas"])]
    first = spec["coordinator"]
    pods = {}
    for total, (job, number) in enumerate(jobs):
        about = {
            "coordinator": f"{name}-{first['replicatedJob']}-{first['jobIndex']}-{first['podIndex']}.{name}",
            "global-replicas": str(len(jobs)),
            "job-global-index": str(total),
            "restart-attempt": str(attempt),
        }
        about = {f"jobset.sigs.k8s.io/{label}": text for label, text in about.items()}
        inner = job["template"]["spec"]
        for index in range(inner["completions"]):
            host = f"{name}-{job['name']}-{number}-{index}"
            pods[host] = {
                "HOSTNAME": host,
                **environ_of(inner["template"]["spec"]["containers"][0], about, index, key),
            }
    return pods


def pods_of_job(key):
    """Return the environments of the pods of configs/kubernetes-indexed-job.yaml, by their host names."""
    document = manifests("kubernetes-indexed-job.yaml")["Job"]
    name, spec = document["metadata"]["name"], document["spec"]
    container = spec["template"]["spec"]["containers"][0]
    return {
        f"{name}-{index}": {"HOSTNAME": f"{name}-{index}", **environ_of(container, {}, index, key)}
        for index in range(spec["completions"])
    }
