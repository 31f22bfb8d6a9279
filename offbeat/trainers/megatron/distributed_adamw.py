"""The library's distributed optimizers, made from groups of parameters that need no collective.

The library's own ``get_megatron_optimizer`` gathers the groups from all ranks of the world, as pickles.
Encoder ranks take no part in it, and a peer's pickle may run any code. The groups here follow from the
model's config, so all ranks of the layout have the same ones, and some of them may be empty.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# megatron-core has no types, and annotates None away where it allows it.

from typing import Any, Final

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as LibraryConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from offbeat.trainers.megatron.groups import layout_group, tensor_group

_DENSE: Final = ("buffers", "intra_dp_cp_group", "mp_group")
_EXPERTS: Final = ("expert_parallel_buffers", "intra_expt_dp_group", "expt_tp_pp_group")
"""The attribute with the gradients' buffers; process groups of the replicas and of a model's parts."""


def distributed_adamw(ddp: DistributedDataParallel, config: LibraryConfig) -> ChainedOptimizer:
    """Return the optimizer of the dense layers, chained with that of the experts if there are any.

    Only ranks of the layout call it.
    """
    has_experts = ddp.config.num_moe_experts is not None
    kinds = (_DENSE, _EXPERTS) if has_experts else (_DENSE,)
    return ChainedOptimizer([_of_kind(ddp, config, *kind) for kind in kinds])


def _of_kind(
    ddp: DistributedDataParallel, config: LibraryConfig, buffers: str, replicas: str, parts: str
) -> DistributedOptimizer:
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        None, [ddp], use_gloo_process_groups=False
    )
    adamw = torch.optim.AdamW(
        _parameter_groups(ddp, of_experts=buffers == _EXPERTS[0]),
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    made = DistributedOptimizer(
        adamw,
        config,
        grad_scaler=None,
        init_state_fn=_no_state,
        model_chunks=[ddp],
        per_model_buffers={0: getattr(ddp, buffers)},
        data_parallel_group=groups[replicas],
        data_parallel_group_gloo=None,
        data_parallel_group_idx=groups[parts].rank(),
        distributed_optimizer_instance_id=0,
    )
    # The constructor takes neither: the library's own function sets them on what it made, too.
    made.grad_stats_parallel_group = layout_group()
    made.tp_group = tensor_group()
    return made


def _parameter_groups(ddp: DistributedDataParallel, *, of_experts: bool) -> list[dict[str, Any]]:
    """Return matrices, which decay, and vectors, which do not."""
    groups: list[dict[str, Any]] = [{"params": [], "wd_mult": each} for each in (1.0, 0.0)]
    for each in ddp.module.parameters():
        if each.requires_grad and _is_of_experts(each) == of_experts:
            groups[each.ndim <= 1]["params"].append(each)
    return groups


def _is_of_experts(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has its gradient summed over the ranks with the same experts."""
    return not getattr(parameter, "allreduce", True)


def _no_state(*_: object) -> None:
    """Leave the moments to AdamW, which makes them at its first step."""
