"""What MATLAB writes into HDF5 files (save -v7.3): what is no array of numbers, and the axes."""

from collections.abc import Sequence
from typing import Any

import h5py

_CLASS, _EMPTY, _OBJECT = "MATLAB_class", "MATLAB_empty", "MATLAB_object_decode"
SPARSE = "MATLAB_sparse"
HIDDEN = "#"  # groups such as #refs# hold what cells and objects refer to


def problem(found: Any) -> str:
    """Return why a dataset or group of MATLAB is no array of numbers; "" for all others."""
    kind = text_of(found, _CLASS)
    if isinstance(found, h5py.Dataset) and found.id.get_type().get_class() == h5py.h5t.REFERENCE:
        what = "a cell array of MATLAB" if kind == "cell" else "an array of references"
        return (
            f"is {what}, as are the members of an array of structs: it refers to other objects. In "
            "MATLAB, save its members as one array (x = cat(3, c{:}), x = cat(3, s.x)), or each "
            "as a variable x1, x2, …, which the pattern /x* takes as samples"
        )
    if not kind:
        return ""
    if found.attrs.get(_EMPTY):
        return "is empty in MATLAB ([]): the file holds only its size"
    if kind == "struct":
        return f"is a struct of MATLAB; name one of its members: {', '.join(found)}"
    if kind == "char":
        return "is text of MATLAB, stored as the codes of its characters; save numbers: double(x)"
    if kind in ("string", "function_handle") or (_OBJECT in found.attrs and kind != "logical"):
        return f"is of MATLAB's class {kind}, which only MATLAB can read; save numbers: double(x)"
    return ""


def axes(found: Any, shape: Sequence[int], axis: int) -> str:
    """Return what the user should know about the axes of an array of MATLAB; "" for all others."""
    if not (text_of(found, _CLASS) and len(shape) > 1):
        return ""
    here, there = ("x".join(map(str, sizes)) for sizes in (shape, shape[::-1]))
    sample = [*shape[:axis], *shape[axis + 1 :]]
    other = "" if axis else "; --axis NAME=-1 takes MATLAB's first axis"
    return (
        f"{found.name} is {there} in MATLAB and {here} in HDF5, where the axes are reversed: axis "
        f"{axis} counts {shape[axis]} samples of {sample}{other}"
    )


def text_of(found: Any, attribute: str) -> str:
    """Return the text of an attribute of a dataset or group; "" without one."""
    if not isinstance(found, (h5py.Dataset, h5py.Group)):
        return ""
    text = found.attrs.get(attribute, "")
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
