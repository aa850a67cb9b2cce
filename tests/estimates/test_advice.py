"""What the program advises: the keys exist, take the value, and plan agrees with the cure."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.config.composing.compose_sweep import Composer
from hpctrain.config.schema import Config
from hpctrain.config.schema.key import members
from hpctrain.insight.estimates.advice import changed, cures, table
from hpctrain.insight.estimates.hardware import Hardware, load
from hpctrain.insight.plan.inspecting.sample_shape import of_shape
from hpctrain.insight.plan.layouts import Layout
from hpctrain.insight.plan.predicting.estimator import Estimator
from hpctrain.tasks import LanguageModel
from tests.conftest import ROOT

KEYS = {member.name: member for member in members(Config)}
TOP = {name for name in KEYS if "." not in name}
# A section, or a key with its section, and perhaps a value.
NAMED = re.compile(
    rf"(?<![\w./{{}}$-])(\+*)((?:{'|'.join(sorted(TOP))})(?:\.[A-Za-z_]\w*)+)"
    r"(?:=('[^']*'|[\w./*-]+))?"
)
# Data sets, names of attributes and files that look like keys.
NOT_KEYS = re.compile(
    r"data\.(X|write_h5ad|val_$|mixture\.path|val_sets\.path)|parallel\.weights_hosts|hooks\.slack|model\.(pt2|txt|dequantize|embed_tokens|norm$|layers\.)"
    r"|(notify|hang)\.json|train\.(py|sbatch)|scheduler\.step$|optimizer\.(type|legacy_fusion|params)|scheduler\.(type|params)"
)


def texts(file: Path) -> Iterator[str]:
    """Yield the strings of a program that are no docstrings; `{}` stands for what is filled in."""
    tree = ast.parse(file.read_text())
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            inside.add(id(node.value))
        elif isinstance(node, ast.JoinedStr) and id(node) not in inside:
            inside |= {id(part) for part in node.values}
            yield "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and id(node) not in inside and node.value:
            yield node.value if isinstance(node.value, str) else ""


def wrong(plus: str, name: str, value: str | None) -> str:
    """Return what is wrong with an override that a text names; "" if nothing is."""
    known = KEYS.get(name)
    free = next((m for m in map(KEYS.get, prefixes(name)) if m and m.type.startswith("dict")), None)
    if known is None and free is None:
        return "no such key"
    if free is not None and name.startswith(("site.", "optimizer.", "scheduler.")):
        return "" if plus or value is None or known else "a new key needs a + before it"
    if known is None or value is None or known.is_section or not known.rule.choices:
        return ""
    allowed = {str(choice) for choice in known.rule.choices} | {"null"}
    return "" if value.rstrip(".") in allowed or value.isupper() else f"allowed: {allowed}"


def prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def test_each_key_that_a_text_names_exists_and_takes_the_value() -> None:
    files = [*(ROOT / "hpctrain").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")]
    found = [(file, text) for file in files for text in texts(file)]
    for file in (ROOT / "hpctrain").rglob("*.yaml"):
        found += [(file, text) for text in re.findall(r'"([^"]*)"', file.read_text())]
    for page in (ROOT / "docs").glob("*.md"):
        spans = re.findall(r"`([^`\n]+)`", page.read_text())
        found += [(page, span) for span in spans if not span.startswith(("hpctrain.", "data."))]
    problems = [
        f"{file.relative_to(ROOT)}: {match[0]}: {problem} in {text[:90]!r}"
        for file, text in found
        for match in NAMED.finditer(text)
        if not NOT_KEYS.match(match[2])
        if (problem := wrong(*match.groups()))
    ]
    assert not problems, "\n".join(problems)


BASES = {
    "ddp": ("parallel=ddp", "train.micro_batch_size=2"),
    "zero1": ("parallel=zero1", "train.accumulate=2"),
    "zero2": ("parallel=zero2", "train.accumulate=4"),
    "zero3": ("parallel=zero3", "train.activation_checkpointing=full"),
    "zero3 in parts": ("parallel=zero3", "train.accumulate=2", "data.transforms=[{_target_: a.b}]"),
    "one": ("parallel=ddp", "launch.nodes=1", "launch.tasks_per_node=1", "train.accumulate=2"),
}
LM = ("experiment=stdlib_lm", "data.path=/d", "metric=val/loss", "train.max_epochs=1")
LM += ("model.dim=1024", "model.layers=8", "model.heads=8", "precision=bf16")
LM += ("launch.nodes=2", "launch.tasks_per_node=4", "train.global_batch_size=64")


@pytest.fixture(scope="module")
def base(composer: Composer) -> dict[str, Config]:
    return {name: composer.typed([*LM, *words]) for name, words in BASES.items()}


@pytest.fixture(scope="module")
def estimator(base: dict[str, Config]) -> Estimator:
    task = LanguageModel()
    return Estimator.of_training(base["ddp"], task, of_shape(task, (1025,)))


def figures(estimator: Estimator, config: Config, hardware: Hardware) -> dict[str, float]:
    """Return what plan says of a config, by the names of `Cure.lowers`."""
    found = estimator.of(Layout(config, int(config.launch.nodes), ()), hardware)
    assert found.time is not None
    batch = config.train.global_batch_size
    times = {"comm_s": found.time.comm_s, "step_s": found.time.step_s}
    per_sample = {f"{name}_per_sample": seconds / batch for name, seconds in times.items()}
    return {"memory": found.memory.total, **times, **per_sample}


@pytest.mark.slow
def test_plan_agrees_that_each_cure_lowers_what_it_should(
    base: dict[str, Config], estimator: Estimator
) -> None:
    """In every layout in which it would be advised; each is advised in one of them at least."""
    hardware, judged = load("h100_sxm"), set()
    for name, config in base.items():
        ranks = config.asked_world_sizes.start
        before = figures(estimator, config, hardware)
        for cure in {cure for kind in table().values() for cure in kind}:
            overrides = cure.allowed(config, ranks)
            if overrides and cure.lowers:
                after = figures(estimator, changed(config, overrides), hardware)
                assert after[cure.lowers] < before[cure.lowers], (name, overrides, cure.lowers)
            judged |= {cure} if overrides else set()
    assert judged == {cure for kind in table().values() for cure in kind}


def test_what_the_checks_refuse_is_not_advised(base: dict[str, Config]) -> None:
    text = cures("data", base["zero3 in parts"], 8)
    assert text.startswith("`data.workers=")
    assert "`data.threads" not in text
    # Beside train.accumulate there is no train.micro_batch_size, and a global batch is divided.
    assert "micro_batch_size" not in cures("room", base["zero1"], 8)
    assert "micro_batch_size=" in cures("room", base["ddp"], 8)
    assert cures("one row", base["ddp"], 7) == ""
