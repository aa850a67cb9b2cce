"""Tests of the variables of NCCL, gloo and torch, which the config sets or the user exports."""

import os
from pathlib import Path

import pytest

from hpctrain.cluster.ranks import flight_recorder
from hpctrain.cluster.ranks.variables import export
from hpctrain.config.rules.job import variables
from hpctrain.config.schema import Config, NetworkConfig, SiteConfig, TrainConfig
from hpctrain.config.schema.key import keys
from hpctrain.errors import ConfigError


def exported(config: Config, environment: dict[str, str], *, one_node: bool = False) -> list[str]:
    sections = config.network, config.train, config.site.env
    return export(*sections, environment, one_node=one_node)


def test_the_default_sets_nothing() -> None:
    assert variables(NetworkConfig(), TrainConfig()) == {}


def test_every_key_has_its_variable() -> None:
    network = NetworkConfig(interface="ib0,ib1", infiniband="mlx5_0", debug="WARN")
    config = Config(network=network, site=SiteConfig(env={"NCCL_IB_GID_INDEX": "3"}))
    environment: dict[str, str] = {}
    assert exported(config, environment) == []
    assert environment == {
        "NCCL_SOCKET_IFNAME": "=ib0,ib1",
        "GLOO_SOCKET_IFNAME": "ib0,ib1",
        "NCCL_IB_HCA": "=mlx5_0",
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_GID_INDEX": "3",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    # A second call does not report the values of the first as exported by the user.
    assert exported(config, environment) == []


def test_no_infiniband() -> None:
    config = Config(network=NetworkConfig(infiniband="none"))
    assert variables(config.network, config.train) == {
        "NCCL_IB_DISABLE": ("1", "network.infiniband")
    }


def test_deterministic_algorithms() -> None:
    config = Config(train=TrainConfig(deterministic=True))
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert exported(config, environment) == [
        "CUBLAS_WORKSPACE_CONFIG=:16:8 (not train.deterministic=:4096:8)"
    ]
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    environment = {}
    assert exported(config, environment) == []
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("devices", "exactly"),
    [
        ("mlx5_1,mlx5_2:1", "=mlx5_1,mlx5_2:1"),  # without "=", NCCL also takes mlx5_10
        ("=mlx5_1", "=mlx5_1"),
        ("^mlx5_1", "^=mlx5_1"),
        ("^=mlx5_1", "^=mlx5_1"),
    ],
)
def test_devices_of_infiniband_are_exactly_these(devices: str, exactly: str) -> None:
    config = Config(network=NetworkConfig(infiniband=devices))
    assert variables(config.network, config.train)["NCCL_IB_HCA"] == (exactly, "network.infiniband")


def test_the_flight_recorder_of_the_user_is_kept() -> None:
    for own in ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}):
        environment = dict(own)
        assert exported(Config(), environment) == []
        assert environment == own
    config = Config(site=SiteConfig(env={"TORCH_FR_BUFFER_SIZE": "7"}))
    environment = {}
    exported(config, environment)
    assert environment == {"TORCH_FR_BUFFER_SIZE": "7"}


def test_the_flight_recorder_writes_into_the_logs_of_the_run(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "logs", tmp_path / "b" / "logs"
    environment: dict[str, str] = {}
    for logs in (first, second):  # two runs of one notebook
        flight_recorder.prepare(logs, 0, environment)
        assert environment == {
            "TORCH_FR_DUMP_TEMP_FILE": f"{logs}/flight_recorder_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        }
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        environment = {name: "/mine/rank_"}
        flight_recorder.prepare(first, 1, environment)
        assert environment == {name: "/mine/rank_"}


def test_what_is_exported_has_precedence_and_is_told() -> None:
    config = Config(
        network=NetworkConfig(interface="ib0", debug="WARN"),
        site=SiteConfig(env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    )
    mine = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        # torch would ignore this variable if the newer name were also set.
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    environment = dict(mine)
    assert exported(config, environment) == [
        "NCCL_SOCKET_IFNAME=eth0 (not network.interface==ib0)",
        "NCCL_DEBUG=INFO (not network.debug=WARN)",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 (not site.env.PYTORCH_ALLOC_CONF="
        "expandable_segments:True)",
    ]
    ours = {"GLOO_SOCKET_IFNAME": "ib0", "TORCH_FR_BUFFER_SIZE": "2000"}
    assert environment == mine | ours


def test_gloo_of_one_node_is_not_seen_by_others() -> None:
    environment: dict[str, str] = {}
    exported(Config(), environment, one_node=True)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    for config, mine in (
        (Config(network=NetworkConfig(interface="eth0")), {}),
        (Config(), {"GLOO_SOCKET_IFNAME": "eth0"}),
    ):
        environment = dict(mine)
        exported(config, environment, one_node=True)
        assert environment["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_name_that_no_variable_has() -> None:
    with pytest.raises(ConfigError, match=r"site\.env\.A=B='1': not a variable"):
        export(NetworkConfig(), TrainConfig(), {"A=B": "1"}, os.environ)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("interface", "ib0,ib1", True),
        ("interface", "^docker0", False),  # NCCL reads it, gloo does not
        ("interface", "", False),
        ("infiniband", "none", True),
        ("infiniband", "=mlx5_0:1,mlx5_1:1", True),
        ("infiniband", "^mlx5_3", True),
        ("infiniband", "^=mlx5_3", True),
        ("infiniband", "=^mlx5_3", False),
        ("infiniband", "mlx5_0 mlx5_1", False),
        ("debug", "TRACE", True),
        ("debug", "OFF", False),
    ],
)
def test_values(name: str, value: str, allowed: bool) -> None:
    (key,) = [key for key in keys(Config) if key.name == f"network.{name}"]
    assert (key.rule.problem(key.name, value) == "") == allowed
