"""`data_prep text` converts documents to tokens, and trains tokenizers."""

import gzip
import json
import os
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from data_prep.formats import files
from data_prep.formats.text import documents
from hpctrain.data.shards.index import Index
from hpctrain.data.shards.shard import digest_file
from hpctrain.data.sources.reader import Reader

STDLIB = Path(sysconfig.get_paths()["stdlib"])
TEXTS = [f"Document {i}: Größe ≠ 数 😀, 'quoted' \\ {'x' * (i % 37)}\n\tend" for i in range(400)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(path, rows):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.endswith(".gz"):
        content = gzip.compress(content)
    elif path.endswith(".zst"):
        # Write two frames, as parallel compressors do.
        half = content.index(b"\n", len(content) // 2)
        pack = zstandard.ZstdCompressor().compress
        content = pack(content[:half]) + pack(content[half:])
    Path(path).write_bytes(content)
    return path


def samples(folder, split="train"):
    reader = Reader(folder, split)
    found = reader.read(np.arange(len(reader)))["tokens"]
    return [found[i] for i in range(len(found))]


def texts(folder, split="train"):
    found = samples(folder, split)
    assert all(sample[-1] == 256 for sample in found)
    return [sample[:-1].astype(np.uint8).tobytes().decode() for sample in found]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".h5"}


def source(folder):
    return Index.load(Path(folder)).provenance["source"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_the_same_documents_in_each_format(data_prep, name):
    ids = [i // 20 for i in range(400)]
    if name == "a.parquet":
        parquet.write_table(pa.table({"id": ids, "text": TEXTS}), name, row_group_size=90)
    else:
        jsonl(name, [{"id": i, "text": text} for i, text in zip(ids, TEXTS, strict=True)])
    assert data_prep("text", name, "OUT", "--workers", "1")[0] == 0
    assert texts("OUT") == TEXTS
    assert data_prep("text", name, "CUT", "--workers", "1", "--shard-size", "9KB")[0] == 0
    assert texts("CUT") == TEXTS
    assert len(Index.load(Path("CUT")).shards) > 5
    assert data_prep("text", name, "SPLIT", "--workers", "1", "--split", "column:id")[0] == 0
    assert texts("SPLIT", "17") == TEXTS[340:360]


def test_lines_are_cut_anywhere_and_each_is_read_once(here):
    """A file may be cut anywhere: between two lines, inside a line or inside a character."""
    lines = ["ä", "", "bc", "😀" * 3, "", "d" * 50, "\r", "last"]
    for end in ("\n", ""):
        content = ("\n".join(lines) + end).encode()
        path = here / "a.txt"
        path.write_bytes(content)
        reader = documents.DocumentReader(lines=True)
        for step in range(1, len(content) + 2):
            counted = Counted()
            found = [
                document.text
                for start, stop in files.ranges(len(content), step)
                for document in reader.read(files.FileRange(str(path), start, stop), counted)
            ]
            assert found == ["ä", "bc", "😀" * 3, "d" * 50, "last"]
            assert counted.skipped == 3  # "\r\n" ends a line too, so "\r" is an empty line


class Counted:
    def __init__(self):
        self.skipped = 0

    def skip(self, reason):
        self.skipped += 1

    def bad(self, *problem):
        raise AssertionError(problem)


def test_a_byte_order_mark_and_windows_line_ends_are_no_text(data_prep, here):
    (here / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (here / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n\r\n{"text": "four"}')
    assert data_prep("text", "a.txt", "b.jsonl", "OUT", "--documents", "lines")[0] == 0
    assert texts("OUT") == ["one", "two", "three", "four"]


@pytest.mark.usefixtures("any_workers")
def test_workers_parts_and_the_split_do_not_change_the_result(data_prep):
    jsonl("a.jsonl", [{"text": text} for text in TEXTS])
    common = ["--shard-size", "12KB", "--split", "train=0.7,val=0.3", "--train-bpe", "400"]
    for out, workers in (("ONE", 1), ("TWO", 2)):
        assert data_prep("text", "a.jsonl", out, *common, "--workers", workers)[0] == 0
    assert contents("ONE") == contents("TWO")
    for part in ("2/2", "1/2"):
        command = ["text", "a.jsonl", "PARTS", *common, "--part", part, "--workers", "1"]
        assert data_prep(*command)[0] == 0
    assert data_prep("finalize", "PARTS")[0] == 0
    assert contents("PARTS") == contents("ONE")
    names = {path.name for path in Path("PARTS").iterdir()}
    assert names == {*contents("ONE"), "index.json", "tokenizer.json"}
    # The text decides the split, so it is the same for another tokenizer.
    assert data_prep("text", "a.jsonl", "BYTES", *common[:-2], "--workers", 1)[0] == 0
    tokenizer = Tokenizer.from_file("ONE/tokenizer.json")
    for split in ("train", "val"):
        decoded = [tokenizer.decode(sample.tolist()) for sample in samples("ONE", split)]
        assert decoded == texts("BYTES", split)


def test_a_trained_tokenizer(data_prep, here):
    folder = STDLIB / "json"
    command = ["text", folder, "OUT", "--glob", "*.py", "--train-bpe", "600"]
    assert data_prep(*command)[0] == 0
    about, index = source("OUT")["tokenizer"], Index.load(Path("OUT"))
    assert (about["vocabulary"], about["eod"]) == (600, 0)
    assert about["digest"] == digest_file(here / "OUT" / "tokenizer.json")
    assert index.provenance["beside"] == {"tokenizer.json": about["digest"]}
    tokenizer = Tokenizer.from_file("OUT/tokenizer.json")
    assert tokenizer.get_vocab_size() == 600
    there = {path.read_text() for path in folder.glob("*.py")}
    for sample in samples("OUT"):
        assert sample[-1] == 0
        assert tokenizer.decode(sample.tolist()) in there
    before = (here / "OUT" / "tokenizer.json").stat().st_mtime_ns
    assert "already holds" in data_prep(*command)[1]
    assert before == (here / "OUT" / "tokenizer.json").stat().st_mtime_ns
    # The same tokenizer given as a file gives the same tokens. Deleting tokenizer.json is noticed.
    data_prep("text", folder, "FILE", "--glob", "*.py", "--tokenizer", "OUT/tokenizer.json")
    assert contents("FILE") == contents("OUT")
    (here / "OUT" / "tokenizer.json").unlink()
    code, _, err = data_prep(*command)
    assert code == 3
    assert "OUT/tokenizer.json is missing or changed; --overwrite replaces it" in err
    assert data_prep(*command, "--overwrite")[0] == 0
    assert digest_file(here / "OUT" / "tokenizer.json") == about["digest"]
    # The data set that replaces it has no tokenizer.
    assert data_prep("text", folder, "OUT", "--glob", "*.py", "--overwrite")[0] == 0
    assert not (here / "OUT" / "tokenizer.json").exists()


def test_tokenizers_neither_truncate_nor_make_special_tokens_from_text(data_prep, here):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(["</s>", "[CLS]"])
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 4)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save("t.json")
    (here / "a.txt").write_text("A b a b\n</s> a\n")
    command = ["text", "a.txt", "--tokenizer", "t.json", "--documents", "lines"]
    assert data_prep(*command[:2], "OUT", *command[2:])[0] == 0
    assert [sample.tolist() for sample in samples("OUT")] == [[1, 2, 1, 2, 3], [0, 0, 0, 1, 3]]
    assert source("OUT")["tokenizer"]["vocabulary"] == 5
    assert data_prep(*command[:2], "CLS", *command[2:], "--eod", "[CLS]")[0] == 0
    assert [sample[-1] for sample in samples("CLS")] == [4, 4]


def test_a_large_vocabulary_takes_uint32(data_prep, here):
    Tokenizer(models.WordLevel({"[UNK]": 70_000, "</s>": 1}, "[UNK]")).save("t.json")
    (here / "a.txt").write_text("what")
    assert data_prep("text", "a.txt", "OUT", "--tokenizer", "t.json")[0] == 0
    assert str(Index.load(Path("OUT")).fields["tokens"]) == "uint32[*]"
    assert samples("OUT")[0].tolist() == [70_000, 1]


BAD_LINES = [
    (b'{"text": 1}', "'text' is no text but int"),
    (b'{"text": null}', "'text' is no text but null"),
    (b'{"body": "x"}', "it has no 'text'; it has 'body'"),
    (b"[1]", "it is no JSON object but a list"),
    (b'{"text": "x"', "no JSON: Expecting"),
    (b'{"text": "\xff"}', "no UTF-8: byte 10 is 0xff"),
    (b'{"text": "ab\\ud800"}', "character 2 is U+D800, half of a surrogate pair"),
    (b"[" * 100_000, "no JSON: nested too deep"),
]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_lines_that_cannot_be_used(data_prep, here, packed):
    good = [json.dumps({"text": f"good {i}"}).encode() for i in range(len(BAD_LINES))]
    content = b"\n".join(line for i, (bad, _) in enumerate(BAD_LINES) for line in (good[i], bad))
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packed]
    name = f"a b.jsonl{packed}"
    (here / name).write_bytes(pack(content))
    command = ["text", name, "OUT", "--shard-size", "1KB", "--workers", "1"]
    code, said, err = data_prep(*command)
    assert (code, said) == (3, "")
    assert err.startswith(f"data_prep: {name}: line 2: 'text' is no text but int; --on-error skip")
    assert data_prep(*command, "--on-error", "skip")[0] == 0
    assert texts("OUT") == [f"good {i}" for i in range(len(BAD_LINES))]
    problems = list(map(json.loads, (here / "OUT/problems.jsonl").read_text().splitlines()))
    assert len(problems) == len(BAD_LINES)
    for i, (problem, (_, words)) in enumerate(zip(problems, BAD_LINES, strict=True)):
        assert problem["file"] == name
        assert problem["record"] == f"line {2 * i + 2}"
        assert words in problem["reason"]


def test_rows_of_parquet_that_cannot_be_used(data_prep, here):
    table = pa.table({"text": ["a", None, "", "b"], "split": ["x", "x", "y", None]})
    parquet.write_table(table, "a.parquet", row_group_size=2)
    common = ["--on-error", "skip", "--workers", "1"]
    assert data_prep("text", "a.parquet", "OUT", *common, "--split", "column:split")[0] == 0
    problems = list(map(json.loads, (here / "OUT/problems.jsonl").read_text().splitlines()))
    assert [(p["record"], p["reason"]) for p in problems] == [
        ("row 2", "'text' is no text but null"),
        ("row 4", "'split' is null; --split or --group goes by it"),
    ]
    assert Index.load(Path("OUT")).provenance["left_out"]["empty"] == 1


def test_parquet_that_says_utf8_and_is_not(data_prep, here):
    array = pa.array([b"good", b"\xff", b"last"]).view(pa.string())
    parquet.write_table(pa.table({"text": array}), "a.parquet")
    assert data_prep("text", "a.parquet", "OUT", "--on-error", "skip")[0] == 0
    assert texts("OUT") == ["good", "last"]
    [problem] = map(json.loads, (here / "OUT/problems.jsonl").read_text().splitlines())
    assert (problem["record"], problem["reason"]) == ("row 2", "no UTF-8: byte 0 is 0xff")


@pytest.fixture
def bad(here):
    whole = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (here / "good.jsonl").write_bytes(whole)
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(whole)[:-200])
    (here / "not.jsonl.gz").write_bytes(b"hello")
    (here / "not.parquet").write_bytes(b"hello")
    (here / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (here / "empty.txt").write_bytes(b"")
    (here / "not.json").write_text("{}")
    (here / "folder").mkdir()
    (here / "folder" / "x.pdf").write_bytes(b"%PDF")
    os.mkfifo(here / "pipe.txt")
    parquet.write_table(pa.table({"body": ["x"], "n": [1]}), "body.parquet")
    Tokenizer(models.WordLevel({"a": 0}, "a")).save("none.json")
    Tokenizer(models.WordLevel({"</s>": 0, "<eos>": 1}, "a")).save("both.json")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["nope.txt"], 3, "nope.txt cannot be read: No such file"),
        (["pipe.txt"], 3, "pipe.txt is no regular file"),
        (["folder"], 3, "folder has no file named *.txt or *.txt.gz or"),
        (["good.jsonl", "./good.jsonl"], 2, "good.jsonl is there twice; each file once"),
        (["cut.jsonl.gz"], 3, "cut.jsonl.gz cannot be read: Compressed file ended before"),
        (["not.jsonl.gz"], 3, "not.jsonl.gz cannot be read: Not a gzipped file"),
        (["not.parquet"], 3, "not.parquet cannot be read as Parquet"),
        (["body.parquet"], 3, "has no column 'text'; it has body, n: --text-column names it"),
        (["body.parquet", "--text-column", "n"], 3, "the column 'n' is no text but int64"),
        (["latin.txt"], 3, "latin.txt: no UTF-8: byte 2 is 0xf6; --on-error skip"),
        (["empty.txt"], 3, "nothing to write into OUT: the source has no samples"),
        (["empty.txt", "--train-bpe", "300"], 3, "no text to train a tokenizer on"),
        (["good.jsonl", "--train-bpe", "256"], 2, "--train-bpe 256: a vocabulary has 257"),
        (["good.jsonl", "--tokenizer", "nope.json"], 3, "nope.json cannot be read: No such"),
        (["good.jsonl", "--tokenizer", "not.json"], 3, "not.json is no tokenizer.json of Hug"),
        (["good.jsonl", "--tokenizer", "latin.txt"], 3, "is no tokenizer.json: it is not UTF-8"),
        (["good.jsonl", "--tokenizer", "none.json"], 2, "It has none of <|endoftext|>, </s>,"),
        (["good.jsonl", "--tokenizer", "both.json"], 2, "It has </s> and <eos>; give --eod TO"),
        (["good.jsonl", "--tokenizer", "both.json", "--eod", "x"], 2, "both.json has no such"),
        (["good.jsonl", "--eod", "x"], 2, "--eod 'x' is for --tokenizer FILE.json"),
        (["good.jsonl", "empty.txt", "--split", "column:text"], 3, "empty.txt is text without col"),
        (["good.jsonl", "--split", "column:z"], 3, "line 1: it has no 'z'; it has 'text'"),
    ],
)
def test_bad_input(data_prep, bad, here, args, code, words):
    at = next((i for i, arg in enumerate(args) if arg.startswith("--")), len(args))
    found, said, err = data_prep("text", *args[:at], "OUT", *args[at:], "--workers", "1")
    assert words in err
    assert (found, said) == (code, "")
    assert err.startswith("data_prep: ")
    assert err.count("\n") == 1
    assert not (here / "OUT" / "index.json").exists()


