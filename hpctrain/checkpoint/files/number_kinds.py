"""Which stored numbers may become which of a model: a conversion has to keep their meaning.

    float64, float32, float16, bfloat16     become each other
    integers                                become other integers
    everything else                         only what it is

An integer or a float of 8 bits in place of a weight is a code: it means nothing without a scale, a
zero point or a table, which stands beside it under another name. This module does not import torch:
a login node looks at weights before a job is queued.
"""

import re
from collections.abc import Iterator, Mapping

_FLOATING = ("float64", "float32", "float16", "bfloat16")
_WORDS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}
_PACKED = (
    (".qweight", ".scales", "GPTQ or AWQ"),
    (".weight_packed", ".weight_scale", "compressed-tensors"),
    ("_blocks", "_scales", "MXFP4"),
    (".weight", ".weight.absmax", "bitsandbytes with 4 bits"),
    (".weight", ".SCB", "bitsandbytes with 8 bits"),
    (".weight", ".weight_scale_inv", "8-bit floats with scales"),
    (".weight", ".weight_scale", "8 bits with scales"),
    (".W_q", ".scale", "HQQ"),
    (".weight._data", ".weight._scale", "quanto"),
)
"""How the names of codes end, and those of their scales, and what the format is called."""

CURE = (
    "take the release of the model in bf16, or dequantize it once (`model.dequantize()` of "
    "transformers, then `save_pretrained`)"
)


def torch_name(dtype: str) -> str:
    """Return the name in torch of a dtype of safetensors, such as bfloat16 for BF16."""
    found = re.fullmatch(r"(BF|F|I|U|C)(\d+.*)", dtype)
    return (_WORDS[found[1]] + found[2] if found else dtype).lower()


def fits(stored: str, own: str) -> bool:
    """Return whether numbers of a stored dtype, such as bfloat16, keep their meaning in our own."""
    return _kind(stored) == _kind(own)


def packed(dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield weights that are stored as codes beside their scales, and the name of the format."""
    for name, dtype in dtypes.items():
        if _kind(dtype) in ("floating", "complex", "bool"):
            continue
        for codes, scales, what in _PACKED:
            if name.endswith(codes) and name.removesuffix(codes) + scales in dtypes:
                yield name, what
                break


def _kind(dtype: str) -> str:
    if dtype in _FLOATING:
        return "floating"
    if dtype.startswith("complex"):
        return "complex"
    # What safetensors calls F8_E4M3, torch calls float8_e4m3fn.
    return "integer" if dtype.startswith(("int", "uint")) else dtype.removesuffix("fn")
