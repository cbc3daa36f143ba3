"""What a plan says of the shapes that ship, and that its order and its bytes are those of the driver and the ledger."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from colocert import plan as plans
from colocert.plan import CLAIMS, ENGINE, FROZEN, TRAINER, Plan, config_of, order, plan
from colocert.rig.rig import Rig
from colocert.rules.run import RunView
from colocert.shapes import Shape, engine_sizes_of, load, names, regions_of
from colocert.trace.events import SaverAlloc, SaverFree, SaverPause, SaverResume

GB, MIB = 10**9, 1 << 20
K27 = "kimi-k27-2x8-b300"
SHAPES = ("k3-gb300", K27, "qwen3-8b-1xh200", "tiny")
MOVES = (SaverAlloc, SaverPause, SaverResume, SaverFree)


@pytest.fixture(scope="module")
def made() -> dict[str, Plan]:
    return {name: plan(load(name)) for name in SHAPES}


def with_figure(shape: Shape, section: str, field: str, value: float) -> Shape:
    held = getattr(shape, section)
    figure = msgspec.structs.replace(getattr(held, field), value=value)
    return msgspec.structs.replace(shape, **{section: msgspec.structs.replace(held, **{field: figure})})


def test_the_shapes_that_ship() -> None:
    assert tuple(names()) == SHAPES


# ---- the figures of the seeds


def test_two_host_copies_leave_what_the_report_measured(made: dict[str, Plan]) -> None:
    found = made[K27]
    cpu = found.modes["cpu"]
    peak = cpu.host_peak()
    assert peak.host_of(TRAINER) == pytest.approx(1340 * GB, abs=100)
    assert peak.host_of(ENGINE) == pytest.approx(1300 * GB, abs=100)
    assert 80 * GB <= found.host_room(cpu).left <= 380 * GB
    assert found.host_room(cpu).left == pytest.approx(260 * GB, abs=200)


def test_file_backed_frozen_weights_leave_what_the_report_measured(made: dict[str, Plan]) -> None:
    found = made[K27]
    room = found.host_room(found.modes["cpu"], file_backed=True)
    assert 1400 * GB <= room.left <= 1600 * GB
    assert room.peak.written == pytest.approx(1190 * GB, abs=100)
    assert room.peak.host[FROZEN] == room.peak.written


def test_the_inputs_of_the_report_are_marked_measured() -> None:
    figures = dict(load(K27).figures())
    for name, value in (
        ("machine.host_bytes", 2.9e12),
        ("facts.trainer_copy_per_node", 1.34e12),
        ("facts.engine_backup_per_node", 1.3e12),
    ):
        assert (figures[name].kind, figures[name].number) == ("measured", value)
        assert "SkyRL" in figures[name].source


def test_the_frozen_masters_agree_with_the_formula() -> None:
    facts = load(K27).facts
    assert facts["by_formula_per_node"].number == pytest.approx(facts["frozen_per_node"].number, rel=0.012)


@pytest.mark.parametrize("name", SHAPES)
def test_gpu_peak_has_the_larger_host_copy_and_cpu_peak_both(made: dict[str, Plan], name: str) -> None:
    found = made[name]
    shape, gpus = found.shape, round(found.shape.machine.gpus_per_node.number)
    backup = gpus * sum(r.nbytes for r in regions_of(shape)["default"])
    mirror = gpus * engine_sizes_of(shape)["weights"]
    assert found.modes["gpu"].host_peak().on_host() == max(backup, mirror)
    assert found.modes["cpu"].host_peak().on_host() == backup + mirror
    for moment in found.modes["gpu"].moments:
        assert not (moment.host_of(TRAINER) and moment.host_of(ENGINE))


@pytest.mark.parametrize("name", SHAPES)
def test_cpu_peak_never_has_both_sides_on_the_device(made: dict[str, Plan], name: str) -> None:
    for moment in made[name].modes["cpu"].moments:
        assert len({c.owner for c in moment.device}) <= 1


@pytest.mark.parametrize("name", SHAPES)
def test_gpu_peak_has_both_model_sides_on_the_device(made: dict[str, Plan], name: str) -> None:
    found = made[name]
    both = sum(r.nbytes for r in regions_of(found.shape)["default"]) + engine_sizes_of(found.shape)["weights"]
    assert max(m.on_device for m in found.modes["gpu"].moments if len({c.owner for c in m.device}) == 2) >= both


# ---- what fits


def test_tiny_fits_only_if_the_gradient_buffers_go_first(made: dict[str, Plan]) -> None:
    found = made["tiny"]
    assert found.shape.machine.gpu_bytes.nbytes == 248 * MIB
    assert found.device_room(found.modes["gpu"]).left == 12 * MIB
    kept = found.device_room(found.grads_kept)
    assert (kept.fits, kept.left) == (False, -14 * MIB)
    wall = found.too_much(found.grads_kept)
    assert wall is not None
    assert (wall.step.phase, wall.step.call, wall.step.tags) == ("train→rollout", "resume", ("weights",))


def test_without_gradient_buffers_and_communicators_at_once_the_early_release_changes_nothing() -> None:
    shape = with_figure(load("tiny"), "trainer", "communicators", 0)
    found = plan(shape)
    assert found.device_room(found.grads_kept).left == found.device_room(found.modes["gpu"]).left


def test_the_k27_shape_fits_its_gpus_in_cpu_peak_only(made: dict[str, Plan]) -> None:
    found = made[K27]
    assert found.device_room(found.modes["cpu"]).fits
    room = found.device_room(found.modes["gpu"])
    assert room.left == pytest.approx(-46.0 * GB, abs=0.1 * GB)
    assert any("gpu-peak, device: does not fit: 46.0 GB too much" in line for line in plans.verdicts(found))


@pytest.mark.parametrize("name", ["qwen3-8b-1xh200", "k3-gb300"])
def test_these_shapes_fit_in_both_modes(made: dict[str, Plan], name: str) -> None:
    found = made[name]
    for mode in found.modes.values():
        assert found.device_room(mode).fits
        assert found.host_room(mode).fits
    assert not any("does not fit" in line for line in plans.verdicts(found))


def test_a_host_that_is_too_small_is_said_with_the_missing_bytes() -> None:
    found = plan(with_figure(load(K27), "machine", "host_bytes", 2e12))
    assert found.host_room(found.modes["cpu"]).left == pytest.approx(-640 * GB, abs=200)
    said = next(line for line in plans.verdicts(found) if line.startswith("cpu-peak, host"))
    assert "with every copy in memory does not fit: 640.0 GB too much" in said
    assert "with file-backed frozen weights 550.0 GB remain" in said


def test_a_run_without_a_byte_to_spare_fits_and_one_byte_less_does_not(made: dict[str, Plan]) -> None:
    shape = made["tiny"].shape
    peak = made["tiny"].modes["gpu"].device_peak().on_device
    for capacity, fits in ((peak, True), (peak - 1, False)):
        found = plan(with_figure(shape, "machine", "gpu_bytes", capacity))
        assert found.device_room(found.modes["gpu"]).fits is fits
        assert (found.too_much(found.modes["gpu"]) is None) is fits


# ---- the order and the ledger


def moves_of(events: list[Any]) -> list[tuple[str, str, str]]:
    return [(type(e).__name__, e.owner or TRAINER, e.alloc) for e in events if isinstance(e, MOVES)]


@pytest.mark.parametrize("mode", plans.MODES)
def test_the_order_is_the_reference_drivers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference driver and the plan move the same allocations in the same order, over equal doubles."""
    if importlib.util.find_spec("colocert_reference") is None:
        pytest.skip("the reference is not installed")
    driver = importlib.import_module("colocert_reference.driver_ports").driver
    shape, theirs, ours = load("tiny"), [], []
    config = dataclasses.replace(config_of(shape, mode))
    rig = Rig(config, CLAIMS, theirs.append, started=False)
    rig.chain([plans.PlannedTrainer(rank, rig.engines, shape) for rank in rig.ranks])
    rig.run(driver(rig).run(1))
    rig.close()

    apply = plans.Books.apply

    def keep(books: plans.Books, event: Any) -> bool:
        ours.append(event)
        return apply(books, event)

    monkeypatch.setattr(plans.Books, "apply", keep)
    plan_moments = plans._moments(shape, mode, early_grads=True)
    assert plan_moments
    assert moves_of(ours) == moves_of(theirs)


