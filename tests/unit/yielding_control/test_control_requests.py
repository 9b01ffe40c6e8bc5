"""The rules of the control API: what they take, and that their schemas say the same."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumem_otel.yielding.control.openapi import document
from gpumem_otel.yielding.control.schema import (
    ControlState,
    ForbiddenError,
    InvalidError,
    MalformedError,
    Process,
    as_json,
    parse_json,
    read_restore,
    read_yield,
    request_schema,
    state_query,
)
from gpumem_otel.yielding.values import (
    Operation,
    OperationState,
    PhaseTime,
    RestoreRequest,
    YieldLevel,
    YieldReport,
    YieldRequest,
    YieldStatus,
)

try:
    import jsonschema_rs  # comes with schemathesis
except ImportError:
    jsonschema_rs = None

needs_validator = pytest.mark.skipif(
    jsonschema_rs is None, reason="no JSON Schema validator: pip install 'gpumem-otel[api]'"
)

REQUESTS = (
    (YieldRequest, partial(read_yield, disk_dirs=("/",))),
    (RestoreRequest, read_restore),
)


@pytest.mark.parametrize(("request_type", "read"), REQUESTS)
def test_the_schema_has_every_field_of_the_request_and_its_default(request_type, read):
    properties = request_schema(request_type)["properties"]
    defaults = {name: schema["default"] for name, schema in properties.items()}
    assert list(properties) == [field.name for field in fields(request_type)]
    assert defaults == as_json(request_type())
    assert read(json.dumps(defaults).encode()) == request_type()


def test_an_empty_body_is_a_request_of_defaults():
    assert read_yield(b"", ()) == read_yield(b"{}", ()) == YieldRequest()
    assert read_restore(b"") == RestoreRequest()


def test_every_field_arrives(tmp_path):
    scratch = tmp_path / "scratch"
    body = {
        "level": "tensors",
        "devices": [1, 0.0],
        "classes": ["parameter", "kv_cache"],
        "keep": ["buffer"],
        "discard": ["optimizer_state"],
        "lease_seconds": 1800,
        "deadline_seconds": 5.5,
        "wait_seconds": 0,
        "dry_run": True,
        "verify": True,
        "assume_private": True,
        "release_host": True,
        "disk_dir": str(scratch / "x"),
    }
    assert set(body) == {field.name for field in fields(YieldRequest)}
    assert read_yield(json.dumps(body).encode(), (str(scratch),)) == YieldRequest(
        level=YieldLevel.TENSORS,
        devices=(1, 0),
        classes=("parameter", "kv_cache"),
        keep=("buffer",),
        discard=("optimizer_state",),
        lease_seconds=1800.0,
        deadline_seconds=5.5,
        wait_seconds=0.0,
        dry_run=True,
        verify=True,
        assume_private=True,
        release_host=True,
        disk_dir=str(scratch / "x"),
    )


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"nonsense", "the body is not JSON"),
        (b"\xff{}", "the body is not UTF-8"),
        (b"\xef\xbb\xbf{}", "the body is not JSON"),
        (b"[" * 60_000, "the body is nested too deeply"),
        (b'{"verify":' * 10_000, "the body is nested too deeply"),
        (b'{"verify": true, "verify": false}', "the body has a name twice"),
        (b'{"lease_seconds": NaN}', "the body holds NaN, which is not JSON"),
        (b'{"lease_seconds": -Infinity}', "the body holds -Infinity, which is not JSON"),
        (b'{"lease_seconds": 1e999}', "the body holds a number that is too large"),
        (b'{"lease_seconds": ' + b"9" * 60_000 + b"}", "the body is not JSON"),
        (b"{} {}", "the body is not JSON"),
    ],
)
def test_what_is_no_json_is_malformed(body, line):
    with pytest.raises(MalformedError) as caught:
        read_yield(body, ())
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ([], "the body must be a JSON object"),
        (None, "the body must be a JSON object"),
        ({"lvl": 1}, 'the body has no field "lvl": it has level, '),
        ({"level": "all"}, "level must be one of tensors, process, auto"),
        ({"level": ["auto"]}, "level must be one of "),
        ({"devices": 0}, "devices must be a list of torch's numbers, not 0; leave it out for all"),
        ({"devices": []}, "devices must be a list of torch's numbers"),
        ({"devices": [True]}, "devices must be whole numbers from 0 to 1023, not True"),
        ({"devices": ["x" * 9000]}, "devices must be whole numbers from 0 to 1023, not 'xxx"),
        ({"devices": [0, 1.5]}, "devices must be whole numbers from 0 to 1023, not 1.5; leave"),
        ({"devices": [0, 0.0]}, "devices holds 0 twice; name it once"),
        ({"devices": [10**400]}, "devices must be whole numbers from 0 to 1023, not one of more"),
        ({"classes": ["weights"]}, "classes holds 'weights', which is none of parameter, "),
        ({"discard": ["gradient"]}, "discard holds 'gradient', which is none of optimizer_state, "),
        ({"keep": None}, "keep must be a list"),
        ({"lease_seconds": 0}, "lease_seconds must be 0.1 to 2678400 seconds, not 0; leave it"),
        ({"lease_seconds": True}, "lease_seconds must be a number"),
        ({"lease_seconds": "60"}, "lease_seconds must be a number"),
        ({"wait_seconds": None}, "wait_seconds must be a number of seconds"),
        ({"wait_seconds": 86401}, "wait_seconds must be 0 to 86400 seconds, not 86401; leave it"),
        ({"dry_run": 1}, "dry_run must be true or false"),
        ({"disk_dir": "/scratch/\ud800"}, "disk_dir must be an absolute path of at most "),
        ({"disk_dir": "/scratch/\x00"}, "disk_dir must be an absolute path of at most "),
        ({"disk_dir": "/" * 4097}, "disk_dir must be an absolute path of at most 4096 "),
    ],
)
def test_a_value_that_breaks_a_rule_is_named(value, line):
    with pytest.raises(InvalidError) as caught:
        read_yield(json.dumps(value).encode(), ("/scratch",))
    assert not isinstance(caught.value, MalformedError)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300  # however long the value is


def test_a_folder_must_lie_in_one_that_the_job_allows(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "out").symlink_to(tmp_path)
    (tmp_path / "in").symlink_to(scratch)

    def read(path, allowed=(str(scratch),)):
        return read_yield(json.dumps({"disk_dir": str(path)}).encode(), allowed).disk_dir

    assert read(scratch) == read(tmp_path / "in") == str(scratch)
    assert read(scratch / "not" / "there") == str(scratch / "not" / "there")
    assert read(scratch / "x", ("/nowhere", str(tmp_path / "in"))) == str(scratch / "x")
    assert read("") == ""
    outside = (
        scratch / "..", scratch / "out", f"{scratch}-too", "/", f"{scratch}/x/../../y",
    )  # fmt: skip
    for path in outside:
        with pytest.raises(ForbiddenError, match="control_disk_dirs"):
            read(path)
    with pytest.raises(ForbiddenError, match="control_disk_dirs"):
        read(scratch, ())
    for path in ("scratch", ".", "../scratch", "~"):
        with pytest.raises(InvalidError, match="an absolute path"):
            read(path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
VALUES = st.one_of(
    JSON,
    st.sampled_from([0, 1, 1.0, 0.5, 1023, 1024, 3600, "auto", "process", "parameter", "x"]),
    st.lists(st.sampled_from(["parameter", "buffer", "optimizer_state", 0, 1, 1.0, True])),
)


@needs_validator
@pytest.mark.parametrize(("request_type", "read"), REQUESTS, ids=["yield", "restore"])
@given(data=st.data())
def test_the_schema_and_the_check_agree(request_type, read, data):
    """Judged by a JSON Schema validator that is not ours."""
    names = st.sampled_from([field.name for field in fields(request_type)])
    body = data.draw(st.one_of(st.dictionaries(names, VALUES, max_size=3), JSON))
    valid = jsonschema_rs.is_valid(request_schema(request_type), body)
    try:
        read(json.dumps(body).encode())
    except InvalidError:
        assert not valid
    else:
        assert valid


@given(st.binary(max_size=200))
@example(b'{"disk_dir": "\\ud800"}')
def test_any_bytes_give_a_request_or_one_line(body):
    for read in (partial(read_yield, disk_dirs=("/scratch",)), read_restore):
        assert "\n" not in outcome(read, body)


def outcome(read, body):
    try:
        return repr(read(body))
    except InvalidError as error:
        return str(error)


@given(JSON)
def test_what_python_writes_is_read_back(value):
    if json.dumps(value).count("[") + json.dumps(value).count("{") <= 64:
        assert parse_json(json.dumps(value).encode()) == value


PROCESS = Process(
    service_name="s", namespace="", run_id="", rank=3, local_rank=1, world_size=8, node="n", pid=1
)
REPORT = YieldReport(
    operation="a",
    phases=(PhaseTime("release", 0.5, 7),),
    moved_bytes={"parameter": 7},
    expected_seconds=1.5,
    dangers=("d",),
)
STATUS = YieldStatus(
    phase_seconds={"release": 0.5},
    operation=Operation(id="a", kind="yield", state=OperationState.DONE, report=REPORT),
)


@needs_validator
@pytest.mark.parametrize(
    "answer", [PROCESS, REPORT, STATUS, ControlState(process=PROCESS, status=STATUS), YieldStatus()]
)
def test_answers_are_as_the_document_says(answer):
    schemas = document()["components"]["schemas"]
    schema = {
        "$ref": f"#/components/schemas/{type(answer).__name__}",
        "components": {"schemas": schemas},
    }
    value = json.loads(json.dumps(as_json(answer)))
    jsonschema_rs.validate(schema, value)
    assert set(value) == {field.name for field in fields(answer)}
    value["more"] = 1
    assert not jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize(
    ("items", "found"),
    [
        ([], (-1, 0.0)),
        ([("version", "7"), ("wait_seconds", "2.5")], (7, 2.5)),
        ([("wait_seconds", "60")], (-1, 60.0)),
        ([("version", "-1")], (-1, 0.0)),
    ],
)
def test_queries(items, found):
    assert state_query(items) == found


@pytest.mark.parametrize(
    "items",
    [
        [("version", "1"), ("version", "1")],
        [("versions", "1")],
        [("version", "x")],
        [("version", "")],
        [("version", "1.5")],
        [("version", "-2")],
        [("version", "1_0")],
        [("version", " 1")],
        [("version", "9" * 30)],
        [("wait_seconds", "61")],
        [("wait_seconds", "-1")],
        [("wait_seconds", "nan")],
        [("wait_seconds", "inf")],
        [("wait_seconds", "\u0661")],
    ],
)
def test_queries_that_can_not_be_used(items):
    with pytest.raises(InvalidError):
        state_query(items)


@pytest.mark.parametrize("later", [{"verify": 1}, {"nonsense": 1}])
def test_a_folder_is_looked_at_only_in_a_valid_request(later):
    """Whether the folder is allowed is asked of the file system, which may not answer."""
    with pytest.raises(InvalidError) as caught:
        read_yield(json.dumps({"disk_dir": "/etc", **later}).encode(), ("/scratch",))
    assert not isinstance(caught.value, ForbiddenError)
