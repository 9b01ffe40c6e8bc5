"""profile.proto for the protobuf library, written from the published format.

Shares nothing with the encoder: what it decodes is what any other program would.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gpumem_otel.base.profile import Frame, Sample

__all__ = ["Profile", "parse", "render", "samples_of"]

# message -> fields as (number, name, type); "*" marks a repeated one.
_MESSAGES = {
    "ValueType": [(1, "type", "int64"), (2, "unit", "int64")],
    "Label": [
        (1, "key", "int64"),
        (2, "str", "int64"),
        (3, "num", "int64"),
        (4, "num_unit", "int64"),
    ],
    "Sample": [(1, "location_id", "uint64*"), (2, "value", "int64*"), (3, "label", "Label*")],
    "Mapping": [
        (1, "id", "uint64"),
        (2, "memory_start", "uint64"),
        (3, "memory_limit", "uint64"),
        (4, "file_offset", "uint64"),
        (5, "filename", "int64"),
        (6, "build_id", "int64"),
        (7, "has_functions", "bool"),
        (8, "has_filenames", "bool"),
        (9, "has_line_numbers", "bool"),
        (10, "has_inline_frames", "bool"),
    ],
    "Line": [(1, "function_id", "uint64"), (2, "line", "int64"), (3, "column", "int64")],
    "Location": [
        (1, "id", "uint64"),
        (2, "mapping_id", "uint64"),
        (3, "address", "uint64"),
        (4, "line", "Line*"),
        (5, "is_folded", "bool"),
    ],
    "Function": [
        (1, "id", "uint64"),
        (2, "name", "int64"),
        (3, "system_name", "int64"),
        (4, "filename", "int64"),
        (5, "start_line", "int64"),
    ],
    "Profile": [
        (1, "sample_type", "ValueType*"),
        (2, "sample", "Sample*"),
        (3, "mapping", "Mapping*"),
        (4, "location", "Location*"),
        (5, "function", "Function*"),
        (6, "string_table", "string*"),
        (7, "drop_frames", "int64"),
        (8, "keep_frames", "int64"),
        (9, "time_nanos", "int64"),
        (10, "duration_nanos", "int64"),
        (11, "period_type", "ValueType"),
        (12, "period", "int64"),
        (13, "comment", "int64*"),
        (14, "default_sample_type", "int64"),
        (15, "doc_url", "int64"),
    ],
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="gpumem_test/profile.proto", package="gpumem_test", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in fields:
            base = kind.rstrip("*")
            field = message.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REPEATED if "*" in kind else _Field.LABEL_OPTIONAL
            if base in _SCALARS:
                field.type = _SCALARS[base]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".gpumem_test.{base}"
    return file


def _profile_class():
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("gpumem_test.Profile"))


Profile = _profile_class()


def parse(data: bytes):
    """Decode, and check what the format demands of ids, indices and lengths."""
    profile = Profile.FromString(data)
    profile.DiscardUnknownFields()
    assert profile.SerializeToString(deterministic=True) == data, "unknown or unusual fields"
    assert profile.string_table[0] == ""
    strings = len(profile.string_table)
    assert len(set(profile.string_table)) == strings, "a string twice"
    for table in (profile.mapping, profile.location, profile.function):
        assert [row.id for row in table] == list(range(1, len(table) + 1))
    functions = [(f.name, f.filename) for f in profile.function]
    assert len(set(functions)) == len(functions), "a function twice"
    locations = [
        tuple((line.function_id, line.line) for line in at.line) for at in profile.location
    ]
    assert len(set(locations)) == len(locations), "a location twice"
    assert all(
        1 <= line.function_id <= len(functions) for at in profile.location for line in at.line
    )
    assert all(at.mapping_id in {m.id for m in profile.mapping} for at in profile.location)
    assert all(at.line for at in profile.location)
    for sample in profile.sample:
        assert sample.location_id, "a sample without a location"
        assert all(1 <= at <= len(locations) for at in sample.location_id)
        assert len(sample.value) == len(profile.sample_type)
    indices = [
        *(i for t in [*profile.sample_type, profile.period_type] for i in (t.type, t.unit)),
        *(i for f in profile.function for i in (f.name, f.filename, f.system_name)),
        *(i for s in profile.sample for label in s.label for i in (label.key, label.str)),
        *profile.comment,
        profile.default_sample_type,
    ]
    assert all(0 <= index < strings for index in indices)
    return profile


def samples_of(profile) -> list[tuple[Sample, int]]:
    """Every sample as the model writes it, with its third value."""
    text = profile.string_table
    out = []
    for sample in profile.sample:
        frames = []
        for at in sample.location_id:
            for line in profile.location[at - 1].line:
                function = profile.function[line.function_id - 1]
                frames.append(Frame(text[function.name], text[function.filename], line.line))
        labels = tuple((text[label.key], text[label.str]) for label in sample.label)
        objects, size_bytes, snapshots = sample.value
        out.append((Sample(tuple(frames), objects, size_bytes, labels), snapshots))
    return out


def render(profile) -> str:
    """Everything a profile holds, for a person to read."""
    text = profile.string_table
    period = profile.period_type
    lines = [
        f"types {', '.join(f'{text[t.type]}/{text[t.unit]}' for t in profile.sample_type)}",
        f"default {text[profile.default_sample_type]}",
        f"period {profile.period} {text[period.type]}/{text[period.unit]}",
        f"time {profile.time_nanos} duration {profile.duration_nanos}",
        *(f"comment {text[index]}" for index in profile.comment),
        *(
            f"mapping {m.id} {text[m.filename]} functions={m.has_functions}"
            for m in profile.mapping
        ),
    ]
    for sample in profile.sample:
        labels = " ".join(f"{text[label.key]}={text[label.str]}" for label in sample.label)
        lines.append(f"sample {list(sample.value)} {labels}".rstrip())
        for at in sample.location_id:
            location = profile.location[at - 1]
            for line in location.line:
                function = profile.function[line.function_id - 1]
                lines.append(f"  {text[function.name]} {text[function.filename]}:{line.line}")
    return "\n".join(lines) + "\n"
