"""What a sweep does before it uses a scheduler: composing, arrays, code and provenance."""

import json
import os
import py_compile
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from hpctrain.config.composing.choices import conf_dir
from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.launch.arrays import Entry, plan
from hpctrain.launch.sweeps.resource_sweep import name_apart
from hpctrain.runs.code import git, provenance, snapshot
from hpctrain.runs.code.snapshot import Snapshot
from hpctrain.runs.run_dir import RunDir
from hpctrain.runs.state.select import runs_of
from tests.conftest import Completed, run_json, run_module, runs

Train = Callable[..., Completed]


@pytest.fixture
def loader(tmp_path: Path) -> ConfigLoaderImpl:
    ConfigStore.instance().store(name="schema", node=Config)
    return ConfigLoaderImpl(create_config_search_path(str(conf_dir())))


@pytest.mark.parametrize(
    "overrides",
    [
        ["experiment=digits", "optimizer.lr=2e-3"],
        ["optimizer.lr=2e-3", "experiment=digits", "optimizer=sgd", "seed=3"],
        ["experiment=digits", "+optimizer.options.betas=[0.9,0.99]", "train.clip_norm=null"],
        ["experiment=digits", "model.hidden=[8]", "model={dropout: 0.5}", "+model.extra=1"],
        ["experiment=digits", "~model.dropout", "metric='${name}/${data.val_split}'"],
        ["experiment=digits", "++data.path=/y", "+site.env.A='1'", "debug=fast", "site=example"],
        ["experiment=digits", "data.path=${oc.env:HOME}/x", "hydra.job.chdir=true", "seed=1"],
    ],
)
def test_composing_fast_is_composing_as_hydra_does(
    loader: ConfigLoaderImpl, overrides: list[str]
) -> None:
    master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
    master.hydra.job.config_name = "config"
    expected = loader.load_sweep_config(master, overrides)
    del expected.__dict__["_content"]["hydra"]
    composer = Composer(loader, master)
    composer([*overrides, "seed=77"])  # the base config, which both calls share, must not change
    for resolve in (False, True):
        got = OmegaConf.to_container(composer(overrides), resolve=resolve)
        assert got == OmegaConf.to_container(expected, resolve=resolve)


@pytest.mark.parametrize("wrong", ["optimizer.lrr=1", "optimizer.lr=abc", "model=none_such", "a=["])
def test_composing_fast_refuses_what_hydra_refuses(loader: ConfigLoaderImpl, wrong: str) -> None:
    master = loader.load_configuration("config", [], run_mode=RunMode.MULTIRUN)
    composer = Composer(loader, master)
    with pytest.raises(HydraException):
        composer(["experiment=digits", wrong])
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        composer.typed(["experiment=digits", wrong])


def entries(folder: Path, count: int, **launch: object) -> list[Entry]:
    configs = [Config(seed=seed, output_dir=str(folder)) for seed in range(count)]
    for config in configs:
        for name, value in launch.items():
            setattr(config.launch, name, value)
    return [Entry([f"seed={c.seed}"], c, RunDir.of(c, "digest")) for c in configs]


def test_a_queued_run_is_a_folder_and_two_files(tmp_path: Path) -> None:
    """Clusters limit the number of files, folders and links."""
    some = entries(tmp_path, 40)
    sweep = tmp_path / "sweeps" / "2026"
    (array,) = plan(some, sweep, 100)
    array.write({"uid": "u", "name": "sweep"})
    shared = len(list((sweep / "provenance").iterdir()))
    owned = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert len(owned) == 3 * 40 + 2 + 4 + 1 + shared, owned
    run = some[7].run
    assert sorted(os.listdir(run.path)) == ["config.yaml", "run.json"]
    record = run.read()
    assert (record.state, record.sweep) == ("queued", {"uid": "u", "name": "sweep"})
    assert runs_of(sweep) == [entry.run.path for entry in some]
    rest = array.halve(sweep / "array-1")
    assert (len(array.entries), len(rest.entries)) == (20, 20)
    assert runs_of(sweep) == [entry.run.path for entry in some[:20]]
    # The job makes the folders and takes over the provenance, once.
    run.begin_attempt()
    provenance.take_over(run.provenance, Path(str(record.provenance)))
    provenance.take_over(run.provenance, Path(str(record.provenance)))
    assert provenance.changes(run.provenance) == []
    assert provenance.commit(run.provenance) == provenance.commit(sweep / "provenance")
    kept = {*os.listdir(run.path)} - {".run.json.lock"}
    assert kept == {"checkpoints", "config.yaml", "logs", "provenance", "run.json"}
    # A run that is frozen again keeps its uid.
    some[7].run.freeze(some[7].config, state="created")
    assert run.read().uid == record.uid
    assert len(run.read().attempts) == 1