@pytest.mark.parametrize("mode", plans.MODES)
def test_the_bytes_are_those_of_the_run_view(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every movement the categories sum to what the view of the hand-off rules has of each owner."""
    view, compared = RunView(), []
    apply = plans.Books.apply

    def both(books: plans.Books, event: Any) -> bool:
        view.apply(event)
        moved = apply(books, event)
        for owner, name in ((ENGINE, ENGINE), (TRAINER, "")):
            device = sum(n for c, n in books.device().items() if c.owner == owner)
            host = sum(n for c, n in books.host(1).items() if c.owner == owner)
            assert (device, host) == (view.device_bytes(name), view.host_bytes(name))
            compared.append(device)
        return moved

    monkeypatch.setattr(plans.Books, "apply", both)
    plans._moments(load("tiny"), mode, early_grads=True)
    assert len(compared) > 50


def test_without_the_early_release_only_that_step_is_left_out() -> None:
    kept = [s for s in order("gpu") if s.call != "offload_grad_buffer"]
    assert kept == list(order("gpu", early_grads=False))
    assert "offload_grad_buffer" not in {s.call for s in order("cpu")}


def test_every_label_has_a_moment(made: dict[str, Plan]) -> None:
    for mode in made["tiny"].modes.values():
        assert {m.step for m in mode.moments} == {s for s in order(mode.mode) if s.label}
        assert mode.phases() == ["start", "sync", "rollout", "rollout→train", "training", "train→rollout"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1_340_000_000_000, "1.34 TB"), (162_500_000_000, "162.5 GB"), (1_032_000_000, "1.03 GB"), (512, "512 B")],
)
def test_sizes_are_written_in_powers_of_ten(nbytes: int, text: str) -> None:
    assert plans.size(nbytes) == text


@pytest.mark.parametrize("name", SHAPES)
def test_the_page_has_the_sentences_and_peaks_of_every_shape(made: dict[str, Plan], name: str) -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8").split())
    for line in plans.verdicts(made[name]):
        assert f"- {line}" in page
    for mode in made[name].modes.values():
        for phase in mode.phases():
            device, host = mode.device_peak(phase).on_device, mode.host_peak(phase).on_host()
            assert f"| {phase} | {plans.size(device)} | {plans.size(host)} |" in page
