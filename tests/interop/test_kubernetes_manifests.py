"""The manifests of configs/ are what the published schemas allow, and make pods whose environments tell them their ranks."""

import copy
import json

import pytest
import yaml

from syncvar.bootstrap.launch_env.detection import launcher_info
from tests.support.kubernetes_pods import manifests, pods_of_job, pods_of_set
from tests.support.paths import CONFIGS, TESTS

SCHEMAS = json.loads((TESTS / "support" / "kubernetes_fields.json").read_text())
KINDS = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
    "integer or string": (int, str),
}
KEY = "5e" * 32


def wrong(value, schema, place=""):
    """Yield what of a value its schema does not allow: unknown and missing fields, other kinds."""
    if isinstance(schema, str):
        if not isinstance(value, KINDS[schema]) or (
            schema == "integer" and isinstance(value, bool)
        ):
            yield f"{place}: {value!r} is no {schema}"
    elif "one of" in schema:
        if value not in schema["one of"]:
            yield f"{place}: {value!r} is none of {schema['one of']}"
    elif "each" in schema:
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no array"
        else:
            for number, one in enumerate(value):
                yield from wrong(one, schema["each"], f"{place}[{number}]")
    elif not isinstance(value, dict):
        yield f"{place}: {value!r} is no object"
    elif "all" in schema:
        for name, one in value.items():
            yield from wrong(one, schema["all"], f"{place}.{name}")
    else:
        known = {
            name: kind for kind, names in schema["other fields"].items() for name in names.split()
        } | schema.get("fields", {})
        for name in schema.get("required", "").split():
            if name not in value:
                yield f"{place}.{name} is missing"
        for name, one in value.items():
            yield from (
                wrong(one, known[name], f"{place}.{name}")
                if name in known
                else [f"{place}.{name} is not known"]
            )


def schema_of(document):
    return SCHEMAS[f"{document['apiVersion']} {document['kind']}"]


@pytest.mark.parametrize(
    "name", ["kubernetes-jobset.yaml", "kubernetes-indexed-job.yaml", "kubernetes-elastic.yaml"]
)
def test_a_manifest_is_what_its_schema_allows(name):
    for document in yaml.safe_load_all((CONFIGS / name).read_text()):
        assert list(wrong(document, schema_of(document))) == []


def container_of(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda document: container_of(document).update(imagee="x"),
            "containers[0].imagee is not known",
        ),
        (lambda document: container_of(document).pop("name"), "containers[0].name is missing"),
        (
            lambda document: document["spec"]["replicatedJobs"][0].update(replicas="2"),
            "replicatedJobs[0].replicas: '2' is no integer",
        ),
        (
            lambda document: container_of(document)["env"][0].update(value=4),
            "env[0].value: 4 is no string",
        ),
        (
            lambda document: document["spec"].update(coordinator={"jobIndex": 0}),
            "coordinator.replicatedJob is missing",
        ),
        (
            lambda document: document["spec"]["failurePolicy"].update(maxRestarts=True),
            "maxRestarts: True is no integer",
        ),
    ],
    ids=["unknown", "missing", "kind", "number for a text", "required", "boolean for a number"],
)
def test_what_a_schema_does_not_allow_is_seen(change, words):
    document = copy.deepcopy(manifests("kubernetes-jobset.yaml")["JobSet"])
    change(document)
    (found,) = wrong(document, schema_of(document))
    assert found.endswith(words), found


@pytest.mark.parametrize(
    ("pods", "first"),
    [(pods_of_set, "train-workers-0-0.train"), (pods_of_job, "train-0.train")],
    ids=["set", "job"],
)
def test_pods_are_told_their_ranks(pods, first):
    told = [launcher_info(environ) for environ in pods(KEY).values()]
    assert [one.rank for one in told] == [0, 1, 2, 3]
    assert {(one.world_size, one.host_count, one.address, one.restarts) for one in told} == {
        (4, 4, first, 0)
    }
    assert {one.host_index for one in told} == {0, 1, 2, 3}
    assert next(iter(pods(KEY))) == first.partition(".")[0], (
        "the name of the first pod is that of its host"
    )


def test_pods_of_another_start_are_another_job():
    first, again = (
        launcher_info(next(iter(pods_of_set(KEY, attempt).values()))) for attempt in (0, 2)
    )
    assert (first.restarts, again.restarts) == (0, 2)
    assert first.run != again.run


def test_the_names_of_an_indexed_job_are_those_of_its_service():
    objects = manifests("kubernetes-indexed-job.yaml")
    service, job = objects["Service"], objects["Job"]
    assert service["spec"]["clusterIP"] == "None", "headless: a text, not nothing"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"], "all at once"