def test_arrays_are_cut_at_the_limit_and_keep_the_order(tmp_path: Path) -> None:
    some = entries(tmp_path, 10)
    arrays = plan(some, tmp_path, 4)
    assert [len(array.entries) for array in arrays] == [4, 4, 2]
    assert [entry for array in arrays for entry in array.entries] == some
    assert [array.folder.name for array in arrays] == ["array-0", "array-1", "array-2"]
    assert {array.max_running for array in arrays} == {None}


def test_runs_with_other_resources_are_another_array(tmp_path: Path) -> None:
    arrays = plan(entries(tmp_path, 3) + entries(tmp_path, 2, nodes=2), tmp_path, 100)
    assert [len(array.entries) for array in arrays] == [3, 2]
    assert "--nodes=2" in arrays[1].text()


@pytest.mark.parametrize(("count", "size", "limit"), [(10, 4, 7), (1000, 100, 30), (9, 2, 2)])
def test_all_arrays_together_keep_to_max_running(
    tmp_path: Path, count: int, size: int, limit: int
) -> None:
    arrays = plan(entries(tmp_path, count, max_running=limit), tmp_path, size)
    # Of each chain, one array runs at any time.
    first = [array for array in arrays if array.after is None]
    assert sum(array.max_running or 0 for array in first) <= limit
    assert len(first) == min(limit, len(arrays))
    assert all((array.max_running or 0) >= 1 for array in arrays)


