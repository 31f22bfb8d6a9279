"""Boxes of experts' matrices in files that hold the experts of a layer as two tensors."""

import pytest
import torch
from torch import Tensor

from offbeat.plugins.megatron.hf_files import as_in_files, find_fused_place
from offbeat.weight_sync.region import Region

EXPERTS, COLUMNS, HIDDEN = 3, 6, 5
LAYER = "model.language_model.layers.1.mlp.experts"
MATRICES: dict[str, Tensor] = {
    f"{LAYER}.{expert}.{kind}_proj.weight": torch.randn(
        (HIDDEN, COLUMNS) if kind == "down" else (COLUMNS, HIDDEN)
    )
    for expert in range(EXPERTS)
    for kind in ("down", "gate", "up")
}


def fused() -> dict[str, Tensor]:
    def every(kind: str) -> Tensor:
        return torch.stack([MATRICES[f"{LAYER}.{e}.{kind}_proj.weight"] for e in range(EXPERTS)])

    return {
        f"{LAYER}.gate_up_proj": torch.cat([every("gate"), every("up")], dim=1),
        f"{LAYER}.down_proj": every("down"),
    }


def turned() -> dict[str, Tensor]:
    return {name: each.mT.contiguous() for name, each in fused().items()}


FORMS = {"fused": fused(), "turned": turned()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MATRICES)
def test_any_region_of_a_matrix_is_found_in_the_tensor_of_all_experts(form: str, name: str) -> None:
    files, matrix = FORMS[form], MATRICES[name]
    shapes = {each: tuple(tensor.shape) for each, tensor in files.items()}
    rows, columns = matrix.shape
    for region in (
        Region.whole((rows, columns)),
        Region.at((rows // 2, 0), (rows - rows // 2, columns)),
        Region.at((1, 2), (2, columns - 2)),
    ):
        place = find_fused_place(name, (rows, columns), region, shapes)
        assert place is not None
        got = place.of(files[place.tensor][place.region.slices])
        assert torch.equal(got, matrix[region.slices])


def test_a_matrix_of_its_own_has_no_place_among_others() -> None:
    name, whole = f"{LAYER}.0.up_proj.weight", (COLUMNS, HIDDEN)
    assert find_fused_place(name, whole, Region.whole(whole), {name: whole}) is None
    shapes = {each: tuple(tensor.shape) for each, tensor in fused().items()}
    head = "lm_head.weight"
    assert find_fused_place(head, whole, Region.whole(whole), shapes) is None


@pytest.mark.parametrize("form", FORMS)
def test_an_export_has_the_form_of_the_files(form: str) -> None:
    files = FORMS[form] | {"lm_head.weight": torch.ones(2)}
    shapes = {each: tuple(tensor.shape) for each, tensor in files.items()}
    named = {**MATRICES, "lm_head.weight": torch.ones(2)}
    got = dict(as_in_files(sorted(named.items()), shapes))
    assert got.keys() == files.keys()
    assert all(torch.equal(got[name], files[name]) for name in files)
    apart = {name: tuple(each.shape) for name, each in named.items()}
    assert dict(as_in_files(named.items(), apart)).keys() == named.keys()