def test_a_document_that_is_too_long_is_named(data_prep, here, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 100)
    (here / "a.txt").write_text("x" * 101)
    assert "--documents lines takes its lines" in data_prep("text", "a.txt", "OUT")[2]
    (here / "a.txt").write_text(f"short\n{'x' * 3000}\nlast")
    err = data_prep("text", "a.txt", "OUT", "--documents", "lines", "--on-error", "skip")[2]
    assert "a.txt: line 2 is a document of more than 1 GiB" in err


def test_a_link_out_of_the_corpus_is_refused(data_prep, here):
    (here / "secret").write_text("the private key of whoever converts")
    folder = here / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("hello")
    (folder / "sub" / "again.txt").symlink_to("../a.txt")
    (folder / "sub" / "notes.txt").symlink_to("../../secret")
    code, _, err = data_prep("text", "in", "OUT")
    assert code == 3
    assert f"in/sub/notes.txt is a link that leads out of the folder, to {here}/secret" in err
    assert "--allow-outside follows such links" in err
    assert not (here / "OUT").exists()
    assert data_prep("text", "in", "OUT", "--allow-outside")[0] == 0
    assert sorted(texts("OUT")) == ["hello", "hello", (here / "secret").read_text()]
    # A link that the user names is the user's choice.
    assert data_prep("text", "in/sub/notes.txt", "NAMED")[0] == 0
