"""Computed data for first runs: decaying turbulence in two dimensions.

The solver integrates the Navier-Stokes equations of the vorticity w on the periodic square of side
2 pi,

    dw/dt + u . grad w = nu lap w,    u = (d psi/dy, -d psi/dx),    lap psi = -w,

in Fourier modes. Products are computed in physical space without aliasing (Orszag's 2/3 rule), the
viscous term is exact (an integrating factor), and time steps use a Runge-Kutta method of order 4 at
a fixed Courant number. The velocity comes from a stream function, so the flow is incompressible up
to rounding. It starts from random modes around wavenumber 4 with a root-mean-square speed of 1. It
is recorded from time 1 on, at intervals of 0.2. The viscosities are large enough that the smallest
eddies are resolved.

Each trajectory is a function of the seed and its number, so any process can compute it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.files import ranges
from data_prep.options import Options
from data_prep.source import BadRecords, Block, Piece, Source
from hpctrain.errors import ConfigError
from hpctrain.shards.field import Field

SIZE, STEPS, TRAJECTORIES = 64, 16, 64
INTERVAL, SPIN_UP = 0.2, 1.0  # time between snapshots, and time before the first
_COURANT = 0.6  # grid cells that the fastest fluid moves in a time step
_WAVENUMBER = 4.0  # wavenumber of the initial eddies
_VISCOSITY = (4e-3, 2e-2)  # range at 64 points; it is scaled by the square of the cell size
_MOST_IN_PIECE = 8

Real = NDArray[np.float64]
_Modes = NDArray[np.complex128]


class Solver:
    """Integrates the Fourier modes of the vorticity, (size, size // 2 + 1) as in `rfft2`."""

    def __init__(self, size: int, viscosity: float) -> None:
        self.size, self.viscosity = size, viscosity
        x = np.fft.rfftfreq(size, 1 / size)
        y = np.fft.fftfreq(size, 1 / size)[:, None]
        self._x, self._y = 1j * x, 1j * y
        self.square = x**2 + y**2  # square of the wavenumber
        self._inverse = 1 / np.where(self.square == 0, 1, self.square)
        self._inverse[0, 0] = 0  # no mean flow
        self._kept = (x < size / 3) & (abs(y) < size / 3)

    def velocity(self, modes: _Modes) -> tuple[Real, Real]:
        """Return the velocity on the grid: its components along the last axis and the first."""
        stream = modes * self._inverse
        return self.grid(self._y * stream), self.grid(-self._x * stream)

    def advection(self, modes: _Modes) -> _Modes:
        """Return -u . grad w without aliasing."""
        u, v = self.velocity(modes)
        product = u * self.grid(self._x * modes) + v * self.grid(self._y * modes)
        return np.where(self._kept, -np.fft.rfft2(product), 0)

    def advance(self, modes: _Modes, time: float) -> _Modes:
        """Return the modes after a time; equal steps, as long as the Courant number allows now."""
        speed = max(abs(component).max() for component in self.velocity(modes))
        count = max(1, math.ceil(time * speed * self.size / (2 * math.pi * _COURANT)))
        step = time / count
        half = np.exp(-self.viscosity * self.square * step / 2)  # viscous decay in half a step
        whole = half * half
        for _ in range(count):
            a = step * self.advection(modes)
            b = step * self.advection(half * (modes + a / 2))
            c = step * self.advection(half * modes + b / 2)
            d = step * self.advection(whole * modes + half * c)
            modes = whole * modes + (whole * a + 2 * half * (b + c) + d) / 6
        return modes

    def start(self, rng: np.random.Generator) -> _Modes:
        """Return random modes around _WAVENUMBER with a root-mean-square speed of 1."""
        scaled = self.square / _WAVENUMBER**2
        modes = np.fft.rfft2(rng.standard_normal((self.size, self.size)))
        modes = np.where(self._kept, modes * scaled * np.exp(-scaled), 0)
        return modes / math.sqrt(2 * self.energy(modes))

    def energy(self, modes: _Modes) -> float:
        """Return half the mean square of the velocity."""
        return 0.5 * float(np.mean(sum(part**2 for part in self.velocity(modes))))

    def grid(self, modes: _Modes) -> Real:
        """Return what has these modes on the grid, (size, size), such as the vorticity."""
        return np.fft.irfft2(modes, (self.size, self.size))


@dataclass(frozen=True)
class _Flow(Source):
    unpacks = False
    size: int = SIZE
    steps: int = STEPS
    seed: int = 0

    def read(self, what: tuple[int, int], reading: BadRecords) -> Iterator[Block]:
        """See `Source`."""
        for number in range(*what):
            viscosity, vorticity = trajectory(self.size, self.steps, self.seed, number)
            yield Block(
                {
                    "vorticity": vorticity[None],
                    "viscosity": np.array([viscosity]),
                    "trajectory": np.array([number]),
                },
                keys=[f"{self.seed}/{number}".encode()],
                file="flow",
                records=[f"trajectory {number}"],
            )


def trajectory(
    size: int, steps: int, seed: int, number: int
) -> tuple[np.float32, NDArray[np.float32]]:
    """Compute one flow: its viscosity, and the vorticity (steps, size, size) with rows along y."""
    rng = np.random.default_rng([seed, number])
    low, high = (math.log(nu * (64 / size) ** 2) for nu in _VISCOSITY)
    viscosity = np.float32(math.exp(rng.uniform(low, high)))
    solver = Solver(size, float(viscosity))
    modes = solver.advance(solver.start(rng), SPIN_UP)
    vorticity = np.empty((steps, size, size), np.float32)
    for step in range(steps):
        if step:
            modes = solver.advance(modes, INTERVAL)
        vorticity[step] = solver.grid(modes)
    return viscosity, vorticity


def flow(
    options: Options,
    size: int = SIZE,
    steps: int = STEPS,
    trajectories: int = TRAJECTORIES,
    seed: int = 0,
) -> Source:
    """Make a source of decaying two-dimensional turbulence; see the module."""
    if size % 2 or not 16 <= size <= 8192:
        raise ConfigError(f"--size {size}: the grid's points are an even number, 16 to 8192")
    for option, value, least, most in (
        ("--steps", steps, 1, 100_000),
        ("--trajectories", trajectories, 1, 10_000_000),
        ("--seed", seed, 0, 2**63 - 1),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{option} {value}: it is a whole number from {least} to {most}")
    fields = {
        "vorticity": Field("float32", (steps, size, size)),
        "viscosity": Field("float32"),
        "trajectory": Field("int64"),
    }
    nbytes = 4 * steps * size * size + 12
    in_piece = max(1, min(_MOST_IN_PIECE, options.shard_bytes // nbytes))
    about: dict[str, Any] = {"size": size, "steps": steps, "seed": seed, "interval": INTERVAL}
    return _Flow(
        name="flow",
        fields=fields,
        pieces=[
            Piece((a, b), samples=b - a, bytes=(b - a) * nbytes)
            for a, b in ranges(trajectories, in_piece)
        ],
        identity={**about, "trajectories": trajectories},
        about={"from": "a pseudo-spectral solver of the Navier-Stokes equations", **about},
        size=size,
        steps=steps,
        seed=seed,
    )
