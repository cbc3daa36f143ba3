"""The TOML of a shape: each figure says where it comes from, and a wrong shape is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from colocert.rig.contract import Config
from colocert.shapes import Shape, ShapeError, engine_sizes_of, load, names, parse, regions_of

SYNTHETIC = Path(__file__).with_name("synthetic.toml")
TEXT = SYNTHETIC.read_text(encoding="utf-8")
GPU = "gpu_bytes = { formula"
MEASURED = 'value = {}, kind = "measured", source = "x"'


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source_or_a_formula(name: str) -> None:
    figures = list(load(name).figures())
    assert len(figures) >= 30
    for label, figure in figures:
        assert bool(figure.source) is (figure.kind == "measured"), label
        assert bool(figure.formula) is (figure.kind == "computed"), label


@pytest.mark.parametrize("name", names())
def test_a_number_that_was_chosen_says_so(name: str) -> None:
    for label, figure in load(name).figures():
        if figure.formula.replace(".", "").isdigit() and figure.formula != "0":
            assert figure.note, label


@pytest.mark.parametrize("name", names())
def test_a_shape_has_the_name_of_its_file(name: str) -> None:
    assert load(name).name == name


def test_model_sizes_are_those_of_the_model_cards() -> None:
    assert load("qwen3-8b-1xh200").model.parameters.number == 8_190_735_360
    assert load("kimi-k27-2x8-b300").model.parameters.number == pytest.approx(1.03e12, rel=0.01)
    assert load("k3-gb300").facts["routed"].number == pytest.approx(2.72e12, rel=0.01)


def test_a_shape_goes_under_the_doubles() -> None:
    shape = load(str(SYNTHETIC))
    regions = regions_of(shape)
    assert [(r.name, r.backup) for r in regions["default"]] == [("base", True), ("adapter", True), ("optimizer", True)]
    assert [(r.name, r.backup) for r in regions["grad_buffer"]] == [("grads", False)]
    assert engine_sizes_of(shape) == {"weights": 288 << 20, "kv_cache": 512 << 20, "cuda_graph": 16 << 20}
    assert Config(lora=True, regions=regions).facts()["regions"]["grad_buffer"] == [["grads", "grads", 80 << 20, False]]


def test_a_changed_input_changes_what_is_computed_from_it() -> None:
    assert parsed(lambda t: t.replace('"20 * facts.mib"', '"40 * facts.mib"')).trainer.grads.nbytes == 160 << 20


def parsed(change: Callable[[str], str]) -> Shape:
    changed = change(TEXT)
    assert changed != TEXT
    return parse(changed.encode(), "x.toml")


WRONG = {
    "no field": (lambda t: t.replace("kv_cache =", "kv ="), "unknown field `kv`"),
    "no section": (lambda t: t.replace("[dtypes]", "[types]"), "unknown field `types`"),
    "nothing": (lambda t: "", "missing required field `name`"),
    "missing": (lambda t: "\n".join(x for x in t.splitlines() if not x.startswith("grads")), "required field `grads`"),
    "negative": (lambda t: t.replace('"64 * facts.mib"', '"0 - 64 * facts.mib"'), "trainer.activations must be 0 or"),
    "negative by formula": (
        lambda t: t.replace('"512 * facts.mib"', '"0.1 * machine.gpu_bytes - engine.weights"'),
        "engine.kv_cache must be 0 or more (got -",
    ),
    "not a number": (lambda t: t.replace(GPU, 'gpu_bytes = { value = "1G", formula'), "Expected `float | null`"),
    "no kind": (lambda t: t.replace(', kind = "computed" }', " }", 1), "required field `kind`"),
    "other kind": (lambda t: t.replace('kind = "computed"', 'kind = "guessed"', 1), "Invalid enum value 'guessed'"),
    "no source": (
        lambda t: t.replace('formula = "2048 * facts.mib", kind = "computed"', 'value = 1, kind = "measured"'),
        "machine.host_bytes is measured, and must have a value and its source",
    ),
    "value and formula": (
        lambda t: t.replace(GPU, "gpu_bytes = { value = 1, formula"),
        "machine.gpu_bytes is computed",
    ),
    "unknown name": (lambda t: t.replace("1024 * facts.mib", "1024 * facts.gib"), "its formula names facts.gib"),
    "circle": (lambda t: t.replace("2 ** 20", "facts.mib + 1"), "facts.mib leads back to itself"),
    "no formula": (lambda t: t.replace("2 ** 20", "2 **"), "the formula '2 **' cannot be read"),
    "division by zero": (lambda t: t.replace("2 ** 20", "1 / 0"), "has no value (division by zero)"),
    "a large power": (lambda t: t.replace("2 ** 20", "9 ** 9 ** 9"), "has no value (power of"),
    "code": (lambda t: t.replace("2 ** 20", "print(1)"), "may hold numbers, figures and"),
    "no GPUs": (
        lambda t: t.replace('gpus_per_node = { formula = "1"', 'gpus_per_node = { formula = "0"'),
        "machine.gpus_per_node must be a whole number of 1 or more (got 0)",
    ),
    "infinite": (
        lambda t: t.replace(
            'formula = "2048 * facts.mib", kind = "computed"', 'value = inf, kind="measured", source="x"'
        ),
        "machine.host_bytes must be 0 or more (got inf)",
    ),
    "damaged": (lambda t: t[: len(t) // 2], "x.toml: "),
    "not TOML": (lambda t: "= what", "x.toml: not a TOML file"),
}


@pytest.mark.parametrize("change", list(WRONG))
def test_a_wrong_shape_is_refused_in_one_line(change: str) -> None:
    wrong, said = WRONG[change]
    with pytest.raises(ShapeError) as caught:
        parsed(wrong)
    text = str(caught.value)
    assert text.startswith("x.toml: ")
    assert said in text
    assert "\n" not in text


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"k3-gb300, kimi-k27-2x8-b300, .* \(got 'mine'\)"):
        load("mine")
    with pytest.raises(ShapeError, match="cannot be read"):
        load(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text(TEXT, encoding="utf-8")
    assert load(str(tmp_path / "mine.toml")) == load(str(SYNTHETIC))
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ShapeError, match="not a TOML file"):
        load(str(tmp_path / "mine.toml"))