def test_dry_run_sends_to_stdout_the_script_and_nothing_else(train: Train) -> None:
    done = train("-m", "seed=1,2", "launch.dry_run=true")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with tracked, changed, new, ignored and generated files."""
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "ignored").mkdir()
    files = {
        "pkg/__init__.py": "",
        "pkg/net.py": "WIDTH = 1\n",
        "pkg/gone.py": "",
        ".gitignore": "ignored/\n_version.py\n*.bin\n",
        "pkg/_version.py": "VERSION = 1\n",
        "ignored/other.py": "",
        "pkg/weights.bin": "x",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    shell = "git init -q . && git add . && git -c user.name=me -c user.email=me@x commit -qm one"
    subprocess.run(shell, shell=True, check=True)
    (folder / "pkg/net.py").write_text("WIDTH = 2\n")
    (folder / "pkg/new.py").write_text("")
    (folder / "pkg/gone.py").unlink()
    provenance.collect.cache_clear()
    return folder


def configured(tmp_path: Path, **launch: object) -> Config:
    config = Config(output_dir=str(tmp_path / "project" / "runs"))
    config.data.path = str(tmp_path / "data")
    for name, value in launch.items():
        setattr(config.launch, name, value)
    return config


def test_the_snapshot_holds_the_code_as_it_is_typed(project: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    (project / "runs").mkdir()
    (project / "runs" / "result.txt").write_text("not code")
    taken = snapshot.take(config)
    assert taken is not None
    assert not taken.path.exists()
    assert taken.write()
    assert not taken.write()
    copy = taken.path / "project"
    names = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    assert names == {
        *("pkg/__init__.py", "pkg/net.py", "pkg/new.py", "pkg/_version.py", ".gitignore")
    }
    assert (copy / "pkg/net.py").read_text() == "WIDTH = 2\n"
    assert copy in taken.pythonpath
    assert any((folder / "hpctrain" / "cli.py").exists() for folder in taken.pythonpath)
    # The same content gets the same name, and other content gets another name.
    assert (again := snapshot.take(config)) is not None
    assert again.digest == taken.digest
    (project / "pkg/new.py").write_text("X = 1\n")
    assert (other := snapshot.take(config)) is not None
    assert other.digest != taken.digest


def test_bytecode_goes_along_if_it_is_that_of_the_copy(project: Path, tmp_path: Path) -> None:
    net, new = project / "pkg" / "net.py", project / "pkg" / "new.py"
    net.write_text("def width():\n    return 2\n")
    net.chmod(0o640)
    for file in (net, new):
        py_compile.compile(str(file), doraise=True)
    new.write_text("edited = True\n")
    taken = snapshot.take(configured(tmp_path))
    assert taken is not None
    assert taken.write()
    copy = taken.path / "project"
    (cached,) = (copy / "pkg" / "__pycache__").iterdir()
    assert stat.S_IMODE(cached.stat().st_mode) == 0o440
    done = subprocess.run(
        [
            sys.executable,
            "-v",
            "-c",
            "from pkg.net import width; print(width.__code__.co_filename)",
        ],
        env={**os.environ, "PYTHONPATH": str(copy)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"# {cached} matches {copy / 'pkg' / 'net.py'}" in done.stderr
    assert done.stdout == f"{copy / 'pkg' / 'net.py'}\n"
    again = snapshot.take(configured(tmp_path))
    assert again is not None
    assert again.digest == taken.digest


def test_results_around_the_code_are_not_code(project: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.output_dir = str(project)
    assert (taken := snapshot.take(config)) is not None
    assert taken.write()
    (project / "run-12345678").mkdir()
    (project / "run-12345678" / "run.json").write_text("{}")
    (project / "sweeps" / "2026-01-31_x").mkdir(parents=True)
    (project / "sweeps" / "2026-01-31_x" / "job.sh").write_text("")
    assert (again := snapshot.take(config)) is not None
    assert again.digest == taken.digest


def test_what_is_no_code_is_left_out_and_told(project: Path, tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert (taken := snapshot.take(config)) is not None
    assert taken.left_out == ()
    # An earlier output_dir, which is not that of this config, and data that no .gitignore names.
    files = {
        "old/net-12345678/run.json": 2,
        "old/net-12345678/checkpoints/step-00000010/model.bin2": 3_000_000,
        "old/code/0123456789abcdef/pkg/net.py": 1,
        "old/sweeps/2026-01-31_x/job.sh": 1,
        "old/mlflow.db": 5,
        "pkg/set/index.json": 2,
        "pkg/set/train-00000.h5": 100,
        "pkg/weights.npy": 10_000_001,
    }
    for name, size in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(bytes(size))
    assert (again := snapshot.take(config)) is not None
    assert again.digest == taken.digest
    assert sorted(again.left_out) == [
        f"{project}/old (2 files, 3.0 MB): results of runs",
        f"{project}/old/code (1 file, 0.0 MB): results of runs",
        f"{project}/old/mlflow.db (1 file, 0.0 MB): results of runs",
        f"{project}/old/sweeps (1 file, 0.0 MB): results of runs",
        f"{project}/pkg/set (2 files, 0.0 MB): a data set",
        f"{project}/pkg/weights.npy (1 file, 10.0 MB): above 10 MB; `git add` it if the code "
        "needs it",
    ]
    subprocess.run(["git", "add", "pkg/weights.npy"], check=True)
    assert (tracked := snapshot.take(config)) is not None
    assert "project/pkg/weights.npy" in tracked._files


def test_too_much_code_is_refused_and_the_largest_named(project: Path, tmp_path: Path) -> None:
    (project / "pkg" / "data.npy").write_bytes(bytes(3_000_000))
    with pytest.raises(ConfigError, match=r"snapshot_max_mb=2: .*largest: .*data\.npy 3 MB"):
        snapshot.take(configured(tmp_path, snapshot_max_mb=2))
    assert snapshot.take(configured(tmp_path, snapshot="off")) is None
    assert not (project / "runs").exists()


def test_git_is_insisted_on_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("")
    with pytest.raises(ConfigError, match=r"launch\.snapshot=git: .* is in no git repository"):
        snapshot.take(configured(tmp_path, snapshot="git"))
    taken = snapshot.take(configured(tmp_path, snapshot="auto"))
    assert taken is not None
    assert taken.unfrozen == (tmp_path,)


def test_provenance_names_commit_changes_and_packages(project: Path, tmp_path: Path) -> None:
    subprocess.run(
        ["git", "remote", "add", "origin", "https://me:s3cret@example.org/x.git"], check=True
    )
    content = provenance.collect()
    (facts,) = [repo for repo in json.loads(content["git.json"]) if repo["path"] == str(project)]
    assert len(facts["commit"]) == 40
    assert facts["dirty"]
    assert facts["remote"] == "https://example.org/x.git"
    assert "+WIDTH = 2" in content["project.diff"]
    assert "\nhydra_core==1." in content["packages.txt"]
    folder = tmp_path / "provenance"
    provenance.store(folder, content)
    provenance.store(folder, content)
    assert provenance.changes(folder) == []
    assert provenance.commit(folder) == facts["commit"] + "-dirty"
    assert provenance.source(folder) == "https://example.org/x.git"
    assert provenance.source(tmp_path / "absent") == "hpctrain"
    (folder / "packages.txt").write_text(
        content["packages.txt"].replace("\nhydra_core==", "\nhydra_core==0.")
    )
    assert [line[:13] for line in provenance.changes(folder)] == ["-hydra_core==", "+hydra_core=="]
    # Another state of the code is stored next to the first.
    provenance.store(folder, content)
    assert "hydra_core==0." in (tmp_path / "provenance.1" / "packages.txt").read_text()


def test_no_secret_of_a_working_tree_is_written_down(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private file stays private, and a secret in a tracked file is not in the patch."""
    token = "hf_" + 2 * "aB3dE5gH7jK9mN1pQ"
    monkeypatch.setenv("MY_API_TOKEN", "tok-4f9a2c71e8")
    tracked = {
        ".env": "X=tracked-secret",
        "pkg/login.py": 'eos_token = "</s>"\n',
        "pkg/site.yaml": "user: me\n",
    }
    for name, text in tracked.items():
        (project / name).write_text(text)
    commit(project)
    untracked = {
        "pkg/.env": "PASSWORD=untracked-secret",
        "pkg/id_ed25519": "secret",
        "pkg/server.key": "-----BEGIN PRIVATE KEY-----\nsecret",
        "pkg/private.py": "WIDTH = 3\n",
    }
    for name, text in untracked.items():
        (project / name).write_text(text)
        (project / name).chmod(0o600)
    (project / "pkg/public.pem").write_text("-----BEGIN CERTIFICATE-----")
    (project / ".env.example").write_text("X=...")
    (project / ".env").write_text("X=changed-secret")
    (project / "pkg/login.py").write_text(
        f'login(token="{token}", password="hunter22")\nNAME = "tok-4f9a2c71e8"\n'
        'eos_token = "</s>"\nmask_token: str = "[MASK]"\nmax_tokens = 1000000\n'
    )
    (project / "pkg/site.yaml").write_text(
        "user: me\npassword: hunter23 # old\nurl: https://me:p@ss@host/x\nkey: ${oc.env:A_TOKEN}\n"
    )
    subprocess.run(
        ["git", "remote", "add", "origin", "https://u:p@s/s@host/x.git?private_token=abc"],
        check=True,
    )
    content = provenance.collect()
    whole = content["project.diff"] + content["git.json"]
    assert '"remote": "https://host/x.git"' in content["git.json"]
    for secret in (token, "hunter2", "tok-4f9a", "p@s", "private_token", "changed-secret"):
        assert secret not in whole
    patch = content["project.diff"].splitlines()
    assert '+login(token="***", password="***")' in patch
    assert "+password: *** # old" in patch
    for visible in ('eos_token = "</s>"', 'mask_token: str = "[MASK]"', "max_tokens = 1000000"):
        assert any(line[1:] == visible for line in patch)
    assert "+key: ${oc.env:A_TOKEN}" in patch
    (tmp_path / "p.diff").write_text(content["project.diff"])
    shell = f"git stash -q && git apply --check {tmp_path}/p.diff && git stash pop -q"
    subprocess.run(shell, shell=True, check=True)

    before = os.umask(0o027)
    try:
        taken = snapshot.take(configured(tmp_path))
        assert taken is not None
        taken.write()
    finally:
        os.umask(before)
    copy = taken.path / "project"
    names = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert {"pkg/login.py", "pkg/public.pem", ".env.example", "pkg/private.py"} <= names
    assert not names & {".env", "pkg/.env", "pkg/id_ed25519", "pkg/server.key"}
    told = "\n".join(taken.left_out)
    for name in (".env", "pkg/.env", "pkg/id_ed25519", "pkg/server.key"):
        assert f"{project / name} (1 file, 0.0 MB): it may hold secrets" in told
    assert (copy / "pkg/private.py").stat().st_mode & 0o777 == 0o400
    assert (copy / "pkg/login.py").stat().st_mode & 0o777 == 0o440
    (line,) = (line for line in taken.telling if line.startswith("project/"))
    assert line.startswith("project/pkg/login.py has the value of MY_API_TOKEN in it; say os.env")


