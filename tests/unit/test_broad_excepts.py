"""Handlers that catch whatever is raised: each is in one table, with its reason, and there is no other."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "offbeat"
BROAD = {"Exception", "BaseException", "ExceptionGroup", "BaseExceptionGroup"}

RAISED_AGAIN: Final = (
    "cleans up, records or reports it, and raises it again, or a typed error from it"
)
"""The handler ends in ``raise``, which is checked."""

PASSED_ON: Final = "hands the error to the caller who awaits the result, and who raises it"
USER_CODE: Final = (
    "user code may raise anything: the caller gets a typed error, a finding or an answer"
)
MODEL_CLASS: Final = (
    "a model class may refuse a config, a mask or a cache in its own way: then it is not proven"
)
OTHER_RANKS: Final = "the other ranks must learn of it in the same collective; raised after that"
SURVIVED: Final = "what is closed or written here must not end the run: logged and counted"
REPAIRED: Final = "repairs the failures that are listed by class, and raises any other"
REPEATED: Final = "the one who waits evaluates the predicate again, and raises there"
FILE_OF_A_USER: Final = (
    "tokenizers raises Exception itself for a file that is no tokenizer: passed over"
)
LAST_WORD: Final = (
    "the outcome of a whole process or thread: kept as its error, for the one who judges it"
)

REASONS: Final[dict[str, tuple[str, ...]]] = {
    RAISED_AGAIN: (
        "trainers/rank.py TrainerRank._classified",
        "trainers/rank.py TrainerRank._together",
        "trainers/ranks/world_entry.py WorldEntry.join",
        "actors/controller_actor.py ControllerActor.run",
        "controller/controller.py Controller._recorded",
        "controller/controller.py Controller.run",
        "controller/journal/files.py Segments._sync",
        "controller/journal/files.py Segments.begin",
        "controller/pending_waits.py PendingWaits.call",
        "plugins/agents/endpoint/agent_groups.py AgentGroups._rewards",
        "plugins/agents/endpoint/server.py _Entry.open_request",
        "plugins/agents/endpoint/server.py _answer",
        "plugins/agents/endpoint/session.py SampleSession._generated",
        "doors.py _load_entry_point",
        "testing/trackers.py _called",
        "environments/exits.py exits_as_errors",  # Exception, which passes as it is
        "environments/exits.py exits_as_errors",
        "environments/killable.py Child.begin",
        "environments/killable.py RewardPool.call",
        "environments/killable.py RewardPool.start",
        "plugins/images/processors.py load_processor",  # the files of a model's processor
        "environments/weighted_rewards.py WeightedRewards.score",
        "config/by_value.py give",  # a class of the user that cannot be pickled
        "config/user_code.py _load",
        "generators/module_server.py ModuleEngineServer._commit",
        "generators/module_server.py ModuleEngineServer._commit",
        "plugins/vllm/calls.py Calls.however_long",
        "plugins/vllm/transfer_engine.py ShmTransferEngine._do_beside",
        "plugins/vllm/transfer_engine.py ShmTransferEngine._load",
        "plugins/vllm/weights.py WeightUpdates._fetch",
        "plugins/vllm/weights.py WeightUpdates._update",
        "launch/cluster.py start_ray",
        "launch/session.py _start_meanwhile",
        "local/hosted.py raise_bugs_as_failures",
        "local/run.py LocalController._run",
        "rollouts/calls.py environment_code",
        "rollouts/samples.py SampleDraws.draw_all",
        "rollouts/worker.py EnvironmentWorker.roll_out",
        "sampler/checked_sampler.py CheckedSampler._call",
        "sampler/custom.py load_custom",
        "algorithms/custom_advantage.py CustomFormula.__call__",
        "algorithms/custom_loss.py CustomLoss.values",
        "plugins/wandb/sink.py WandbSink.write",
        "trainers/checkpoints/rank_store.py RankCheckpoints._run",
        "plugins/megatron/split_step.py MegatronTrainer._no_message_unread",
        "trainers/backend.py TrainerBackend._undone_if_raised",
        "trainers/ranks/process_group.py join",
        "trainers/torch/sharded_state.py _Reader.read_metadata",
        "trainers/torch/sharding.py settled",
        "plugins/reshard/group.py opened",
    ),
    PASSED_ON: (
        "launch/run.py LiveRun._outlive_program",
        "launch/run.py LiveRun._run",
        "actors/call_batching.py CallBatcher._carry",
        "actors/call_batching.py ReplyBatcher._answer",
        "plugins/agents/endpoint/server.py AgentEndpoint._answer_or_refusal",  # as status 500; the sample fails with it
        "generators/engine_loop.py EngineLoop._execute",
        "weight_sync/background.py start_in_thread",
        "launch/bounded_call.py StartedCall.run",
        "launch/driver.py _RayRuntime.start",
        "plugins/reshard/receiver.py _Transfer._work",
    ),
    USER_CODE: (
        "config/value_digest.py _Walk.other_parts",  # a class that cannot be pickled is named
        "environments/child_setup.py _function_of",  # modules that a function needs
        "config/user_code.py describe",  # the message of an error class of the user's
        "rollouts/response_text.py decode_for_reader",  # a tokenizer may be code of the model
        "plugins/agents/episode_serving.py serve_episodes",
        "plugins/images/decoding.py decoded",  # a picture, whose bytes are theirs too
        "environments/reward_child.py _answer_at_once",
        "environments/reward_child.py _answer_in_turn",
        "plugins/task_libraries/verifiers_tasks.py main",
        "plugins/images/prompt_check.py check_processor",  # the files of a model's processor
        "plugins/images/prompt_check.py _encoded",  # these, and a chat template
        "launch/checks/prompt_lengths.py _longest",  # a chat template
    ),
    MODEL_CLASS: (
        "generators/embedded/proof.py _exact_attention",
        "plugins/vllm/worker_fetch.py WorkerFetch.record",
        "models/tiny_model.py _has_shapes",
        "models/tiny_model.py tiny_model",  # the shapes of the model
        "models/tiny_model.py tiny_model",  # a cut of its config
        "trainers/torch/proof.py _compare",
    ),
    FILE_OF_A_USER: ("runs/logged_samples.py token_text",),
    OTHER_RANKS: (
        "trainers/checkpoints/rank_store.py RankCheckpoints._carry_out",
        "trainers/ranks/peers.py run_and_reduce_max",
        "trainers/torch/split_step.py TorchTrainer._prepared_on_all_ranks",
    ),
    SURVIVED: (
        "controller/controller.py Controller._close_one",
        "doors.py _load",
        "plugins/simulation/loop.py _dispose",  # what a killed process was about to do
        "telemetry/spool.py SinkWriter._close",
        "trainers/backend.py logged_failure",
        "telemetry/spool.py SinkWriter._persist",
        "plugins/wandb/sink.py WandbSink._abandon",
        "plugins/wandb/sink.py WandbSink.close",
    ),
    REPAIRED: (
        "controller/training.py TrainPump._step",
        "environments/async_calls.py AsyncCalls._tried",
    ),
    REPEATED: ("controller/signal.py Signal._look",),
    LAST_WORD: (
        "local/threads.py WorkThread.submit",
        "plugins/simulation/cluster.py Cluster._live",
        "plugins/reshard/server.py ReshardServer._stream",
        "plugins/reshard/server.py ReshardServer._work",
    ),
}


def is_broad(types: ast.expr | None) -> bool:
    if types is None:  # a bare except
        return True
    return any(isinstance(each, ast.Name) and each.id in BROAD for each in ast.walk(types))


def broad_handlers(
    node: ast.AST, scope: tuple[str, ...] = (), *, in_function: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the scope of each broad handler below ``node``, and whether the handler ends in raise.

    The scope is a function of the module or a method; functions inside of it belong to it.
    """
    for child in ast.iter_child_nodes(node):
        inner, is_function = scope, isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = scope if in_function else (*scope, child.name)
        elif isinstance(child, ast.ExceptHandler) and is_broad(child.type):
            yield ".".join(scope), isinstance(child.body[-1], ast.Raise)
        elif (
            isinstance(child, ast.Call)
            and ast.unparse(child.func).split(".")[-1] == "suppress"
            and any(is_broad(each) for each in child.args)
        ):
            yield ".".join(scope), False
        yield from broad_handlers(child, inner, in_function=in_function or is_function)


