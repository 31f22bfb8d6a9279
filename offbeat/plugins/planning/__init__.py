"""Plans and measurements of settings before their use, without Ray.

run_plan      predicts a run with different settings (``offbeat plan``): ``measure_run`` reads its
              times, ``prediction`` drives the production controller with them on ``virtual_ports``
sync_plan     counts the bytes of a weight sync (``offbeat plan-sync``): ``grid_text``,
              ``model_tensors``
sweep         measures the cost of a trainer (``offbeat sweep``): ``sweep_points``, ``sweep_task``,
              ``sweep_rank`` and the groups of ``fabricated``
"""
