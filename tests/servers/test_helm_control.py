"""The chart's control part: tokens, ports and policies as a real Kubernetes API server has them.

What a pod gets is put under the control listener itself, with the Secret's own content.
"""

from __future__ import annotations

import base64
import re
import ssl
from pathlib import Path

import pytest
import yaml
from support import certs
from support.controlling import bearer, call
from support.kubernetes import ControlPlane, helm, rendered
from support.listening import WAIT
from support.pods import both, container, differences, env, gpus, pod, ports, variables
from support.said import said
from support.servers import until
from support.yield_double import YieldDouble

from gpumem_otel.errors import ServeError
from gpumem_otel.settings.identity import identify
from gpumem_otel.settings.options import resolve
from gpumem_otel.yielding.control.listener import ControlListener
from gpumem_otel.yielding.control.roles import parse_tokens

pytestmark = pytest.mark.servers

CHART = Path(__file__).parents[2] / "helm" / "gpumem-otel"
SECRET = "g-gpumem-otel-control"
TCP = {
    "control.enabled": "true",
    "control.port": "9564",
    "control.tls.existingSecret": "certificate",
}


def given(**more: str) -> tuple[str, ...]:
    """Control over TCP, as arguments; dots as underscores twice."""
    values = {**TCP, **{name.replace("__", "."): value for name, value in more.items()}}
    return tuple(f"--set={name}={value}" for name, value in values.items() if value)


def values(name: str) -> tuple[str, str]:
    return "-f", str(CHART / "ci" / f"{name}-values.yaml")


def template(*arguments: str) -> list:
    return rendered(helm(None, "template", "g", str(CHART), "-n", "monitoring", *arguments))


def kinds(objects: list, kind: str) -> list:
    return [one for one in objects if one["kind"] == kind]


def files(secret: dict) -> dict[str, bytes]:
    return {name: base64.b64decode(data) for name, data in secret["data"].items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("cluster")) as running:
        for name in ("monitoring", "training", "research"):
            running.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        yield running


def install(cluster, *arguments: str) -> None:
    """Install or upgrade, and wait until the server heeds the policy, by the image's tag."""
    install.count += 1
    tag = f"v{install.count}"
    helm(
        cluster,
        *("upgrade", "--install", "g", str(CHART), "-n", "monitoring", *arguments),
        *("--set", f"inject.image.tag={tag}"),
    )

    def heeded() -> bool:
        made = cluster.create(pod(labels={"gpumem-otel/inject": "true"}), dry_run=True)
        return [one["image"][-len(tag) :] for one in made["spec"].get("initContainers", [])] == [
            tag
        ]

    until(heeded, "the policy to be heeded")


install.count = 0


# What the values come to.


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"control__tls__existingSecret": ""}, "control.port needs control.tls.existingSecret"),
        ({"control__insecure": "true"}, "exclude each other"),
        ({"control__tls__clientRoles": "{read}"}, "clientRoles needs control.tls.clientCaKey"),
        (
            {
                "control__tls__existingSecret": "",
                "control__insecure": "true",
                "control__tls__clientCaKey": "ca.crt",
            },
            "clientCaKey needs control.tls.existingSecret",
        ),
        ({"control__roles": "null"}, "control.port needs credentials"),
        ({"control__port": "9471"}, "control.port 9471 and port 9464 overlap"),
        ({"control__port": "9457"}, "control.port 9457 and port 9464 overlap"),
    ],
)
def test_what_would_not_start_or_open_a_door_is_refused(changed, reason):
    assert reason in helm(None, "template", "g", str(CHART), *given(**changed), fails=True)


def test_ports_next_to_one_another_do_not_overlap():
    for port in ("9472", "9456"):
        assert template(*given(control__port=port))


def test_the_socket_alone_needs_neither_secret_nor_policy():
    objects = template(*values("control-socket"))

    names = {"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"}
    assert {one["kind"] for one in objects} == names


def test_certificates_alone_need_no_tokens():
    objects = template(
        *given(
            control__roles="null",
            control__tls__clientCaKey="ca",
            control__tls__clientRoles="{read}",
        )
    )

    assert [one["kind"] for one in objects] == ["NetworkPolicy"]


