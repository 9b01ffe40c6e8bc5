"""`gpumem-otel cost` as a process."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from support.cli_process import clean_environ, cli, only_line

TABLE = """\
4,000 ranks, 1 device each
                  series     every            per second         bytes/s    GB/month
metrics          116,000      15 s       7,733.3 samples          15,467        40.1
profiles          12,000      60 s         66.7 profiles         256,333       664.4
assumed:
"""


def test_a_table_and_its_assumptions():
    done = cli("cost", "--ranks", "4000")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(TABLE)
    assert all(line.startswith("  ") for line in done.stdout.removeprefix(TABLE).splitlines())


def test_the_docs_show_what_it_prints():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    assert textwrap.indent(TABLE.removesuffix("assumed:\n"), "    ") in page


def test_json_says_the_same():
    done = cli("cost", "--ranks", "4000", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert said["metrics"] == {
        "series": 116_000,
        "interval_seconds": 15.0,
        "samples_per_second": 7733.333,
        "bytes_per_second": 15466.667,
        "gb_per_month": 40.09,
    }
    assert said["profiles"] == {
        "series": 12_000,
        "interval_seconds": 60.0,
        "profiles_per_second": 66.667,
        "bytes_per_second": 256333.333,
        "gb_per_month": 664.416,
    }
    assert (said["ranks"], said["devices_per_rank"], said["warnings"]) == (4000, 1, [])


def test_a_variable_that_can_not_be_used_is_a_warning_and_the_default():
    environ = clean_environ(GPUMEM_OTEL_METRICS_LEVEL="most")
    done = cli("cost", "--ranks", "4000", env=environ)
    assert done.returncode == 0
    assert done.stdout.startswith(TABLE)
    assert done.stderr.startswith("gpumem-otel: warning: GPUMEM_OTEL_METRICS_LEVEL ")
    said = json.loads(cli("cost", "--ranks", "1", "--json", env=environ).stdout)
    assert len(said["warnings"]) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--ranks"),
        (("--ranks", "0"), "--ranks"),
        (("--ranks", "1", "--metrics-level", "most"), "--metrics-level"),
        (("--ranks", "1", "--scrape-interval", "0"), "--scrape-interval"),
    ],
)
def test_bad_usage_is_one_line(arguments, named):
    done = cli("cost", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in only_line(done.stderr)