@pytest.fixture(scope="module")
def found() -> list[tuple[str, bool]]:
    """File and scope of each broad handler of the package, and whether it ends in raise."""
    return [
        (f"{path.relative_to(PACKAGE)} {scope}", raises)
        for path in sorted(PACKAGE.rglob("*.py"))
        for scope, raises in broad_handlers(ast.parse(path.read_text()))
    ]


def test_every_broad_handler_is_in_the_table_with_its_reason_and_the_table_has_no_other(
    found: list[tuple[str, bool]],
) -> None:
    here = Counter(symbol for symbol, _ in found)
    listed = Counter(symbol for symbols in REASONS.values() for symbol in symbols)
    assert sorted((here - listed).elements()) == [], "name the classes that are caught"
    assert sorted((listed - here).elements()) == [], "these are gone: take them out of the table"


def test_what_is_said_to_be_raised_again_is(found: list[tuple[str, bool]]) -> None:
    silent = {symbol for symbol, raises in found if not raises}
    assert silent & {*REASONS[RAISED_AGAIN]} == set()


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("def f():\n try: g()\n except Exception: pass", [("f", False)]),
        ("class A:\n def f(self):\n  try: g()\n  except: raise", [("A.f", True)]),
        ("def f():\n def h():\n  try: g()\n  except Exception: pass", [("f", False)]),
        ("try: g()\nexcept (OSError, BaseException) as e: raise X from e", [("", True)]),
        ("with contextlib.suppress(ValueError, Exception): g()", [("", False)]),
        ("try: g()\nexcept (OSError, ValueError): pass", []),
    ],
)
def test_the_rule_about_broad_handlers_knows_one(source: str, want: list[tuple[str, bool]]) -> None:
    assert list(broad_handlers(ast.parse(source))) == want
