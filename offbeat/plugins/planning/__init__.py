"""Plans and measurements of settings before they are used, without Ray.

run_plan      what other settings would do to a run (``offbeat plan``): ``measured_run`` reads its
              times, ``prediction`` drives the production controller with them on ``virtual_ports``
sync_plan     what a weight sync would move (``offbeat plan-sync``): ``grid_text``, ``model_tensors``
sweep         what a trainer costs, measured (``offbeat sweep``): ``sweep_points``, ``sweep_task``,
              ``sweep_rank`` and the groups of ``fabricated``
"""
