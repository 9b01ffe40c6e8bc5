"""Pods for the tests of admission: made, sent with and without our label, and compared."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.kubernetes import ControlPlane, Manifest

LABEL = "gpumem-otel/inject"


def pod(
    *containers: Manifest,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    namespace: str = "training",
    **spec: object,
) -> Manifest:
    """A pod; each container is what it has besides name and image."""
    given = containers or ({},)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "one",
            "namespace": namespace,
            "labels": dict(labels or {}),
            "annotations": dict(annotations or {}),
        },
        "spec": {
            "containers": [
                {"name": f"c{i}", "image": "train", **one} for i, one in enumerate(given)
            ],
            **spec,
        },
    }


def gpus(number: int) -> Manifest:
    """A container's limit."""
    return {"resources": {"limits": {"nvidia.com/gpu": str(number)}}}


def env(**values: str) -> Manifest:
    """A container's variables."""
    return {"env": [{"name": name, "value": value} for name, value in values.items()]}


def both(cluster: ControlPlane, one: Manifest) -> tuple[Manifest, Manifest]:
    """What the server makes of a pod without the label, and with it."""
    labelled = copy.deepcopy(one)
    labelled["metadata"]["labels"][LABEL] = "true"
    plain = cluster.create(one, dry_run=True)
    return plain, cluster.create(labelled, dry_run=True)


def _key(item: Any) -> Any:
    """What tells one element of a list from another."""
    if not isinstance(item, dict):
        return item
    if "containerPort" in item:
        return item["containerPort"]
    return item.get("mountPath", item.get("name", repr(item)))


def differences(plain: Any, changed: Any, path: str = "spec") -> Iterator[str]:
    """Everything that was changed or taken away, none of which may be."""
    if isinstance(plain, dict) and isinstance(changed, dict):
        for name, value in plain.items():
            if name not in changed:
                yield f"{path}.{name} is gone"
            else:
                yield from differences(value, changed[name], f"{path}.{name}")
    elif isinstance(plain, list) and isinstance(changed, list):
        there = {_key(item): item for item in changed}
        order = [name for name in map(_key, changed) if name in set(map(_key, plain))]
        if order != [_key(item) for item in plain]:
            yield f"{path} has {order}"
        for item in plain:
            if _key(item) in there:
                yield from differences(item, there[_key(item)], f"{path}[{_key(item)}]")
    elif plain != changed:
        yield f"{path} was {plain!r} and is {changed!r}"


def container(made: Manifest, name: str = "c0") -> Manifest:
    """One of a pod's containers."""
    found: Manifest = next(one for one in made["spec"]["containers"] if one["name"] == name)
    return found


def variables(made: Manifest, name: str = "c0") -> dict[str, str]:
    """Name -> value, or the path of the field."""
    return {
        one["name"]: one.get("value", one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
        for one in container(made, name).get("env", [])
    }


def ports(made: Manifest, name: str = "c0") -> dict[int, str]:
    """Number -> name."""
    return {
        one["containerPort"]: one.get("name", "") for one in container(made, name).get("ports", [])
    }
