"""Tests of `init-site` against ten published sites and odd answers, with stand-ins for Slurm."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.base.files.yaml_file import read
from hpctrain.cluster.slurm import node_kinds, release
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.insight.site import init_site, site_file, surroundings
from hpctrain.insight.site.choices import Questions, SiteFacts
from tests.conftest import ROOT

SITES, ODD = (
    yaml.safe_load(Path(__file__).with_name(f"{name}_sites.yaml").read_text())
    for name in ("published", "odd")
)


class Cluster:
    """Stand-ins on the PATH for a cluster of published_sites.yaml, and what this host shows."""

    def __init__(self, site: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site, self.folder = site, folder
        self.net, self.home, self.calls = folder / "net", folder / "home", folder / "calls"
        for name in site.get("net", ["lo", "eth0"]):
            (self.net / name).mkdir(parents=True)
            (self.net / name / "operstate").write_text("up\n")
        self.home.mkdir()
        refused = "".join(
            f"what={shlex.quote(what)}\n"
            f"[[ $* =~ $what ]] && echo {shlex.quote(f'sbatch: error: {words}')} >&2 && exit 1\n"
            for what, words in site.get("refuses", {}).items()
        )
        answers = {
            "sinfo": self._said([*map(self._kind, site["sinfo"])]),
            "scontrol": "[[ $1 == --version ]] && echo slurm 25.05.1 || "
            f"echo NodeName=n1 {site.get('node', '')}",
            "sacctmgr": self._said(site["accounts"]) if site["accounts"] else "exit 1",
            "sbatch": f"{refused}exit 0",
        }
        for name, text in answers.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.calls}\n{text}\n')
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        for name in ("LOADEDMODULES", "LMOD_CMD", "LMOD_SYSTEM_DEFAULT_MODULES"):
            monkeypatch.delenv(name, raising=False)
        release.words.cache_clear()

    def _said(self, lines: list[str]) -> str:
        return f"printf '%s\\n' {shlex.join(lines)}"

    def _kind(self, line: str) -> str:
        """Return a line of sinfo with the mark of the default, the time limit and whole nodes."""
        name, state, rest = line.split("|", 2)
        mark = "*" * (name == self.site.get("default"))
        whole = "EXCLUSIVE" if name in self.site.get("whole", ()) else "NO"
        return f"{name}{mark}|{state}|1-00:00:00|{whole}|1000|{rest}"

    def seen(self) -> SiteFacts:
        return SiteFacts(
            node_kinds.kinds(),
            surroundings.associations(),
            self.home,
            self.site.get("env", {}),
            self.net,
        )

    def written(self, questions: Questions | None = None) -> str:
        given = self.site.get("given", {})
        return init_site.written(self.seen(), questions or Questions(given))


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "available_modules", lambda: None)


@pytest.mark.usefixtures("no_modules")
@pytest.mark.parametrize("name", SITES)
def test_a_published_site_comes_out_like_its_profile(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_file = ROOT / "conf/site" / f"{name}.yaml"
    cluster = Cluster(SITES[name], tmp_path, monkeypatch)
    file = tmp_path / "mine.yaml"
    file.write_text(cluster.written())
    made, profile = site_file.read(file), site_file.read(profile_file)
    differs = {
        key for key in made.__dataclass_fields__ if getattr(made, key) != getattr(profile, key)
    }
    assert differs == SITES[name].get("differs", {}).keys()
    # The profile's shape of a node; on Mahti it is one of a single GPU.
    (published,) = re.findall(r"launch.tasks_per_node.*cpus_per_task=\d+", profile_file.read_text())
    if name == "mahti":
        published = published.replace("node=1", "node=4")
    elif name == "perlmutter":
        published = published.replace("task=32", "task=16")  # cores, not threads
    assert published in file.read_text()
    assert list(site_file.misfits(made, cluster.seen())) == []


@pytest.mark.usefixtures("no_modules")
def test_each_line_says_where_it_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Cluster(SITES["perlmutter"], tmp_path, monkeypatch).written(Questions({}))
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w+:", line):
            assert lines[number - 1].startswith("#"), line
    assert "not known: nobody was asked (there is m1234, m1234_g)\naccount: null\n" in text
    assert (
        "sbatch refuses gpu_ss11: the site chooses it by the other keys\npartition: null\n" in text
    )


@pytest.mark.usefixtures("no_modules")
def test_what_cannot_be_read_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(key: str, options: list[str]) -> str:
        asked.append(key)
        return {"account": "m1234_g", "qos": "regular"}.get(key, "")

    text = Cluster(SITES["perlmutter"], tmp_path, monkeypatch).written(Questions({}, answer))
    assert asked == ["account", "qos"]
    assert "sacctmgr lists 2 for you: you have chosen it\naccount: m1234_g\n" in text


@pytest.mark.usefixtures("no_modules")
def test_a_site_that_takes_all_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites limit calls: what we would write is tried as a whole first."""
    cluster = Cluster(SITES["daint"], tmp_path, monkeypatch)
    cluster.written()
    calls = sorted(line.split()[0] for line in cluster.calls.read_text().splitlines())
    assert calls == ["sacctmgr", "sbatch", "scontrol", "scontrol", "sinfo"]


