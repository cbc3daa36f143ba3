"""The reference trainer on real tensors: megatron-core under the real saver over the stand-in driver.

Each scenario runs in a child process of its own (`real_scenarios.py`), as the saver ends a process by `exit(1)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colocert.device import Child, Machine
from colocert.device.hook import GRANULE

from .children import child, needs, ranks

pytestmark = needs("torch", "megatron.core", "torch_memory_saver")

SCENARIOS = Path(__file__).with_name("real_scenarios.py")
MIB = 1 << 20
CYCLE = ["offload_grad_buffer", "sleep", "update_weights", "wake_up"]


def outcomes(*children: Child) -> list[Any]:
    return [c.wait().expect("ok") for c in children]


def granules(sizes: list[int]) -> int:
    return sum(-(-size // GRANULE) * GRANULE for size in sizes)


@pytest.fixture(scope="module", params=[True, False], ids=["lora", "full"])
def cycle(request: pytest.FixtureRequest) -> dict[str, Any]:
    [facts] = outcomes(child(SCENARIOS, "cycle", lora=request.param))
    return {**facts, "lora": request.param}


def test_everything_trained_lies_in_a_region(cycle: dict[str, Any]) -> None:
    """The device holds the granules of the listed tensors and nothing else."""
    assert cycle["own"] == sum(granules(sizes) for sizes in cycle["sizes"].values())
    if cycle["lora"]:
        assert cycle["moments"] == cycle["adapters"] == 16
    else:
        assert cycle["adapters"] == 0
        assert cycle["moments"] == 15


def test_free_bytes_rise_by_the_granules_of_what_was_released(cycle: dict[str, Any]) -> None:
    grads, rest = (granules(cycle["sizes"][tag]) for tag in ("grad_buffer", "default"))
    awake, free = cycle["free"][0], cycle["free"]
    if cycle["lora"]:
        assert free == [awake, awake + grads, awake + grads + rest, awake + grads + rest, awake]
    else:
        assert free == [awake, awake + grads + rest, awake + grads + rest, awake]


def test_only_the_backed_up_region_costs_host_bytes(cycle: dict[str, Any]) -> None:
    backup = sum(cycle["sizes"]["default"])
    assert cycle["pinned"] == ([0, 0, backup, backup, 0] if cycle["lora"] else [0, backup, backup, 0])


def test_addresses_and_backed_up_bits_survive_a_cycle(cycle: dict[str, Any]) -> None:
    assert cycle["addresses"][0] == cycle["addresses"][1]
    assert cycle["contents"][0] == cycle["contents"][1]
    assert cycle["grads_after"] == 0  # dead gradients come back zeroed, not as the device's garbage


def test_an_export_asleep_equals_one_awake(cycle: dict[str, Any]) -> None:
    awake, asleep = cycle["exports"]
    assert awake == asleep
    assert all(".lora_" in name for name in awake) is cycle["lora"]
    assert len(awake) == (16 if cycle["lora"] else 15)


@pytest.mark.parametrize(
    ("released", "tensor"),
    [("offload_grad_buffer", "grads.0"), ("sleep", "embedding"), ("sleep", "exp_avg_sq")],
)
def test_a_touch_of_a_released_tensor_is_a_sigsegv(released: str, tensor: str) -> None:
    with child(SCENARIOS, "touches", released=released, tensor=tensor) as process:
        assert process.listen() == "released"
        outcome = process.wait()
    assert (outcome.kind, outcome.signal) == ("signal", "SIGSEGV")


def test_two_processes_share_one_device(tmp_path: Path) -> None:
    """The neighbour fits only while the trainer sleeps; a wake that does not fit is refused and works later."""
    machine = Machine(capacity=192 * MIB, ledger=tmp_path / "ledger")
    with child(SCENARIOS, "shares", machine) as trainer, child(SCENARIOS, "neighbour", machine) as neighbour:

        def call(name: str) -> Any:
            trainer.tell(name)
            return trainer.listen()

        def take(nbytes: int) -> Any:
            neighbour.tell(nbytes)
            return neighbour.listen()

        held = trainer.listen()["held"]
        asked = 192 * MIB - held // 2 // GRANULE * GRANULE
        assert call("train")["error"] == ""
        assert take(asked) == "does not fit"
        assert call("offload_grad_buffer")["error"] == ""
        assert take(asked) == "does not fit"
        assert call("sleep") == {"error": "", "free": 192 * MIB, "believed": {"default": True, "grad_buffer": True}}
        assert take(asked) == "ok"
        refused = {
            "error": "OutOfDeviceMemory",
            "free": 192 * MIB - asked,
            "believed": {"default": True, "grad_buffer": True},
        }
        assert call("wake_up") == refused
        assert call("train") == refused
        assert call("update_weights") == {**refused, "error": ""}
        assert take(0) == "ok"
        awake = {"error": "", "free": 192 * MIB - held, "believed": {"default": False, "grad_buffer": False}}
        assert call("wake_up") == awake
        assert call("train") == awake
        trainer.tell(None)
        neighbour.tell(None)
        outcomes(trainer, neighbour)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_steps_with_a_hand_off_after_each_are_bit_identical_to_steps_without(lora: bool) -> None:
    calls = CYCLE if lora else CYCLE[1:]
    slept, awake = outcomes(
        child(SCENARIOS, "trains", steps=6, calls=calls, lora=lora),
        child(SCENARIOS, "trains", steps=6, calls=[], lora=lora),
    )
    assert slept == awake
    first, *_, last = (float.fromhex(loss) for loss in slept["losses"])
    assert last < first - 0.1  # it learns: equal runs of a trainer that does nothing are equal too


def test_live_gradients_survive_an_early_release_between_the_steps_of_an_accumulation() -> None:
    early, whole, none = outcomes(
        child(SCENARIOS, "trains", steps=4, calls=CYCLE[:1], accumulate=2),
        child(SCENARIOS, "trains", steps=4, calls=CYCLE, accumulate=2),
        child(SCENARIOS, "trains", steps=4, calls=[], accumulate=2),
    )
    assert early == whole == none


def test_a_failed_group_rebuild_is_retried_and_groups_come_back_as_they_were() -> None:
    [facts] = outcomes(child(SCENARIOS, "groups_come_back"))
    assert facts["asleep"] == []
    assert facts["error"] == "peer lost"
    assert facts["believed"] == {"default": False, "grad_buffer": False}  # memory came back before the groups failed
    assert facts["after_failure"] == []  # nothing half there
    assert facts["moved"] == 0
    assert facts["after"] == facts["before"]
    assert len(facts["after"]) > 10
    assert facts["alive"] == []  # nothing refers to a group of before
    assert facts["closed"] == []


def test_groups_that_vanished_are_back_at_their_next_use() -> None:
    assert outcomes(child(SCENARIOS, "groups_taken_away")) == [{"same": True, "steps": 2}]


def test_live_gradients_are_those_of_autograd_after_a_hand_off_too() -> None:
    [facts] = outcomes(child(SCENARIOS, "gradients"))
    assert facts["equal"] == [True] * 16
    assert facts["live"]
    assert facts["nonzero"] > 0


def test_an_early_release_without_a_sleep_is_undone_by_wake_up_and_by_train() -> None:
    [facts] = outcomes(child(SCENARIOS, "early_release_alone"))
    awake, released = facts["free"][:2]
    assert released > awake
    assert facts["free"] == [awake, released, released, awake, awake, released, awake]
    assert facts["believed"] == {"default": False, "grad_buffer": False}
    assert facts["steps"] == 2


def test_fused_buffers_of_bf16_parameters_keep_their_contents_when_gradients_are_released() -> None:
    """DDP makes them side by side; only that of the gradients is without a backup."""
    [facts] = outcomes(child(SCENARIOS, "bf16_buffers"))
    assert facts["types"] == ["torch.bfloat16", "torch.float32"]
    assert facts["inside"]
    assert facts["kept"]
    assert facts["same"]
    assert facts["back"]
    grads, params = facts["buffers"]
    assert grads == 2 * params  # FP32 beside bf16
    awake, early, asleep = facts["free"]
    assert early - awake == granules([grads])
    assert asleep - early > granules([params])


def test_the_saver_runs_in_preload_mode_although_megatron_sets_another() -> None:
    assert outcomes(child(SCENARIOS, "mode_after_import")) == [["torch", "preload"]]


def test_a_saver_put_to_use_before_megatron_is_an_error_by_name() -> None:
    assert outcomes(child(SCENARIOS, "saver_first")) == ["SaverStartedFirst"]


def test_two_ranks_still_average_their_gradients_after_a_hand_off() -> None:
    zero, one = ranks(SCENARIOS, "one_of_two", 2)
    assert zero["losses"] != one["losses"]  # other data
    assert zero["contents"] == one["contents"]
    assert zero["data"] == one["data"]
    assert zero["data"]["ranks"] == [0, 1]
