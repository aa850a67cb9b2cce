"""The flow solver agrees with exact solutions, and `data_prep sample flow` writes its results."""

import numpy as np
import pytest

from data_prep.sources.flow import Solver, trajectory
from hpctrain.data.sources.reader import Reader


def turbulent(size=64, viscosity=1e-2, seed=0):
    solver = Solver(size, viscosity)
    return solver, solver.start(np.random.default_rng(seed))


def enstrophy(solver, modes):
    """Return half the mean square of the vorticity. d(energy)/dt = -2 viscosity enstrophy."""
    return 0.5 * float(np.mean(solver.grid(modes) ** 2))


def test_a_taylor_green_vortex_decays_as_it_should():
    """A single mode has no advection, so it decays by exp(-nu k^2 t)."""
    size, viscosity = 32, 0.05
    solver = Solver(size, viscosity)
    y, x = np.meshgrid(*[np.arange(size) * 2 * np.pi / size] * 2, indexing="ij")
    vortex = 2 * 3 * np.sin(3 * x) * np.sin(3 * y)
    modes = solver.advance(np.fft.rfft2(vortex), 1.5)
    expected = vortex * np.exp(-viscosity * (3**2 + 3**2) * 1.5)
    assert np.abs(solver.grid(modes) - expected).max() < 1e-13
    u, v = solver.velocity(np.fft.rfft2(vortex))
    assert np.abs(u - np.sin(3 * x) * np.cos(3 * y)).max() < 1e-13
    assert np.abs(v + np.cos(3 * x) * np.sin(3 * y)).max() < 1e-13


def test_a_moving_pattern_is_advected_exactly():
    """The advection of two modes equals the analytic formula."""
    solver = Solver(16, 0.0)
    y, x = np.meshgrid(*[np.arange(16) * 2 * np.pi / 16] * 2, indexing="ij")
    w = np.cos(x) + np.sin(2 * y)
    # psi = cos x + sin(2 y) / 4, so u = cos(2 y) / 2, v = sin x
    expected = -(np.cos(2 * y) / 2 * -np.sin(x) + np.sin(x) * 2 * np.cos(2 * y))
    found = np.fft.irfft2(solver.advection(np.fft.rfft2(w)))
    assert np.abs(found - expected).max() < 1e-14


def test_the_velocity_has_no_divergence():
    solver, modes = turbulent()
    u, v = solver.velocity(solver.advance(modes, 0.5))
    wave = np.fft.fftfreq(64, 1 / 64)
    divergence = 1j * wave[:33] * np.fft.rfft2(u) + 1j * wave[:, None] * np.fft.rfft2(v)
    assert np.abs(np.fft.irfft2(divergence)).max() < 1e-12
    w = np.fft.irfft2(1j * wave[:33] * np.fft.rfft2(v) - 1j * wave[:, None] * np.fft.rfft2(u))
    assert np.abs(w - solver.grid(solver.advance(modes, 0.5))).max() < 1e-11


def test_energy_and_enstrophy_balance():
    """Energy decays only by 2 nu enstrophy, and enstrophy only by 2 nu palinstrophy."""
    solver, modes = turbulent()
    assert solver.energy(modes) == pytest.approx(0.5, rel=1e-12)
    step, energies, enstrophies, palinstrophies = 0.01, [], [], []
    for _ in range(41):
        energies.append(solver.energy(modes))
        enstrophies.append(enstrophy(solver, modes))
        gradient = np.sqrt(solver.square) * modes
        palinstrophies.append(enstrophy(solver, gradient))
        modes = solver.advance(modes, step)
    assert (np.diff(energies) < 0).all()
    assert (np.diff(enstrophies) < 0).all()
    for quantity, sink in ((energies, enstrophies), (enstrophies, palinstrophies)):
        sink = np.array(sink)
        # Integrate the loss by Simpson's rule.
        lost = step / 3 * (sink[0] + sink[-1] + 4 * sink[1:-1:2].sum() + 2 * sink[2:-1:2].sum())
        assert quantity[0] - quantity[-1] == pytest.approx(2 * 0.01 * lost, rel=1e-5)


def test_without_viscosity_both_are_kept():
    solver, modes = turbulent(32, 0.0)
    later = solver.advance(modes, 1.0)
    assert solver.energy(later) == pytest.approx(solver.energy(modes), rel=1e-5)
    assert enstrophy(solver, later) == pytest.approx(enstrophy(solver, modes), rel=1e-4)


def test_it_is_of_order_four():
    solver, modes = turbulent(32, 1e-2)
    solver_steps = {}
    for count in (20, 40, 80, 320):
        found = modes
        for _ in range(count):  # each interval is short enough to be a single step
            found = solver.advance(found, 1.0 / count)
        solver_steps[count] = solver.grid(found)
    exact = solver_steps.pop(320)
    errors = [np.abs(found - exact).max() for found in solver_steps.values()]
    assert errors[0] / errors[1] > 12
    assert errors[1] / errors[2] > 12


def test_a_trajectory_is_a_function_of_its_number():
    viscosity, first = trajectory(16, 3, 7, 2)
    again = trajectory(16, 3, 7, 2)
    assert again[0] == viscosity
    assert (again[1] == first).all()
    assert first.shape == (3, 16, 16)
    assert first.dtype == np.float32
    assert not (trajectory(16, 3, 7, 3)[1] == first).any()
    assert not (trajectory(16, 3, 8, 2)[1] == first).any()
    assert (trajectory(16, 5, 7, 2)[1][:3] == first).all()  # the first steps stay the same


def test_more_trajectories_leave_the_others_in_their_split(tmp_path, data_prep):
    found = []
    for count in (20, 30):
        command = ("sample", "flow", "--size", 16, "--steps", 1, "--trajectories", count)
        data_prep(*command, tmp_path / f"{count}", "--workers", 1)
        reader = Reader(tmp_path / f"{count}", "train")
        found.append(set(reader.read(np.arange(len(reader)))["trajectory"].tolist()))
    assert found[0] == {number for number in found[1] if number < 20}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--size", 17, "an even number, 16 to 8192"),
        ("--size", 0, "an even number, 16 to 8192"),
        ("--steps", 0, "a whole number from 1 to 100000"),
        ("--trajectories", -1, "a whole number from 1 to"),
        ("--trajectories", 10**12, "a whole number from 1 to"),
        ("--seed", -1, "a whole number from 0 to"),
    ],
)
def test_numbers_that_cannot_be(tmp_path, data_prep, option, value, words):
    data_prep.refuses(2, words, "sample", "flow", tmp_path / "OUT", f"{option}={value}")
    assert not (tmp_path / "OUT").exists()