@pytest.mark.usefixtures("no_modules")
@pytest.mark.parametrize(("changes", "line", "why"), ODD.values(), ids=ODD)
def test_odd_clusters(
    changes: dict[str, Any], line: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Cluster(SITES["daint"] | changes, tmp_path, monkeypatch).written()
    before, found, _ = text.replace("\n#   ", " ").partition(f"\n{line}\n")
    assert found
    assert before.endswith(why)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("partition: old", "site.partition: there is no old for you, but normal, debug, xfer"),
        ("account: left", "site.account: there is no left for you, but g1234"),
        ("qos: high", "site.qos: there is no high for you, but normal"),
        ("constraint: gpu&hbm", "site.constraint: there is no hbm for you, but gpu"),
        ("gpu_type: v100", "site.gpu_type: there is no v100 for you, but none"),
        ("modules: [purge, cuda/9]", "site.modules: cuda/9: `module avail` does not list it"),
        ("memory_option: mem-per-cpu", "sbatch --test-only refuses a job of this site: sbatch: "),
    ],
)
def test_what_no_longer_fits_is_named(
    line: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(surroundings, "available_modules", lambda: ["cuda/12.4", "gcc/13"])
    monkeypatch.setattr(site_file, "available_modules", lambda: ["cuda/12.4", "gcc/13"])
    refuses = {"refuses": {"--mem-per-cpu": "memory comes with the cores"}}
    cluster = Cluster(SITES["daint"] | refuses, tmp_path, monkeypatch)
    file = tmp_path / "site.yaml"
    file.write_text(f"{line}\n")
    assert init_site._check(file, cluster.seen()) == 2
    assert words in capsys.readouterr().out
    assert len([*site_file.misfits(site_file.read(file), cluster.seen())]) == 1


def test_wrong_words_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(SITES["delta"], tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"init-site gpu=v100: there is nvidia_a100, nvidia_a40"):
        cluster.written(Questions({"account": "abcd-delta-gpu", "gpu": "v100"}))
    with pytest.raises(ConfigError, match=r"init-site time=3: give KEY=VALUE, with one of account"):
        init_site.main(["time=3"])
    (tmp_path / "mine.yaml").write_text("partion: gpu\n")
    with pytest.raises(ConfigError, match=r"mine.yaml: .*partion"):
        init_site.main(["--check", "--out", str(tmp_path / "mine.yaml")])
    with pytest.raises(ConfigError, match=r"mine.yaml: it exists; --check looks at it"):
        init_site.main(["--out", str(tmp_path / "mine.yaml")])
    assert read(tmp_path / "mine.yaml") == {"partion": "gpu"}
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"no sbatch on the PATH"):
        init_site.main([])
