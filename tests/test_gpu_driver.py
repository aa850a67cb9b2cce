"""Which torch the driver of a host can run. There is no GPU here: drivers' files are planted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpctrain.base.processes import gpu_driver
from hpctrain.base.processes.gpu_driver import advice, mismatch
from hpctrain.engine.distributed import devices
from hpctrain.errors import ConfigError
from tests.conftest import ROOT

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for {}  Release Build  (dvs-builder@U22)\n"


class Host:
    """The files of a host that tell of its drivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def nvidia(self, version: str, text: str = CLOSED) -> None:
        (self.folder / "nvidia").write_text(text.format(version))

    def amd(self, *simds: int, version: str = "") -> None:
        (self.folder / "kfd").touch()
        for number, count in enumerate(simds):
            node = self.folder / "nodes" / str(number)
            node.mkdir(parents=True)
            (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {count}\nmem 1\n")
        if version:
            (self.folder / "version").write_text(f"{version}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    names = {"_NVIDIA": "nvidia", "_AMD": "kfd", "_AMD_VERSION": "version", "_AMD_NODES": "nodes"}
    for name, file in names.items():
        monkeypatch.setattr(gpu_driver, name, tmp_path / file)
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("version", "text"), [("535.129.03", CLOSED), ("580.65.06", OPEN.replace("{}", "x86_64  {}"))]
)
def test_the_version_of_both_kernel_modules_of_nvidia(host: Host, version: str, text: str) -> None:
    """The open one is that of all GPUs since Blackwell, and of GH200."""
    host.nvidia(version, text)
    assert gpu_driver.nvidia() == version
    host.nvidia(version, OPEN.replace("{}", "aarch64  {}"))
    assert gpu_driver.nvidia() == version
    host.nvidia("", "something else")
    assert (gpu_driver.nvidia(), gpu_driver.driver()) == ("", "NVIDIA's driver")
    assert mismatch("2.13.0", "13.0", None) == "", "what is unknown is no reason"


def test_an_old_driver_is_named_with_the_build_and_the_cure(host: Host) -> None:
    assert mismatch("2.13.0", "13.0", None) == mismatch("2.13.0+cpu", None, None) == ""
    host.nvidia("535.129.03")
    assert mismatch("2.13.0", "13.0", None) == (
        "torch 2.13.0 is built for CUDA 13.0, which needs driver 580 or newer, not 535.129.03; "
        "`make TORCH_INDEX=cu126` installs one for this driver (docs/gpu.md)"
    )
    assert mismatch("2.10.0", "12.8", None) == "", "any driver from 525 on runs CUDA 12"
    assert "TORCH_INDEX=cu126" in advice("pypi")
    assert "CUDA 13.0, which needs driver 580" in advice("cu130")
    assert advice("cu126") == ""
    host.nvidia("570.86.15")
    assert "`make TORCH_INDEX=cu126` (cu128 for Blackwell) installs" in advice("pypi")
    host.nvidia("580.65.06", OPEN.replace("{}", "x86_64  {}"))
    assert mismatch("2.13.0", "13.0", None) == advice("cu130") == ""
    assert "CPUs only, but the GPUs are NVIDIA's" in mismatch("2.13.0+cpu", None, None)
    assert "TORCH_INDEX=cu130" in mismatch("2.13.0+rocm7.2", None, "7.2")
    host.nvidia("470.82.01")
    assert mismatch("2.10.0+cu126", "12.6", None).endswith("not 470.82.01; update the driver")


def test_gpus_of_amd_want_another_torch(host: Host) -> None:
    host.amd(0, 0, 1216, version="6.12.12")
    assert gpu_driver.driver() == "AMD's driver 6.12.12"
    assert mismatch("2.13.0", "13.0", None) == (
        "torch 2.13.0 is built for CUDA 13.0, but the GPUs are AMD's; `make TORCH_INDEX=rocm7.2` "
        "installs one for this driver (docs/gpu.md)"
    )
    assert "TORCH_INDEX=rocm7.2" in advice("pypi")
    assert mismatch("2.13.0+rocm7.2", None, "7.2") == advice("rocm7.2") == ""


def test_the_graphics_of_a_processor_are_no_gpu_to_train_on(host: Host) -> None:
    host.amd(0, 4)
    assert gpu_driver.driver() == advice("pypi") == ""
    assert gpu_driver.amd() is None


def of_cuda(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Let torch be a build for CUDA 13 that sees no GPU, and says why."""

    def init() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_host_with_a_driver_never_trains_on_the_cpu_in_silence(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_cuda(monkeypatch, "Error 802: system not yet initialized\nmore")
    assert devices.kind("auto", 0, {}) == "cpu", "this host has no driver"
    host.nvidia("550.90.07")
    with pytest.raises(
        ConfigError, match=r"^this host has NVIDIA's driver 550\.90\.07, but torch"
    ) as e:
        devices.kind("auto", 0, {})
    assert "CUDA 13.0, which needs driver 580 or newer, not 550.90.07; `make TORCH" in str(e.value)
    assert str(e.value).endswith("parallel.device=cpu trains on the CPU")
    for gpus, env in ((4, {}), (0, {"SLURM_JOB_GPUS": "0"})):
        with pytest.raises(ConfigError, match="needs driver 580 or newer"):
            devices.kind("auto", gpus, env)
    with pytest.raises(
        ConfigError, match=r"\); launch\.gpus_per_node asks Slurm for GPUs; parallel"
    ):
        devices.kind("auto", 0, {"SLURM_JOB_ID": "7"})
    assert devices.kind("cpu", 4, {}) == "cpu"
    for hidden in ("", "-1", "NoDevFiles"):
        assert devices.kind("auto", 0, {"CUDA_VISIBLE_DEVICES": hidden}) == "cpu"
    host.nvidia("580.65.06")
    with pytest.raises(
        ConfigError, match=r"driver 580\.65\.06; Error 802: system not yet init[a-z]*\)"
    ):
        devices.kind("auto", 0, {})
    of_cuda(monkeypatch, "Found no NVIDIA driver on your system.")
    with pytest.raises(ConfigError, match=r"a container needs --nv \(launch\.gpus_per_node\)"):
        devices.kind("auto", 0, {})


def dry_run(folder: Path, *words: str) -> str:
    """Return what make would do in an environment that is there, but empty."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "python").touch()
    command = ["make", "--dry-run", f"VENV={folder}", f"{folder}/.sample", *words]
    env = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_make_takes_torch_from_the_index_that_it_is_given(tmp_path: Path) -> None:
    default = dry_run(tmp_path)
    assert "download.pytorch.org" not in default
    assert f"{tmp_path}/bin/python -m hpctrain.base.processes.gpu_driver pypi" in default
    chosen = dry_run(tmp_path, "TORCH_INDEX=cu126")
    torch_first, itself = chosen.index("whl/cu126"), chosen.index("'.[sample]'")
    assert torch_first < itself, "pip then keeps the torch that is there"
    (tmp_path / ".torch-cu126").touch()
    assert "gpu_driver" not in dry_run(tmp_path), "the torch was chosen before"
    (tmp_path / ".sample").touch()
    assert "whl/cu126" not in dry_run(tmp_path, "TORCH_INDEX=cu126")
    assert "whl/cu130" in dry_run(tmp_path, "TORCH_INDEX=cu130")


def test_make_asks_for_advice_when_nothing_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "hpctrain.base.processes.gpu_driver", "rocm7.2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "", "this host has no driver"
