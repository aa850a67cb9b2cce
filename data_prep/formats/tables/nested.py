"""Structs in Arrow tables: each member is a column, whose name is STRUCT.MEMBER.

struct<a: int64, b: float> s           s.a and s.b
list<struct<a: int64, b: float>> s     s.a and s.b, lists of equal lengths

A struct that is null makes its members null.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.shards.ragged import offsets_of


def flat_schema(schema: Any) -> Any:
    """Return a `pyarrow.Schema` with the members of all structs in place of the structs."""
    import pyarrow as pa

    if not any(map(_has_struct, schema.types)):
        return schema
    fields = []
    for field in schema:
        nodes = [(name, kind) for name, kind in _nodes(field) if not _has_struct(kind)]
        fields += [pa.field(*node) for node in nodes] if _has_struct(field.type) else [field]
    return pa.schema(fields, schema.metadata)


def with_nodes(schema: Any) -> Any:
    """Return a `pyarrow.Schema` with the members of all structs beside the structs."""
    import pyarrow as pa

    return pa.schema([node for field in schema for node in _nodes(field)])


def roots(schema: Any, names: Sequence[str]) -> list[str]:
    """Return the columns of a `pyarrow.Schema` that have these columns and members of structs."""
    there, inside = frozenset(schema.names), [field for field in schema if _has_struct(field.type)]
    above = {name: field.name for field in inside for name, _ in _nodes(field)}
    return list(dict.fromkeys(name if name in there else above[name] for name in names))


def select(batch: Any, names: Sequence[str]) -> Any:
    """Return a `pyarrow.RecordBatch` with these columns and members of structs."""
    import pyarrow as pa

    if frozenset(batch.schema.names).issuperset(names):
        return batch.select(list(names))
    found: dict[str, Any] = {}
    for name in roots(batch.schema, names):
        found |= _arrays(name, batch.column(name))
    return pa.RecordBatch.from_arrays([found[name] for name in names], names=list(names))


def _has_struct(kind: Any) -> bool:
    """Return whether a type is a struct with members, or a list of such."""
    from pyarrow import types

    while _is_list(kind):
        kind = kind.value_type
    return bool(types.is_struct(kind)) and kind.num_fields > 0


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _nodes(field: Any) -> list[tuple[str, Any]]:
    """Return a column and all members of its structs, with their types."""
    import pyarrow as pa

    if not _has_struct(field.type):
        return [(field.name, field.type)]
    return [(name, array.type) for name, array in _arrays(field.name, pa.nulls(0, field.type))]


def _arrays(name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yield the array of a column and those of all members of its structs."""
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    yield name, array
    if not _has_struct(kind):
        return
    if not _is_list(kind):
        for i, values in enumerate(array.flatten()):
            yield from _arrays(f"{name}.{kind.field(i).name}", values)
        return
    null = array.is_null()
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inside = array.values.slice(array.offset * size, len(array) * size)
        for below, values in _arrays(name, inside):
            if below != name:
                yield below, pa.FixedSizeListArray.from_arrays(values, size, mask=null)
        return
    lengths = compute.list_value_length(array).fill_null(0)
    large = pa.types.is_large_list(kind)
    offsets = pa.array(offsets_of(lengths.to_numpy()), pa.int64() if large else pa.int32())
    maker = pa.LargeListArray if large else pa.ListArray
    for below, values in _arrays(name, array.flatten()):
        if below != name:
            yield below, maker.from_arrays(offsets, values, mask=null)