def test_without_control_its_other_values_change_nothing():
    off = given(control__enabled="", control__roles="{read}", control__insecure="true")

    assert template(*off) == []
    assert template(*values("inject"), *off) == template(*values("inject"))


def test_each_namespace_has_tokens_of_its_own():
    secrets = kinds(
        template(*given(control__namespaces="{training,research}", control__roles="{read,yield}")),
        "Secret",
    )

    assert [one["metadata"]["namespace"] for one in secrets] == ["training", "research"]
    told = [dict(parse_tokens(files(one)["tokens"])) for one in secrets]
    for tokens in told:
        roles = [sorted(role.value for role in one.roles) for one in tokens.values()]
        assert roles == [["read"], ["yield"]]
    assert told[0].keys().isdisjoint(told[1])


def test_a_secret_of_yours_is_named_and_none_is_made():
    objects = template(*values("control-existing"))

    assert kinds(objects, "Secret") == []
    (policy,) = kinds(objects, "MutatingAdmissionPolicy")
    patch = policy["spec"]["mutations"][0]["jsonPatch"]["expression"]
    assert 'secretName: "commanders-of-gpumem"' in patch
    assert '{key: "file", path: "tokens"}' in patch


# Who reaches the ports.


def policies(*arguments: str) -> dict[tuple[str, str], dict]:
    found = kinds(template(*arguments), "NetworkPolicy")
    return {(one["metadata"]["namespace"], one["metadata"]["name"]): one["spec"] for one in found}


def opened(spec: dict, *, to_all: bool) -> list[tuple[int, int]]:
    """TCP ports that a policy opens to everybody, or to somebody."""
    return [
        (one["port"], one["endPort"])
        for rule in spec["ingress"]
        if ("from" not in rule) == to_all
        for one in rule["ports"]
        if one["protocol"] == "TCP"
    ]


def test_nobody_reaches_the_ports_who_is_not_named():
    """An empty list of peers would be everybody, so there is no rule then."""
    (spec,) = policies(*given()).values()

    assert opened(spec, to_all=False) == []
    assert opened(spec, to_all=True) == [(1, 9563), (9572, 65535)]
    assert spec["podSelector"] == {"matchLabels": {"gpumem-otel/inject": "true"}}
    (spec,) = policies(*given(networkPolicy__otherIngress="false")).values()
    assert spec["ingress"] == []


def test_who_is_named_reaches_them():
    """With the commands' ports below the readers', each is closed to the other's peers."""
    found = policies(*values("control"))

    spec = found["training", "g-gpumem-otel"]
    readers, commanders, _ = spec["ingress"]
    assert readers["from"] == [{"podSelector": {}}]
    assert readers["ports"] == [{"protocol": "TCP", "port": 9564, "endPort": 9571}]
    assert commanders["ports"] == [{"protocol": "TCP", "port": 9464, "endPort": 9471}]
    text = (CHART / "ci" / "control-values.yaml").read_text()
    assert commanders["from"] == yaml.safe_load(text)["control"]["allowFrom"]
    assert opened(spec, to_all=True) == [(1, 9463), (9472, 9563), (9572, 65535)]
    assert opened(found["research", "g-gpumem-otel"], to_all=True) == [(1, 9563), (9572, 65535)]
    assert len(found) == 2


def test_pods_that_another_policy_selects_are_closed_as_well():
    """Policies add up: what the one of two that select a pod leaves open is open."""
    found = policies(*values("network-policy-denied"), *values("control-existing"))
    assert [name for name in found if name[0] == "monitoring"] == [
        ("monitoring", "g-gpumem-otel-control")
    ]

    both_on = ("--set", "control.namespaces={training},networkPolicy.otherIngress=true")
    found = policies(*values("network-policy-denied"), *values("control-existing"), *both_on)
    ours = found["training", "g-gpumem-otel-control"]
    readers = found["training", "g-gpumem-otel"]
    assert ours["podSelector"]["matchLabels"] == readers["podSelector"]["matchLabels"]
    off = [{"key": "gpumem-otel/inject", "operator": "NotIn", "values": ["false"]}]
    assert ours["podSelector"]["matchExpressions"] == off
    assert ours["ingress"] == readers["ingress"]
    assert opened(ours, to_all=True) == [(1, 9463), (9472, 9563), (9572, 65535)]


