"""Low-rank adapters of a release: their names, and their sum with the matrices of a base model.

    base_model.model.X.lora_A.weight [r, in]    names in PEFT's files. X is a linear module. Its
    base_model.model.X.lora_B.weight [out, r]   matrix is X.weight [out, in]

A merged matrix is always computed from the base matrix as loaded. In 16 bits, adding an adapter and
subtracting it again does not restore the bits of the base.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch has no public names for its calls on lists of tensors, and exports them without declaring
# it.

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from offbeat.weight_sync.chunks import dtype_name, iterate_weights
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.fingerprints import ReadBack, tensor_difference
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import Named
from offbeat.weight_sync.served import TensorDifference
from offbeat.weight_sync.transaction import TensorSpecs

_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterPart(NamedTuple):
    """One of the two matrices of an adapter."""

    module: str  # name of the linear module in the base model
    side: str  # A or B

    @property
    def file_name(self) -> str:
        """Return the name of this matrix in PEFT's files, and in releases."""
        return f"base_model.model.{self.module}.lora_{self.side}.weight"


def part_named(name: str) -> AdapterPart | None:
    """Return the part of an adapter with this name in PEFT's files, or None for other names."""
    match = _NAME.fullmatch(name)
    return AdapterPart(match["module"], match["side"]) if match else None


