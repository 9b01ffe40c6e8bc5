"""A real Kubernetes control plane without nodes, on loopback, with helm and prometheus-operator.

Programs are looked for in the folder that GPUMEM_K8S_BIN names (`make check-helm` builds them). A
missing one skips the test and says what is missing; with GPUMEM_REQUIRE_K8S=1 it fails.

    with ControlPlane(folder) as cluster:
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}})
        helm(cluster, "install", "x", "helm/gpumem-otel", "--namespace", "a")

There is no kubelet and no controller: a pod stays what admission made of it, and its status is what
a test writes.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import ssl
import subprocess
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from support import certs
from support.servers import Server, free_port, until

if TYPE_CHECKING:
    from collections.abc import Iterator

Manifest = dict[str, Any]

TOKEN = "only-on-loopback"
"""Of a server that lives for one test."""

HELM_SECONDS = 120


def program(name: str) -> str:
    """Path of a program, or of the folder of CRDs; skips or fails where it is missing."""
    folder = os.environ.get("GPUMEM_K8S_BIN", "")
    found = Path(folder) / name
    if folder and os.access(found, os.X_OK):
        return str(found)
    lack = f"no {name} in GPUMEM_K8S_BIN={folder or '(not set)'}: run `make check-helm`"
    if os.environ.get("GPUMEM_REQUIRE_K8S") == "1":
        pytest.fail(lack)
    pytest.skip(lack)


class _Etcd(Server):
    name = "etcd"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = f"http://127.0.0.1:{free_port()}"
        self._peers = f"http://127.0.0.1:{free_port()}"

    def command(self) -> list[str]:
        return [
            program("etcd"),
            f"--data-dir={self._folder / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self._peers}",
            f"--initial-advertise-peer-urls={self._peers}",
            f"--initial-cluster=default={self._peers}",
            "--unsafe-no-fsync",
        ]

    def ready_url(self) -> str:
        return f"{self.url}/health"


class ControlPlane(Server):
    """etcd and kube-apiserver; everybody with a credential may do everything."""

    name = "kube-apiserver"

    def __init__(self, folder: Path) -> None:
        program("kube-apiserver")
        super().__init__(folder)
        self._etcd = _Etcd(folder / "etcd")
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.authority = certs.make_ca(folder)
        self.client = certs.issue(folder, self.authority, "tests", [])
        self._server = certs.issue(folder, self.authority, "apiserver", ["127.0.0.1"])
        self._context = ssl.create_default_context(cafile=str(self.authority.cert_file))
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()))
        self.kubeconfig.chmod(0o600)

    def __enter__(self) -> Any:
        self._etcd.__enter__()
        try:
            return super().__enter__()
        except BaseException:
            self._etcd.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._etcd.__exit__()

    def command(self) -> list[str]:
        tokens = self._folder / "tokens.csv"
        tokens.write_text(f"{TOKEN},tests,tests,system:masters\n")
        return [
            program("kube-apiserver"),
            f"--etcd-servers={self._etcd.url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # it refuses to announce a loopback address to a cluster; there is none
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self._server.cert_file}",
            f"--tls-private-key-file={self._server.key_file}",
            f"--client-ca-file={self.authority.cert_file}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-account-issuer=https://tests",
            f"--service-account-key-file={self._server.cert_file}",
            f"--service-account-signing-key-file={self._server.key_file}",
            "--service-cluster-ip-range=10.0.0.0/24",
            # it would wait for service accounts that no controller makes
            "--disable-admission-plugins=ServiceAccount",
        ]

    def ready_url(self) -> str:
        return f"{self.url}/readyz"

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended:\n{self.log()}"
        try:
            self.ask("GET", "/readyz", plain=True)
            self.ask("GET", "/api/v1/namespaces/default")
        except OSError:
            return False
        return True

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str = "json",
        plain: bool = False,
    ) -> Any:
        """One request; `kind` is the media type of the body, text is sent as it is.

        Raises:
            urllib.error.HTTPError: the server refused; its reason names what it said.
        """
        data = body.encode() if isinstance(body, str) else body and json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"},
        )

        def sent() -> tuple[bytes] | None:
            try:
                with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
                    return (answer.read(),)
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read().decode(errors="replace")
                if error.code == HTTPStatus.TOO_MANY_REQUESTS:
                    return None  # the storage of a new kind is not ready yet
                raise urllib.error.HTTPError(
                    error.url, error.code, f"{error.reason}: {said}", error.hdrs, None
                ) from None

        (text,) = until(sent, f"an answer to {method} {path}")
        return text.decode() if plain else json.loads(text)

    def path(self, manifest: Manifest) -> str:
        """Of the collection that an object belongs to."""
        version, kind = manifest["apiVersion"], manifest["kind"]
        if (version, kind) not in self._resources:
            root = f"/apis/{version}" if "/" in version else f"/api/{version}"
            for one in self.ask("GET", root)["resources"]:
                if "/" not in one["name"]:
                    self._resources[version, one["kind"]] = (
                        f"{root}%s/{one['name']}",
                        one["namespaced"],
                    )
        pattern, namespaced = self._resources[version, kind]
        space = manifest["metadata"].get("namespace", "default")
        return pattern % (f"/namespaces/{space}" if namespaced else "")

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """An object, every field of which the server must know."""
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        made: Manifest = self.ask("POST", self.path(manifest) + query, manifest)
        return made

    def get(self, version: str, kind: str, name: str, namespace: str = "default") -> Manifest:
        """An object that is there."""
        seek = {"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace}}
        found: Manifest = self.ask("GET", f"{self.path(seek)}/{name}")
        return found

    def objects(self) -> dict[str, Manifest]:
        """Every object of every kind, by its path; without events and leases, which come and go."""
        found = {}
        for root in self._roots():
            for one in self.ask("GET", root)["resources"]:
                if "/" in one["name"] or "list" not in one["verbs"]:
                    continue
                if one["name"] in {"events", "leases"}:
                    continue
                for item in self.ask("GET", f"{root}/{one['name']}")["items"]:
                    meta = item["metadata"]
                    place = f"{root}/{one['name']}/{meta.get('namespace', '')}/{meta['name']}"
                    found[place] = item
        return found

    def _roots(self) -> Iterator[str]:
        yield "/api/v1"
        for group in self.ask("GET", "/apis")["groups"]:
            yield f"/apis/{group['preferredVersion']['groupVersion']}"

    def install_crds(self, *kinds: str) -> None:
        """Of the Prometheus operator, by their plural; waits until they are served."""
        collections = []
        for kind in kinds:
            path = Path(program("crds")) / f"monitoring.coreos.com_{kind}.yaml"
            # as text: one of them has a bare `=`, which is no scalar to PyYAML
            made = self.ask(
                "POST",
                "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                path.read_text(),
                kind="yaml",
            )
            version = made["spec"]["versions"][0]["name"]
            collections.append(f"/apis/monitoring.coreos.com/{version}/{kind}")

        def served() -> bool:
            try:
                for collection in collections:
                    self.ask("GET", collection)
            except urllib.error.HTTPError:
                return False
            return True

        until(served, "the operator's kinds to be served")

    def _kubeconfig(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [
                {
                    "name": "tests",
                    "cluster": {
                        "server": self.url,
                        "certificate-authority": str(self.authority.cert_file),
                    },
                }
            ],
            "users": [{"name": "tests", "user": {"token": TOKEN}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        }


class Operator(Server):
    """prometheus-operator, outside of the cluster."""

    name = "operator"

    def __init__(self, folder: Path, cluster: ControlPlane) -> None:
        super().__init__(folder)
        self._cluster = cluster
        self._port = free_port()

    def command(self) -> list[str]:
        return [
            program("operator"),
            f"-apiserver={self._cluster.url}",
            f"-ca-file={self._cluster.authority.cert_file}",
            f"-cert-file={self._cluster.client.cert_file}",
            f"-key-file={self._cluster.client.key_file}",
            f"-web.listen-address=127.0.0.1:{self._port}",
        ]

    def ready_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/healthz"

    def configuration(self, name: str, namespace: str) -> Manifest | None:
        """What it made for a Prometheus; None where it has not yet."""
        try:
            secret = self._cluster.get("v1", "Secret", f"prometheus-{name}", namespace)
        except urllib.error.HTTPError:
            return None
        packed = secret.get("data", {}).get("prometheus.yaml.gz")
        if packed is None:
            return None
        loaded: Manifest = yaml.safe_load(gzip.decompress(base64.b64decode(packed)))
        return loaded


def helm(cluster: ControlPlane | None, *arguments: str, fails: bool = False) -> str:
    """Run helm; gives its stdout, or its stderr where it must fail.

    Args:
        cluster: None for what needs none (lint, template, package).
        fails: it must exit with 1 and say why.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HELM_")}
    if cluster is not None:
        environ["KUBECONFIG"] = str(cluster.kubeconfig)
    done = subprocess.run(
        [program("helm"), *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=HELM_SECONDS,
    )
    assert done.returncode == int(fails), f"helm {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stderr if fails else done.stdout


def rendered(text: str) -> list[Manifest]:
    """The objects that `helm template` wrote."""
    return [one for one in yaml.safe_load_all(text) if one]