# What a pod gets.

SETTINGS = {
    "GPUMEM_OTEL_CONTROL": "1",
    "GPUMEM_OTEL_CONTROL_HOST": "$(POD_IP)",
    "GPUMEM_OTEL_CONTROL_PORT": "9464",
    "GPUMEM_OTEL_CONTROL_TOKEN_FILE": "/gpumem-otel-control/tokens",
    "GPUMEM_OTEL_CONTROL_TLS_CERT_FILE": "/gpumem-otel-control-tls/tls.crt",
    "GPUMEM_OTEL_CONTROL_TLS_KEY_FILE": "/gpumem-otel-control-tls/tls.key",
    "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE": "/gpumem-otel-control-tls/ca.crt",
    "GPUMEM_OTEL_CONTROL_CLIENT_ROLES": "read,scheduler=yield,scheduler=restore",
}


def of_control(made: dict) -> dict[str, str]:
    (name,) = [one["name"] for one in made["spec"]["containers"]]
    found = variables(made, name).items()
    return {name: value for name, value in found if name.startswith("GPUMEM_OTEL_CONTROL")}


def secrets_of(made: dict) -> dict[str, dict]:
    return {one["name"]: one["secret"] for one in made["spec"]["volumes"] if "secret" in one}


@pytest.fixture(scope="module")
def controlled(cluster):
    install(cluster, *values("control"))
    return cluster


def test_a_pod_gets_tokens_certificate_and_ports(controlled):
    plain, made = both(controlled, pod(gpus(2)))

    assert list(differences(plain["spec"], made["spec"])) == []
    assert of_control(made) == SETTINGS
    names = {9564: "gpumem-0", 9565: "gpumem-1", 9464: "gpumem-ctl-0", 9465: "gpumem-ctl-1"}
    assert ports(made) == names
    assert secrets_of(made) == {
        "gpumem-otel-control": {
            "secretName": SECRET,
            "optional": True,
            "defaultMode": 420,
            "items": [{"key": "tokens", "path": "tokens"}],
        },
        "gpumem-otel-control-tls": {
            "secretName": "control-of-gpumem",
            "optional": True,
            "defaultMode": 420,
            "items": [
                {"key": "server.pem", "path": "tls.crt"},
                {"key": "server.key", "path": "tls.key"},
                {"key": "clients.pem", "path": "ca.crt"},
            ],
        },
    }
    assert container(made)["volumeMounts"] == [
        {"name": name, "mountPath": f"/{name}", "readOnly": True}
        for name in ("gpumem-otel", "gpumem-otel-control", "gpumem-otel-control-tls")
    ]
    (init,) = made["spec"]["initContainers"]
    assert init["volumeMounts"] == [{"name": "gpumem-otel", "mountPath": "/gpumem-otel"}]
    asked = "a pod in a namespace of `control.namespaces`"
    said("kube-apiserver", asked, "tokens and certificate mounted read only, ports declared")


