"""The sitecustomize that the chart lays into pods: the job comes first in everything."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest
from support.cli_process import WAIT, clean_environ

HOOK = Path(__file__).parents[2] / "helm" / "inject" / "sitecustomize.py"

STARTED = """
import sys
def start_from_environment():
    print("started")
"""

SHOW_PATH = "import sys; print([p for p in sys.path if p.startswith({folder!r})])"


class Pod:
    """The folder that a pod gets, and one with packages of the job's own."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._python = python
        self.hook = folder / "gpumem-otel" / "hook"
        self.packages = folder / "gpumem-otel" / "packages"
        self.own = folder / "own"
        self.hook.mkdir(parents=True)
        self.own.mkdir()
        (self.hook / "sitecustomize.py").write_bytes(HOOK.read_bytes())
        (self.hook / "needs.txt").write_text("gpumem_otel urllib3 2.0.2\nours theirs 1.5\n")
        self.package(self.packages, STARTED)

    def package(self, folder: Path, text: str) -> None:
        (folder / "gpumem_otel").mkdir(parents=True)
        (folder / "gpumem_otel" / "__init__.py").write_text("")
        (folder / "gpumem_otel" / "api").mkdir()
        (folder / "gpumem_otel" / "api" / "__init__.py").write_text("")
        (folder / "gpumem_otel" / "api" / "auto.py").write_text(text)

    def has(self, name: str) -> None:
        """The job has a package of this name and version."""
        (self.own / name).mkdir()

    def run(self, code: str = "print('job')", path: str | None = None):
        """A Python of the job; without a path of its own it has that of its packages."""
        given = f"{self.hook}:{self.own}" if path is None else path
        return subprocess.run(
            [self._python, "-c", code],
            env=clean_environ(PYTHONPATH=given),
            capture_output=True,
            text=True,
            timeout=WAIT,
        )


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter with no packages at all; the one of the tests has ours."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture
def pod(tmp_path, bare_python):
    return Pod(tmp_path, bare_python)


def said(done) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_a_process_is_started_with_our_packages_last_and_the_hook_gone(pod, tmp_path):
    done = pod.run(SHOW_PATH.format(folder=str(tmp_path)) + "; print(sys.path[-1])")

    wanted = f"started\n{[str(pod.own), str(pod.packages)]}\n{pod.packages}\n"
    assert said(done) == (0, wanted, "")


def test_the_jobs_own_sitecustomize_is_run_first_and_is_the_module(pod):
    (pod.own / "sitecustomize.py").write_text("mark = 'the job'; print('own')")

    done = pod.run("import sitecustomize; print(sitecustomize.mark, len(dir(sitecustomize)))")

    alone = pod.run(
        "import sitecustomize; print(sitecustomize.mark, len(dir(sitecustomize)))",
        path=str(pod.own),
    )
    assert said(alone)[0::2] == (0, "")
    assert said(done) == (0, alone.stdout.replace("own\n", "own\nstarted\n"), "")


def test_a_failing_sitecustomize_of_the_job_fails_as_it_would_alone(pod):
    (pod.own / "sitecustomize.py").write_text("raise RuntimeError('of the job')")

    done = pod.run()

    alone = pod.run(path=str(pod.own))
    assert "RuntimeError: of the job" in alone.stderr
    assert said(done) == (0, "started\njob\n", alone.stderr)


def test_the_jobs_own_version_wins(pod):
    pod.package(pod.own, "def start_from_environment(): print('the own one')")

    assert said(pod.run()) == (0, "the own one\njob\n", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("urllib3-1.26.20.dist-info", "urllib3 1.26.20, and 2.0.2 is needed"),
        ("urllib3-2.0.1-py3.10.egg-info", "urllib3 2.0.1, and 2.0.2 is needed"),
        ("Theirs-1.5rc1.dist-info", ""),
        ("urllib3-2.0.2.dist-info", ""),
        ("urllib3-10.0.dist-info", ""),
        ("theirs-1.5.0+cu128.dist-info", ""),
        ("theirs-1.4.99.dist-info", "theirs 1.4.99, and 1.5 is needed"),
    ],
)
def test_where_a_package_of_the_job_is_too_old_nothing_is_added(pod, name, reason):
    pod.has(name)

    done = pod.run(SHOW_PATH.format(folder=str(pod.packages)))

    if reason:
        line = f"gpumem-otel: stays out of this job: it has {reason}\n"
        assert said(done) == (0, "[]\n", line)
    else:
        assert said(done) == (0, f"started\n{[str(pod.packages)]}\n", "")


def test_what_the_job_has_of_ours_brings_its_own_needs(pod):
    pod.has("urllib3-1.26.20.dist-info")
    pod.has("gpumem_otel-0.0.9.dist-info")

    assert said(pod.run()) == (0, "started\njob\n", "")


def test_the_line_is_said_once_for_a_process_and_its_children(pod):
    pod.has("urllib3-1.26.20.dist-info")

    done = pod.run(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'], check=True)"
    )

    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.count("stays out of this job") == 1


def test_a_package_that_can_not_be_imported_is_one_line(pod):
    (pod.packages / "gpumem_otel" / "api" / "auto.py").write_text("import no_such_thing")

    done = pod.run("raise SystemExit(3)")

    wanted = "stays out of this job: ModuleNotFoundError: No module named 'no_such_thing'\n"
    assert said(done) == (3, "", f"gpumem-otel: {wanted}")


def test_what_the_kubelet_leaves_of_an_absent_variable_is_taken_off(pod):
    done = pod.run(
        "import sys; print([p for p in sys.path if '$' in p])", path=f"{pod.hook}:$(PYTHONPATH)"
    )

    assert said(done) == (0, "started\n[]\n", "")
