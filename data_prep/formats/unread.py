"""Formats of science that data_prep does not read itself, and how their arrays become samples."""

from pathlib import PurePath

_READERS = {
    ".fits": "astropy.io.fits.getdata",
    ".fit": "astropy.io.fits.getdata",
    ".fts": "astropy.io.fits.getdata",
    ".nii": "nibabel.load",
    ".mgz": "nibabel.load",
    ".mat": "scipy.io.loadmat",
    ".dcm": "pydicom.dcmread",
    ".nrrd": "nrrd.read",
}
_MATLAB_5 = b"MATLAB 5.0 MAT-file"


def way(path: str) -> str:
    """Return how a file of such a format is converted; "" for other files, by their names."""
    name = PurePath(path)
    suffix = PurePath(name.stem).suffix if name.suffix in (".gz", ".fz") else name.suffix
    reader = _READERS.get(suffix.lower(), "")
    if not reader:
        return ""
    return (
        f"write a function that reads it ({reader}) and yields samples, and convert with "
        "`python -m data_prep python FILE.py:function OUT`"
    )


def matlab_5(path: str) -> str:
    """Return what to do with a .mat file that is not HDF5; "" for other files."""
    try:
        with open(path, "rb") as file:
            if file.read(len(_MATLAB_5)) != _MATLAB_5:
                return ""
    except OSError:
        return ""
    return (
        "is a MATLAB file of version 5 to 7, which is not HDF5. Save it with `save -v7.3` in "
        f"MATLAB, or {way('x.mat')}"
    )