@pytest.mark.parametrize(
    "one",
    [
        pod(gpus(1), namespace="research"),
        pod({**gpus(1), **env(GPUMEM_OTEL_CONTROL="0")}),
        pod({**gpus(1), **env(GPUMEM_OTEL_CONTROL="False")}),
    ],
    ids=["other-namespace", "off", "off-in-words"],
)
def test_pods_that_take_no_commands_get_no_tokens(controlled, one):
    plain, made = both(controlled, one)

    assert list(differences(plain["spec"], made["spec"])) == []
    assert of_control(made) == of_control(plain)
    assert secrets_of(made) == {}
    assert ports(made) == {9564: "gpumem-0"}


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ({"GPUMEM_OTEL_CONTROL_PORT": "7000"}, {9564: "gpumem-0", 7000: "gpumem-ctl-0"}),
        ({"GPUMEM_OTEL_CONTROL_PORT": "0"}, {9564: "gpumem-0"}),
        ({"GPUMEM_OTEL_CONTROL_PORT": "9564"}, {9564: "gpumem-0"}),
        ({"GPUMEM_OTEL_CONTROL_PORT": "99999"}, {9564: "gpumem-0"}),
        ({"GPUMEM_OTEL_PORT": "0"}, {9464: "gpumem-ctl-0"}),
        ({"GPUMEM_OTEL_PORT": "99999"}, {9464: "gpumem-ctl-0"}),
    ],
)
def test_ports_of_the_pods_own_keep_it_valid(controlled, own, names):
    """The server refuses a pod with a port that is none, or that is there twice."""
    plain, made = both(controlled, pod({**gpus(1), **env(**own)}))

    assert list(differences(plain["spec"], made["spec"])) == []
    assert ports(made) == names


def test_what_a_pod_sets_itself_stays(controlled):
    own = {"GPUMEM_OTEL_CONTROL_TOKEN_FILE": "/mine", "GPUMEM_OTEL_CONTROL_HOST": "127.0.0.1"}
    volumes = [
        {"name": "data", "emptyDir": {}},
        {"name": "gpumem-otel-control", "secret": {"secretName": "own"}},
    ]
    plain, made = both(controlled, pod(env(**own), volumes=volumes))

    assert list(differences(plain["spec"], made["spec"])) == []
    assert of_control(made) == {**SETTINGS, **own}
    assert secrets_of(made)["gpumem-otel-control"]["secretName"] == "own"


def test_the_readmes_lines_do_the_same(controlled):
    """For clusters without the policy."""
    text = (CHART / "README.md").read_text()
    (block,) = re.findall(r"<!-- control -->\n```yaml\n(.*?)```", text, re.DOTALL)
    lines = yaml.safe_load(block)["spec"]
    own = {"image": "train", **lines["containers"][0], **gpus(2)}
    own["env"] = [{"name": "POD_IP", "value": "10.0.0.7"}, *own["env"]]
    by_hand = pod(volumes=lines["volumes"])
    by_hand["spec"]["containers"] = [own]

    hand_made = controlled.create(by_hand, dry_run=True)
    _, made = both(controlled, pod(gpus(2)))

    expected = {name: value for name, value in SETTINGS.items() if "CLIENT" not in name}
    assert of_control(hand_made) == {**expected, "GPUMEM_OTEL_CONTROL_PORT": "9564"}
    ours = {9564 + i: name for i, name in enumerate(["gpumem-ctl-0", "gpumem-ctl-1"])}
    assert ports(hand_made, "train") == ours

    def mounts(of: dict, name: str) -> list:
        found = container(of, name)["volumeMounts"]
        return [one for one in found if one["name"].startswith("gpumem-otel-control")]

    assert mounts(hand_made, "train") == mounts(made, "c0")
    paths = {
        name: [item["path"] for item in secret["items"] if item["path"] != "ca.crt"]
        for name, secret in secrets_of(made).items()
    }
    assert paths == {
        name: [item["path"] for item in secret["items"]]
        for name, secret in secrets_of(hand_made).items()
    }


@pytest.fixture
def mounted(controlled, tmp_path):
    """The environment as the kubelet would fill it in, with the Secrets' files."""
    _, made = both(controlled, pod(gpus(1)))
    authority = certs.make_ca(tmp_path)
    server = certs.issue(tmp_path, authority, "server", ["localhost"])
    content = {
        SECRET: files(controlled.get("v1", "Secret", SECRET, "training")),
        "control-of-gpumem": {
            "server.pem": server.cert_file.read_bytes(),
            "server.key": server.key_file.read_bytes(),
            "clients.pem": authority.cert_file.read_bytes(),
        },
    }
    for name, secret in secrets_of(made).items():
        (tmp_path / name).mkdir()
        for item in secret["items"]:
            (tmp_path / name / item["path"]).write_bytes(content[secret["secretName"]][item["key"]])
    environ = {"POD_IP": "127.0.0.1"}
    for name, value in of_control(made).items():
        text = value.replace("/gpumem-otel-control", f"{tmp_path}/gpumem-otel-control")
        environ[name] = re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], text)
    # any free port: what else runs here is not ours to know
    environ["GPUMEM_OTEL_CONTROL_PORT"] = "0"
    return environ, authority, content[SECRET], tmp_path