def test_working_folders_are_those_that_nobody_installed(project: Path) -> None:
    folders = git.code_folders()
    assert folders[0] == project
    assert not any("site-packages" in folder.parts for folder in folders)


def test_repositories_have_names_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / place for place in ("a/net", "a/net/src", "b/net", "tools", "none")]
    for folder in folders:
        folder.mkdir(parents=True)
        if folder.name in ("net", "tools"):
            (folder / ".git").mkdir()
    repos, outside = git.repositories(folders)
    assert [repo.name for repo in repos] == ["net", "net.2", "tools"]
    assert repos[0].used == folders[:2]
    assert outside == folders[-1:]


def test_rerun(train: Train, tmp_path: Path) -> None:
    common = ("train.max_steps=2", "tracking=off")
    train(*common)
    (run,) = runs(tmp_path / "runs")
    uid = run_json(run)["uid"]
    assert "is finished already" in train(*common).stdout
    train(*common, "launch.rerun=all")
    kept, again = sorted([run.with_name(run.name + ".1"), run], key=lambda p: -len(p.name))
    assert run_json(kept)["uid"] == uid
    assert run_json(again)["uid"] != uid
    assert {run_json(path)["state"] for path in (kept, again)} == {"finished"}
    assert (run / "provenance" / "git.json").exists()


