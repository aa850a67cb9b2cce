"""A project that `python -m hpctrain new` writes. The page from-script.md trains one."""

from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.insight.project.new import main
from tests.conftest import ROOT


def test_its_files_are_named_after_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "my-net")]) == 0
    written = tmp_path / "my-net"
    files = {file.relative_to(written).as_posix() for file in written.rglob("*") if file.is_file()}
    assert {"my_net/model.py", "conf/experiment/my_net.yaml", "tests/test_my_net.py"} <= files
    assert (written / "train.sbatch").read_text() == (ROOT / "slurm/train.sbatch").read_text()
    assert not any("NAME" in (written / file).read_text() for file in files if "my_net" in file)
    assert "experiment=my_net site=mine" in capsys.readouterr().out


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes").write_text("")
    for folder, said in ((mine, "exists already"), (tmp_path / "3D", "'3D' is no name of a")):
        with pytest.raises(ConfigError, match=said):
            main([str(folder)])
    assert [*tmp_path.rglob("*")] == [mine, mine / "notes"]
