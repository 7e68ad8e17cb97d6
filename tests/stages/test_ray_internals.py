"""The contract with Ray: what `stages/ray_internals.py` uses of it is still there."""

from __future__ import annotations

import importlib

import pytest
from helpers.contract import folder_of, imported, moved, version_of

PACKAGE = folder_of("prefect_raybatch")
RAY = version_of("ray")
EXECUTION = "data/_internal/execution"
CONTRACT = {
    # One block a shard.
    f"{EXECUTION}/operators/map_operator.py": {
        "MapOperator": ["get_map_transformer", "_additional_split_factor"],
    },
    f"{EXECUTION}/operators/map_transformer.py": {
        "MapTransformer": ["get_transform_fns"],
        "MapTransformFn": ["_output_block_size_option"],
        "BatchMapTransformFn": ["_batch_size"],
        "BlockMapTransformFn": [],
    },
    "data/_internal/output_buffer.py": {"OutputBlockSizeOption": ["of(disable_block_shaping)"]},
    "data/_internal/logical/operators/read_operator.py": {"Read": ["datasource"]},
    "data/_internal/logical/interfaces/optimizer.py": {
        "Rule": ["apply(plan)", "dependencies", "dependents"],
    },
    "data/_internal/logical/interfaces/physical_plan.py": {"PhysicalPlan": ["dag", "op_map"]},
    "data/_internal/logical/ruleset.py": {"Ruleset": ["add(rule)", "__iter__"]},
    "data/dataset.py": {
        "Dataset": [
            "map_batches_internal(fn, fn_constructor_args, compute, batch_size, batch_format, "
            "zero_copy_batch, num_cpus, num_gpus)",
            "get_dataset_id",
        ],
    },
    # How far engines may run ahead.
    f"{EXECUTION}/backpressure_policy/backpressure_policy.py": {
        "BackpressurePolicy": ["can_add_input(op)", "_topology", "_data_context"],
    },
    f"{EXECUTION}/interfaces/physical_operator.py": {
        "PhysicalOperator": [
            "num_active_tasks",
            "input_dependencies",
            "output_dependencies",
            "get_active_tasks",
            "_cancel_active_tasks(force)",
        ],
        "OpTask": ["get_waitable"],
    },
    f"{EXECUTION}/operators/base_physical_operator.py": {
        "InternalQueueOperatorMixin": ["internal_input_queue_num_blocks"],
    },
    f"{EXECUTION}/streaming_executor_state.py": {
        "OpState": ["total_enqueued_output_blocks"],
        "": ["logger"],
    },
    # Nodes that leave, and engines that are dead.
    f"{EXECUTION}/operators/actor_pool_map_operator.py": {
        "ActorPoolMapOperator": ["_actor_pool", "_ray_remote_args_fn"],
        "_ActorPool": ["_running_actors", "_release_running_actor(actor)"],
        "_ActorState": ["num_tasks_in_flight", "actor_location"],
    },
    "data/_internal/actor_autoscaler/autoscaling_actor_pool.py": {
        "AutoscalingActorPool": ["max_size", "current_size"],
    },
    f"{EXECUTION}/interfaces/op_runtime_metrics.py": {
        "OpRuntimeMetrics": ["num_tasks_finished", "num_tasks_failed"],
    },
    "actor.py": {"ActorHandle": ["_get_local_state"]},
    # Ends that come early.
    f"{EXECUTION}/operators/task_pool_map_operator.py": {"TaskPoolMapOperator": []},
    "_private/object_ref_generator.py": {"ObjectRefGenerator": ["completed"]},
    "data/context.py": {"DataContext": ["set_config(key, value)", "get_config(key, default)"]},
    f"{EXECUTION}/streaming_executor.py": {"StreamingExecutor": ["shutdown(force)"]},
    "data/_internal/progress/__init__.py": {"": ["logger"]},
    # How far the engines' starts have come.
    "experimental/internal_kv.py": {
        "": [
            "_internal_kv_put(key, value, overwrite, namespace)",
            "_internal_kv_get(key, namespace)",
            "_internal_kv_list(prefix, namespace)",
            "_internal_kv_del(key, del_by_prefix, namespace)",
        ],
    },
    # The cluster.
    "_private/worker.py": {
        "": ["get_dashboard_url", "_global_node", "print_to_stdstream(data, ignore_prefix)"],
    },
    "_private/node.py": {"Node": ["raylet_socket_name"]},
    "_private/state.py": {"": ["actors(actor_id, job_id)"]},
    "_private/services.py": {"": ["canonicalize_bootstrap_address(addr)"]},
    "_private/authentication/authentication_token_setup.py": {"": ["AUTH_MODE_ENV_VAR"]},
    # Bounded requests to the job server (remote/client.py).
    "dashboard/modules/dashboard_sdk.py": {
        "SubmissionClient": ["_do_request(method, endpoint)"],
    },
}


@pytest.mark.parametrize("file", CONTRACT)
def test_ray_still_has_what_we_use(file):
    lines = moved(folder_of("ray"), {file: CONTRACT[file]}, RAY)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("module", "name"), imported(PACKAGE / "stages/ray_internals.py", "ray"), ids=".".join
)
def test_ray_still_has_what_we_import(module, name):
    try:
        there = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{RAY} has no module {module} any more: {error}")
    if not hasattr(there, name):
        try:
            importlib.import_module(f"{module}.{name}")
        except ImportError:
            pytest.fail(f"{RAY}: {module}.{name} is not there any more")


def test_a_pass_is_found_by_the_name_of_its_thread():
    source = folder_of("ray") / EXECUTION / "streaming_executor.py"
    assert 'f"StreamingExecutor-{self._dataset_id}"' in source.read_text(encoding="utf-8"), RAY


def test_deaths_that_ray_would_print_are_logged(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from ray._private import worker

    from prefect_raybatch.stages.ray_internals import log_deaths

    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, more: print(data["lines"]))
    log_deaths()
    log_deaths()
    with caplog.at_level("INFO", "prefect_raybatch"):
        worker.print_to_stdstream({"pid": "raylet", "lines": ["a worker died"]}, False)
        worker.print_to_stdstream({"pid": 12, "lines": ["of a task"]}, False)
    assert capsys.readouterr().out == "['of a task']\n"
    assert [record.getMessage() for record in caplog.records] == ["Ray: a worker died"]


def test_what_has_moved_is_named(tmp_path):
    (tmp_path / "there.py").write_text("class A:\n    def f(self, x): self.y = 1\n")
    contract = {
        "there.py": {"A": ["f(x)", "y", "f(z)", "g"], "B": [], "": ["A", "C"]},
        "gone.py": {"": ["h"]},
    }
    at = f"pack 1: {tmp_path.name}/there.py"
    assert moved(tmp_path, contract, "pack 1") == [
        f"{at}: A.f takes no z any more",
        f"{at}: A.g is not there any more",
        f"{at} has no class B any more",
        f"{at}: C is not there any more",
        f"pack 1 has no file {tmp_path.name}/gone.py any more",
    ]


def test_no_other_file_names_rays_internals():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "ray_internals.py":
            text = path.read_text(encoding="utf-8")
            for name in ("ray._private", "ray._raylet", "ray.data._internal", "ray.llm._internal"):
                assert name not in text, f"{path}: {name} belongs into stages/ray_internals.py"