def test_bad_launch_values(digits: Path, tmp_path: Path) -> None:
    for override, message in {
        "launch.rerun=some": "launch.rerun=some: allowed are failed, queued, all, none",
        "launch.snapshot=yes": "launch.snapshot=yes: allowed are auto, git, off",
        "launch.max_running=0": "launch.max_running=0: it must be at least 1",
        "launch.snapshot_max_mb=0": "launch.snapshot_max_mb=0.0: it must be greater than 0",
    }.items():
        where = [f"data.path={digits}", f"output_dir={tmp_path}/runs"]
        done = run_module("hpctrain", "-m", "experiment=digits", *where, override, code=2)
        assert message in done.stderr
    assert not (tmp_path / "runs").exists()
    assert os.listdir(tmp_path) == []


def test_a_batch_is_refused_for_a_sweep_is_checked_whole(train: Train, tmp_path: Path) -> None:
    wrong = ("-m", "seed=1,2,-1", "hydra.sweeper.max_batch_size=2", "launch.dry_run=true")
    assert "launch.max_running=2" in train(*wrong, code=2).stderr
    assert not (tmp_path / "runs").exists()


def commit(folder: Path) -> None:
    shell = "git init -q . && git add . && git -c user.name=me -c user.email=me@x commit -qm one"
    subprocess.run(shell, shell=True, check=True, cwd=folder)


