"""The job's calls where there is no GPU: what is wrong in itself is said first."""

from __future__ import annotations

import math

import pytest

import gpumem_otel
from gpumem_otel.api.yields import yield_on_stop_signal
from gpumem_otel.errors import ConfigError, YieldRefusedError

CALLS = [
    gpumem_otel.yield_memory,
    gpumem_otel.Courtesy,
    yield_on_stop_signal,
    lambda **options: gpumem_otel.yielded(**options).__enter__(),
]


@pytest.mark.parametrize("call", CALLS, ids=["yield_memory", "Courtesy", "signal", "yielded"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": "all"}, "levels are tensors, process, auto"),
        ({"levl": "auto"}, "unknown keyword 'levl'"),
        ({"devices": 0}, r"devices is a list; write \(0,\)"),
        ({"devices": (-1,)}, "devices must be whole numbers from 0 to 1023, not -1"),
        ({"classes": "parameter"}, r"classes is a list; write \('parameter',\)"),
        ({"classes": ("weights",)}, "classes holds 'weights'"),
        ({"keep": None}, "keep must be"),
        ({"lease_seconds": -1}, "lease_seconds must be 0.1 to 2678400 seconds, not -1"),
        ({"deadline_seconds": math.nan}, "deadline_seconds must be 0.1 to 86400 seconds, not nan"),
        ({"wait_seconds": "5"}, "wait_seconds must be a number"),
        ({"level": "process", "classes": ("parameter",)}, "the driver takes all"),
        ({"disk_dir": "/nowhere"}, "disk_dir '/nowhere' is no folder"),
    ],
)
def test_bad_keywords(call, options, said):
    with pytest.raises(ConfigError, match=f"^yield: .*{said}") as caught:
        call(**options)
    assert "\n" not in str(caught.value)


def test_good_ones_say_that_there_is_no_gpu(tmp_path):
    options = {"level": "tensors", "keep": ["buffer"], "disk_dir": str(tmp_path)}
    for call in (gpumem_otel.yield_memory, gpumem_otel.Courtesy(**options).yield_memory):
        with pytest.raises(YieldRefusedError, match=r"^yield: .* no GPU yet; nothing to give back"):
            call()


def test_a_restore_says_that_it_is_one():
    with pytest.raises(YieldRefusedError, match=r"^restore: .* no GPU yet; nothing was given back"):
        gpumem_otel.restore()
    with pytest.raises(YieldRefusedError, match=r"^restore: "):
        gpumem_otel.Courtesy().restore()
    with pytest.raises(ConfigError, match=r"^restore: classes holds 'weights'"):
        gpumem_otel.restore(["weights"])
    with pytest.raises(ConfigError, match=r"^restore: wait_seconds must be 0 to"):
        gpumem_otel.restore(wait_seconds=-1)


@pytest.mark.parametrize("seconds", [-1, 0, "x", math.inf, None])
def test_callbacks_take_a_time(seconds):
    with pytest.raises(ConfigError, match=r"^yield_callbacks: timeout_seconds must be "):
        gpumem_otel.yield_callbacks(before_yield=print, timeout_seconds=seconds)
