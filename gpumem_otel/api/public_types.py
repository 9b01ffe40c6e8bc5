"""The types that public calls take and return, for annotations; `gpumem_otel` loads them lazily."""

from __future__ import annotations

from gpumem_otel.api.snapshots import (
    SnapshotKind as SnapshotKind,
    SnapshotTable as SnapshotTable,
    TopBy as TopBy,
)
from gpumem_otel.api.yields import YieldOptions as YieldOptions
from gpumem_otel.base.profile import (
    AllocEvent as AllocEvent,
    Annotation as Annotation,
    Block as Block,
    BlockState as BlockState,
    DeviceTotals as DeviceTotals,
    Frame as Frame,
    HeapProfile as HeapProfile,
    ProfileKind as ProfileKind,
    Sample as Sample,
    Segment as Segment,
    Sizes as Sizes,
    Stack as Stack,
)
from gpumem_otel.line_profiling.accounts import (
    FunctionLines as FunctionLines,
    LineRow as LineRow,
    LineUse as LineUse,
)
from gpumem_otel.line_profiling.profiler import CounterReader as CounterReader
from gpumem_otel.line_profiling.render import LineReport as LineReport
from gpumem_otel.profiles.heap import DiffEntry as DiffEntry
from gpumem_otel.profiles.tables import TopRow as TopRow
from gpumem_otel.settings.options import InstallOptions as InstallOptions
from gpumem_otel.snapshot.snapshot import TorchSnapshot as TorchSnapshot
from gpumem_otel.snapshot.tensor_classes import TensorClass as TensorClass
from gpumem_otel.tensors.holders import Holder as Holder, Holders as Holders, Subject as Subject
from gpumem_otel.tensors.report import (
    DeviceReport as DeviceReport,
    ReportData as ReportData,
    TensorInfo as TensorInfo,
    TensorPart as TensorPart,
)
from gpumem_otel.yielding.values import (
    Phase as Phase,
    PhaseTime as PhaseTime,
    YieldLevel as YieldLevel,
    YieldReport as YieldReport,
    YieldState as YieldState,
)