def test_code_imported_from_elsewhere_is_another_copy(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two folders without git and one output_dir there are two copies of the code."""
    copies = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        taken = snapshot.take(configured(tmp_path))
        assert taken is not None
        taken.write()
        copies.append(Snapshot.load(taken.path))
        assert copies[-1] is not None
        assert copies[-1].pythonpath == taken.pythonpath
        assert tmp_path / name in taken.pythonpath
    assert copies[0] != copies[1]


def test_an_installed_package_inside_the_repository_is_copied(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git ignores a `.venv` in the project and so does not list the packages in it."""
    place = project / "ignored" / "site-packages" / "hpctrain"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    monkeypatch.setattr(snapshot, "PACKAGE", place)
    monkeypatch.setattr(git, "_editable", lambda: iter(()))
    monkeypatch.setattr(sys, "path", [str(place.parent)])
    assert (taken := snapshot.take(configured(tmp_path))) is not None
    assert taken.pythonpath == (taken.path / "project", taken.path / "installed")
    assert "installed/hpctrain/__init__.py" in taken._files


def test_repositories_inside_and_links_are_copied_as_they_are(
    project: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "__init__.py").write_text("")
    commit(other)
    allow = ["git", "-c", "protocol.file.allow=always"]
    subprocess.run([*allow, "submodule", "add", "-q", str(other), "sub"], check=True, cwd=project)
    subprocess.run(["git", "clone", "-q", str(other), "clone"], check=True, cwd=project)
    for folder in ("sub", "clone"):
        (project / folder / "new.py").write_text("")
    # Tracked packages that have been replaced, one by a link and one by a file.
    for name in ("linked", "filed"):
        (project / name).mkdir()
        (project / name / "x.py").write_text("")
    subprocess.run(["git", "add", "linked", "filed"], check=True, cwd=project)
    shutil.rmtree(project / "filed")
    (project / "filed").write_text("")
    (project / "linked").rename(project / "moved")
    (project / "linked").symlink_to("moved")
    (project / "outside").symlink_to("../other")
    (project / "a b\nü.py").write_text("")
    taken = snapshot.take(configured(tmp_path))
    assert taken is not None
    assert taken.write()
    copy = taken.path / "project"
    for name in ("sub/__init__.py", "sub/new.py", "clone/__init__.py", "clone/new.py"):
        assert (copy / name).is_file()
    assert os.readlink(copy / "linked") == "moved"
    assert (copy / "linked" / "x.py").is_file()
    assert (copy / "filed").is_file()
    assert (copy / "outside").resolve() == other
    assert (copy / "a b\nü.py").is_file()


def test_a_sweep_over_resources_has_an_array_and_a_name_for_each(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    shape = ("launch.nodes=1,2,4", "launch.dry_run=true", "launch.snapshot=off")
    done = train("-m", "seed=1,2", *shape, **no_sbatch)
    nodes = [line for line in done.stdout.splitlines() if line.startswith("#SBATCH --nodes")]
    assert nodes == [f"#SBATCH --nodes={count}" for count in (1, 2, 4)]
    assert done.stdout.count("#SBATCH --array=0-1\n") == 3
    assert "6 runs differ only in launch.nodes" in done.stderr
    some = entries(tmp_path, 2) + entries(tmp_path, 2, nodes=2)
    for entry in some:
        entry.config.site.partition = "a b"
    name_apart(some)
    names = [entry.run.name.rpartition("-")[0] for entry in some]
    assert names == ["run-nodes1"] * 2 + ["run-nodes2"] * 2
    assert len({entry.run.path for entry in some}) == 4
    alike = entries(tmp_path, 1) + entries(tmp_path, 1)
    name_apart(alike)
    assert {entry.config.name for entry in alike} == {"run"}


def test_a_container_is_given_the_data_of_each_of_its_runs(tmp_path: Path) -> None:
    some = entries(tmp_path, 2)
    some[1].config.data.path = "/elsewhere/data"
    assert len(plan(some, tmp_path, 100)) == 1
    for entry in some:
        entry.config.site.container.runtime = "apptainer"
        entry.config.site.container.image = "x.sif"
    first, second = plan(some, tmp_path, 100)
    assert "/elsewhere/data" not in first.text()
    assert "--bind=/elsewhere/data" in second.text()


def test_a_dry_run_that_one_run_asks_for_is_meant_for_all(train: Train, tmp_path: Path) -> None:
    assert "#!/bin/bash" in train("-m", "launch.dry_run=false,true", "tracking=off").stdout
    assert not (tmp_path / "runs").exists()


def test_a_folder_and_a_link_to_it_are_one(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    (tmp_path / "link").symlink_to("runs")
    places = f"output_dir={tmp_path}/runs,{tmp_path}/link"
    done = train("-m", "tracking=off", "train.max_steps=2", places, **no_sbatch)
    assert "the same run as" in done.stderr
    (run,) = runs(tmp_path / "runs")
    assert len(run_json(run)["attempts"]) == 1


def test_a_store_that_is_required_and_not_there_ends_a_command_before_anything_is_written(
    train: Train, tmp_path: Path, no_sbatch: dict[str, str]
) -> None:
    away = ("tracking.uri=http://127.0.0.1:9", "tracking.required=true")
    done = train("-m", "seed=1,2", *away, code=7, **no_sbatch)
    assert "tracking.uri=http://127.0.0.1:9 does not answer now" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = train(*away, code=7)
    assert "and tracking.required=true" in done.stderr
    assert "importing torch" in done.stderr
    (run,) = runs(tmp_path / "runs")
    assert run_json(run)["attempts"] == []