def merge_matrix(base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """Return ``base + scaling * b @ a``, computed in at least float32 and rounded once.

    O and I are the outputs and inputs of the matrix, R is the rank. No argument changes.
    """
    wide = torch.promote_types(base_OI.dtype, torch.float32)
    with torch.no_grad():
        added_OI = torch.mm(b_OR.to(wide), a_RI.to(wide)).mul_(scaling)
        return added_OI.add_(base_OI).to(base_OI.dtype)


class AdapterBase(Protocol):
    """A model as an engine has loaded it, to which adapters are added."""

    @property
    def digest(self) -> str:
        """Return the digest of the files from which the model was loaded."""
        ...

    def matrix(self, module: str) -> tuple[tuple[int, ...], str] | None:
        """Return shape and dtype of the matrix of a linear module, or None if it has none."""
        ...

    def of(self, module: str) -> Tensor:
        """Return the matrix of a linear module as it was loaded."""
        ...

    def write(self, matrices: Mapping[str, Tensor]) -> None:
        """Write these matrices, by linear module, and restore the loaded values of all others."""
        ...


class BaseWeights:
    """Weights of a module as loaded. It keeps copies of the matrices that adapters are added to."""

    def __init__(self, module: nn.Module, digest: str) -> None:
        """``digest``: digest of the files from which the module was loaded."""
        self.digest = digest
        self._served = dict(iterate_weights(module))
        self._kept = dict[str, Tensor]()  # matrices that adapters were added to

    def matrix(self, module: str) -> tuple[tuple[int, ...], str] | None:
        served = self._served.get(f"{module}.weight")
        return None if served is None else (tuple(served.shape), dtype_name(served))

    def of(self, module: str) -> Tensor:
        name = f"{module}.weight"
        if name not in self._kept:
            self._kept[name] = self._served[name].clone()
        return self._kept[name]

    def served(self, module: str) -> Tensor:
        """Return the matrix of a linear module as currently served."""
        return self._served[f"{module}.weight"]

    def make_target(
        self, epoch: int, manifest: Manifest
    ) -> "tuple[AdapterTarget, Callable[[], ReadBack]]":
        """Return the target of releases of one layout, and a function that reads back its weights.

        Raises:
            TransferRefused: The adapters were trained on another model.
        """
        check_base(epoch, self, manifest)
        target = AdapterTarget(self, manifest)
        return target, partial(target.read_back, self)

    def write(self, matrices: Mapping[str, Tensor]) -> None:
        given = {f"{module}.weight": each for module, each in matrices.items()}
        values = self._kept | given
        with torch.no_grad():
            torch._foreach_copy_([self._served[name] for name in values], list(values.values()))


class AdapterTarget:
    """Target for releases of one layout that hold only adapters.

    It computes the sums with the base while the tensors arrive, and serves them from the commit on.
    So decoding is as fast as with only the base.
    """

    def __init__(self, base: AdapterBase, manifest: Manifest) -> None:
        self._base, self._adapter = base, manifest.adapter
        self._arrived = dict[str, Tensor]()  # copies of the adapters of the open transfer
        self._served = dict[str, Tensor]()  # of the last committed one
        self._specs = _list_expected(base, manifest)
        self._half = dict[str, tuple[str, Tensor]]()  # by module: side and matrix that came first
        self._staged = dict[str, Tensor]()  # merged matrices by module

    def specs(self) -> TensorSpecs:
        return self._specs

    def prepare(self, manifest: Manifest) -> None:
        self._adapter = manifest.adapter

    def load(self, tensors: Named) -> None:
        assert self._adapter is not None  # noqa: S101 -- this target is made for such manifests
        for name, tensor in tensors:
            self._arrived[name] = tensor.clone()
            part = part_named(name)
            assert part is not None  # noqa: S101 -- ``specs`` has no other names
            if (first := self._half.pop(part.module, None)) is None:
                self._half[part.module] = part.side, tensor
                continue
            a_RI, b_OR = (tensor, first[1]) if part.side == "A" else (first[1], tensor)
            base_OI = self._base.of(part.module)
            self._staged[part.module] = merge_matrix(base_OI, a_RI, b_OR, self._adapter.scaling)

    def commit(self) -> None:
        """Overwrite the weights in place, so that references to the tensors stay valid."""
        self._base.write(self._staged)
        self._served = self._arrived
        self.rollback()

    def rollback(self) -> None:
        self._half, self._staged, self._arrived = {}, {}, {}

    def read_back(self, base: "BaseWeights") -> ReadBack:
        """Return the adapters, and each served matrix that differs from its base plus adapter."""
        assert self._adapter is not None  # noqa: S101 -- this target is made for such manifests
        found = list[TensorDifference]()
        for name, a_RI in self._served.items():
            part = part_named(name)
            if part is None or part.side != "A":
                continue
            b_OR = self._served[AdapterPart(part.module, "B").file_name]
            want_OI = merge_matrix(base.of(part.module), a_RI, b_OR, self._adapter.scaling)
            served_OI = base.served(part.module)
            difference = tensor_difference(f"{part.module}.weight", want_OI, served_OI)
            found += [] if difference is None else [difference]
        return ReadBack(self._served, tuple(found))


def check_base(epoch: int, base: AdapterBase, manifest: Manifest) -> None:
    """Check that adapters were trained on the model that an engine has loaded.

    Raises:
        TransferRefused: They were not.
    """
    adapter = manifest.adapter
    if adapter is not None and adapter.base != base.digest:
        raise TransferRefused(
            epoch,
            "base of the adapters, by the digest of its files,",
            adapter.base,
            f"{base.digest} as this engine loaded it. Let trainer and engines read the same files",
        )


def _list_expected(base: AdapterBase, manifest: Manifest) -> TensorSpecs:
    """Return both matrices of every adapter of a module in the base, in the required shapes."""
    assert manifest.adapter is not None  # noqa: S101 -- this target is made for such manifests
    rank, specs = manifest.adapter.rank, dict[str, tuple[tuple[int, ...], str]]()
    parts = [part_named(each.name) for each in manifest.tensors]
    for module in dict.fromkeys(each.module for each in parts if each is not None):
        found = base.matrix(module)
        if found is not None and len(found[0]) == len("OI"):
            (outputs, inputs), dtype = found
            specs[AdapterPart(module, "A").file_name] = (rank, inputs), dtype
            specs[AdapterPart(module, "B").file_name] = (outputs, rank), dtype
    return specs
