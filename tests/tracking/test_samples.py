"""Tests of the file of samples: later attempts go on, and torn lines do no harm."""

from pathlib import Path

from hpctrain.tracking import samples


def test_numbers_go_on_after_a_kill(tmp_path: Path) -> None:
    path = samples.folder(tmp_path) / "n01.jsonl"
    writer = samples.SampleWriter(path)
    writer.write(10.0, facts={"driver": "570"})
    writer.write(11.0, metrics={"a": 1.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"number": 2, "time": 12.0, "met')  # killed while it wrote
    writer = samples.SampleWriter(path)
    assert writer.last == {"a": 1.0}
    writer.write(13.0, metrics={"a": 3.0, "b": float("nan")})
    writer.close()
    found = [*samples.read(path)]
    assert [(s.number, s.time, s.metrics) for s in found] == [
        (0, 10.0, {}),
        (1, 11.0, {"a": 1.0}),
        (2, 13.0, {"a": 3.0}),
    ]
    assert [*samples.read(path, found[1].end)] == found[2:]
    assert [*samples.read(path, found[1].end - 3)] == found[2:], "inside a line"


def test_files_of_strangers_are_no_samples(tmp_path: Path) -> None:
    folder = samples.folder(tmp_path)
    folder.mkdir()
    (folder / "a b.jsonl").write_text("{}\n")
    (folder / "n.jsonl").write_text('[]\n{}\n{"number": "1", "time": 2}\nnull\n{"number":1}\n')
    assert list(samples.files(tmp_path)) == ["n"]
    assert not [*samples.read(folder / "n.jsonl")]