def listener(environ: dict[str, str]) -> ControlListener:
    config = resolve(environ)
    assert config.warnings == ()
    who = identify(environ, service_name="x", namespace="")
    return ControlListener(YieldDouble(), config.control, run_dir="", identity=who)


def test_the_listener_takes_the_generated_tokens_as_their_roles_say(mounted):
    environ, authority, secret, folder = mounted
    server = listener(environ)
    server.start()
    try:
        assert server.wait(WAIT)

        def context(common_name: str) -> ssl.SSLContext:
            made = ssl.create_default_context(cafile=str(authority.cert_file))
            shown = certs.issue(folder, authority, common_name, [])
            made.load_cert_chain(shown.cert_file, shown.key_file)
            return made

        def status(verb: str, tls: ssl.SSLContext, *headers: str) -> int:
            if verb == "state":
                return call(server.address, "GET", "/v1/state", *headers, tls=tls).status
            answer = call(server.address, "POST", f"/v1/{verb}", *headers, tls=tls, body={})
            return answer.status

        verbs = ("state", "yield", "restore")
        anybody, scheduler = context("anybody"), context("scheduler")
        tokens = {name: text.decode() for name, text in secret.items() if name != "tokens"}
        taken = {
            name: [status(verb, anybody, bearer(token)) != 403 for verb in verbs]
            for name, token in tokens.items()
        }
        assert taken == {
            "token-read": [True, False, False],
            "token-yield": [True, True, False],
            "token-yield-restore": [True, True, True],
        }
        assert [status(verb, anybody) for verb in verbs] == [200, 403, 403]
        assert 403 not in [status(verb, scheduler) for verb in verbs]
        assert status("state", anybody, bearer("x" * 48)) == 401
        bare = ssl.create_default_context(cafile=str(authority.cert_file))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            call(server.address, "GET", "/v1/state", tls=bare)
    finally:
        server.stop(WAIT)


@pytest.mark.parametrize("lost", ["-control/tokens", "-control-tls/tls.crt", "-control-tls/ca.crt"])
def test_a_pod_whose_namespace_lacks_a_secret_takes_no_commands(mounted, lost):
    environ, _, _, folder = mounted
    (folder / f"gpumem-otel{lost}").unlink()

    with pytest.raises(ServeError, match="No such file"):
        listener(environ)


# Tokens over the life of a release.


def test_tokens_are_kept_added_taken_out_and_made_anew(cluster):
    def tokens() -> dict[str, str]:
        """Name -> token, as the jobs read it; what clients show is the same."""
        found = files(cluster.get("v1", "Secret", SECRET, "training"))
        read = parse_tokens(found.pop("tokens"))
        told = {who.name.removeprefix("token "): value.decode() for value, who in read}
        assert {f"token-{name}": value.encode() for name, value in told.items()} == found
        return told

    install(cluster, *values("control"))
    first = tokens()
    assert list(first) == ["read", "yield", "yield-restore"]

    install(cluster, *values("control"), "--set", "control.roles={restore,read}")
    second = tokens()
    assert list(second) == ["restore", "read"]
    assert second["read"] == first["read"]
    assert second["restore"] not in first.values()

    install(cluster, *values("control"), "--set", "control.roles={restore,read},control.port=9000")
    assert tokens() == second

    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": "training"}}
    cluster.ask("DELETE", f"{cluster.path(secret)}/{SECRET}")
    install(cluster, *values("control"), "--set", "control.roles={restore,read}")
    assert list(tokens()) == ["restore", "read"]
    assert set(tokens().values()).isdisjoint(second.values())
    asked = "`upgrade` with other roles, again, and after the Secret was deleted"
    said("Helm", asked, "tokens kept, taken out, and made anew")
