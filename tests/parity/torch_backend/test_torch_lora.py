"""Adapters over one rank and several: the same step, states that all load, the same exports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_jobs import CANARIES, KEPT, LORA
from parity_cases import ADAPTER_LAYOUTS, BOUND, CHUNKS, Cut, Step, worst_relative_error
from parity_table import ParityTable
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from world import WorkerFailed, World

from offbeat.models.loading import model_without_memory
from offbeat.plugins.lora.lora import inject
from offbeat.trainers.torch.activation_bytes import largest_rank
from offbeat.trainers.torch.forward import top_logprobs

pytest.importorskip("peft", reason="the extra `lora` is not installed")


LAYOUTS = {"dp2": (2, 1), "tp2": (2, 2), "tp2 x dp2": (4, 2)}


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        ("dp2", "qwen3", "float64"),
        ("dp2", "qwen3", "bfloat16"),
        ("tp2", "qwen3", "float64"),
        ("tp2", "llama-tied", "bfloat16"),
        ("tp2 x dp2", "llama-biased", "float64"),
    ],
)
def test_ranks_train_adapters_as_one_does_and_go_on_from_its_state(
    world: World,
    models: Callable[[str], Path],
    step: Step,
    tmp_path: Path,
    layout: str,
    model: str,
    dtype: str,
) -> None:
    ranks, tensor = LAYOUTS[layout]
    given: dict[str, Any] = {"path": models(model), "step": step}
    cut = Cut(dtype=dtype, tensor=tensor)
    (one,) = world.run(1, "lora_jobs:trained", cut=Cut(dtype=dtype), root=tmp_path / "one", **given)
    seen = world.run(ranks, "lora_jobs:trained", cut=cut, root=tmp_path / "all", **given)
    bound = BOUND if dtype == "float64" else 0.02
    for each in seen:
        assert each["initial"] == each["after reset"] == one["initial"] == one["after reset"]
        assert each["digest"] == seen[0]["digest"]
        assert each["identity"] == one["identity"]
        assert each["reference gap"] == one["reference gap"] == 0
        assert each["frozen"] == one["frozen"] == {f"torch.{dtype}"}
        assert each["result"].loss == pytest.approx(one["result"].loss, rel=bound)
        assert each["result"].grad_norm == pytest.approx(one["result"].grad_norm, rel=bound)
        assert each["adapters"].keys() == one["adapters"].keys()
    if dtype == "float64":
        both = ({n: g for n, g in each["gradients"].items() if g.any()} for each in (seen[0], one))
        assert worst_relative_error(*both) <= BOUND
        assert worst_relative_error(seen[0]["adapters"], one["adapters"]) <= BOUND
    files = [load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "all")]
    for name, each in files[0].items():
        assert torch.allclose(each, files[1][name], rtol=bound, atol=bound)
    load = tmp_path / "one" / "state"
    for on in world.run(
        ranks, "lora_jobs:trained", cut=cut, load=load, root=tmp_path / "on", **given
    ):
        assert on["loaded"] == one["digest"]
        assert on["result"].applied
    load = tmp_path / "all" / "state"
    (back,) = world.run(
        1, "lora_jobs:trained", cut=Cut(dtype=dtype), load=load, root=tmp_path / "back", **given
    )
    assert back["loaded"] == seen[0]["digest"]


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_canaries_of_ranks_in_bfloat16_are_of_the_rounded_sums_that_are_exported(
    world: World, models: Callable[[str], Path], step: Step, tmp_path: Path, layout: str
) -> None:
    ranks, tensor = LAYOUTS[layout]
    cut = Cut(dtype="bfloat16", tensor=tensor)
    given: dict[str, Any] = {"path": models("qwen3"), "step": step, "cut": cut}
    seen = world.run(ranks, "lora_jobs:trained", root=tmp_path, **given)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    tokens, logprobs = top_logprobs(served, CANARIES, KEPT)
    for each in seen:
        assert each["canaries"] == seen[0]["canaries"]
    if layout == "dp2":
        assert seen[0]["canaries"] == (tokens, logprobs)
    for got, wanted in zip(seen[0]["canaries"][1], logprobs, strict=True):
        assert got == pytest.approx(
            wanted, abs=0.25
        )  # kernels and partial sums: what canaries allow


@pytest.mark.parametrize("layout", ADAPTER_LAYOUTS)
def test_adapters_have_one_gradient_in_any_chunks_over_two_ranks(
    world: World,
    models: Callable[[str], Path],
    step: Step,
    parity_table: ParityTable,
    layout: str,
) -> None:
    given: dict[str, Any] = {"path": models("qwen3"), "step": step, "chunks": CHUNKS}
    (alone,) = world.run(1, "lora_jobs:split", cut=Cut(), **given)
    assert all(gradient.any() for gradient in alone[1].values())
    for seen in (alone, *world.run(2, "lora_jobs:split", cut=ADAPTER_LAYOUTS[layout], **given)):
        for chunks in CHUNKS:
            error = worst_relative_error(seen[chunks], alone[1])
            assert error <= BOUND
            if seen is not alone:
                parity_table.add("torch", layout, "tokens", chunks, error)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float64"), (4, "bfloat16")])
def test_ranks_hold_the_bytes_that_check_says_of_adapters(
    world: World, models: Callable[[str], Path], step: Step, tmp_path: Path, ranks: int, dtype: str
) -> None:
    path = models("llama-biased")
    given: dict[str, Any] = {"path": path, "cut": Cut(dtype=dtype, tensor=2), "step": step}
    seen = world.run(ranks, "lora_jobs:trained", root=tmp_path, **given)
    model = model_without_memory(path, trust_remote_code=False)
    inject(model, LORA)
    said = largest_rank(
        model,
        getattr(torch, dtype),
        data=ranks // 2,
        tensor=2,
        frozen=[each for each in model.parameters() if not each.requires_grad],
    )
    assert said == max((each["bytes"] for each in seen), key=lambda each: each.total)


def test_a_gradient_of_a_whole_matrix_a_that_is_not_added_up_is_refused_at_the_start(
    world: World, models: Callable[[str], Path], step: Step, tmp_path: Path
) -> None:
    """The matrices B are zero there, so that every gradient of A would be, too."""
    given: dict[str, Any] = {"path": models("qwen3"), "cut": Cut(tensor=2), "step": step}
    with pytest.raises(WorkerFailed, match=r"tensor ranks different gradients of .*lora_A"):
        world.run(2, "lora_jobs:trained", root=tmp_path, kind="KeepsPartsOfA", **given)
