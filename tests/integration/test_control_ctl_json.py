"""`gpumem-otel ctl --json`: each target has one entry, whatever refuses it."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest
from support.controlling import IDENTITY, OTHER_JOB, TOKEN, controlling
from support.yield_double import YieldDouble

from gpumem_otel.yielding.values import YieldRequest


def entries(out):
    """The one entry of each target: (target, error)."""
    found = json.loads(out)
    assert all(set(one) == {"target", "process", "value", "error"} for one in found)
    return [(one["target"], one["error"]) for one in found]


def test_with_json_each_target_that_refuses_has_its_entry(run_dir, ctl):
    doubles = [YieldDouble(by_hand=True), YieldDouble(by_hand=True), YieldDouble()]
    with ExitStack() as stack:
        urls = []
        for i, double in enumerate(doubles):
            listener = stack.enter_context(controlling(double, run_dir / str(i)))
            urls.append(f"unix://{listener.socket_path}")
        for double in doubles[:2]:
            double.submit(YieldRequest(verify=True), "another")
        targets = [word for url in (*urls, urls[0]) for word in ("--target", url)]
        code, out, err = ctl("yield", "--json", *targets)
    busy = "operation op-1 runs: wait for it (HTTP 409)"
    assert entries(out) == [*((url, f"{url}: {busy}") for url in urls[:2]), (urls[2], "")]
    assert (code, err.count("\n")) == (1, 2)


@pytest.mark.parametrize("verb", ["state", "yield", "restore"])
def test_with_json_each_target_that_can_not_be_asked_has_its_entry(run_dir, tmp_path, ctl, verb):
    (tmp_path / "token").write_text(TOKEN)
    double = YieldDouble()
    with controlling(double, run_dir) as listener:
        good = f"unix://{listener.socket_path}"
        given = (good, "node7", "http://192.0.2.1:9564", "http://me:secret@192.0.2.1:9564")
        targets = [word for url in given for word in ("--target", url)]
        code, out, err = ctl(verb, "--json", *targets, "--token-file", str(tmp_path / "token"))
        assert (code, err.count("\n")) == (2, 1)
        errors = dict(entries(out))
        assert list(errors) == [*given[:3], "...@192.0.2.1:9564"]
        assert errors[good] == "not asked: another target cannot be used"
        assert errors["node7"].startswith("target 'node7' ")
        assert "--insecure" in errors["http://192.0.2.1:9564"]
        assert "password" in errors["...@192.0.2.1:9564"]
        assert "secret" not in out + err
        assert double.submitted == []


def test_with_json_what_no_job_would_do_is_the_entry_of_each_target(run_dir, ctl):
    doubles = [YieldDouble(), YieldDouble()]
    with ExitStack() as stack:
        urls = []
        for double, identity in zip(doubles, (IDENTITY, OTHER_JOB), strict=True):
            listener = stack.enter_context(controlling(double, run_dir, identity=identity))
            urls.append(f"unix://{listener.socket_path}")
        targets = [word for url in urls for word in ("--target", url)]
        for options, said in (
            (("--lease", "0", *targets), "lease_seconds must be"),
            (("--token-file", "/nowhere", *targets), "token file /nowhere: No such file"),
            ((), "2 jobs take commands here: "),
        ):
            code, out, err = ctl("yield", "--json", *options)
            assert (code, err.count("\n")) == (2, 1)
            assert sorted(url for url, _ in entries(out)) == sorted(urls)
            assert all(error.startswith(said) for _, error in entries(out))
    assert [double.submitted for double in doubles] == [[], []]
