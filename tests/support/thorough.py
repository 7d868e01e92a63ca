"""Which tests `make test` leaves to `make test-thorough`, which CI runs as well: the ones that take longest and have a
quicker member of the same family beside them, or are a whole program or suite in themselves.

An entry is `file::function`, or `file::function[id]` for one of its cases. conftest.py gives them the marker
`thorough`, and stops where an entry names a test that is not there. Seconds were measured on one core of a Xeon. CI
runs what is here, too: the rest of a matrix whose every kind runs in CI is marked `slow` instead.
"""

THOROUGH = (
    # all of the conformance class in interpret mode, and planted bugs in it: 60 to 130 s each; a mesh of two axes stays
    "tpu/test_tpu_interpret.py::test_conformance_on_eight_ranks",
    "tpu/test_tpu_interpret.py::test_conformance_in_interpret_mode",
    "tpu/test_tpu_interpret.py::test_ranks_that_are_out",
    "tpu/test_tpu_interpret.py::test_more_rows_than_one_wait_covers",
    "tpu/test_tpu_planted_bugs.py::test_planted_bug_is_noticed",
    "tpu/test_tpu_planted_bugs.py::test_nothing_is_noticed_without_a_bug",
    # whole programs compiled for a TPU: 20 to 30 s each; the one for v4 stays
    "tpu/test_tpu_aot.py::test_full_size_program[v5e-decode-int8]",
    "tpu/test_tpu_aot.py::test_large_topology[v5e]",
    "tpu/test_tpu_aot.py::test_full_size_program[v5p-fp8]",
    "tpu/test_tpu_aot.py::test_full_size_program[v6e-bf16]",
    "tpu/test_tpu_aot.py::test_full_size_program[tpu7x-decode]",
    "tpu/test_tpu_aot.py::test_halves_on_a_large_topology",
    "tpu/test_tpu_layer.py::test_a_layer_needs_less_memory_than_the_peer",
    "tpu/test_tpu_layer.py::test_the_peer_computes_the_same_layer",
    # the kernels on host threads: 14 to 43 s each; the other scenarios stay
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[graphs-2-2-64-15]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[concurrent-2-2-64-2]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[generations-2-2-64-0]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[company-2-2-8-0]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[members-3-3-1-0]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[random-2-2-64-1500]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[random-4-2-64-300]",
    "gpu/native/emulator/test_kernels_emulated.py::test_scenario[normal-3-3-1-0]",
    "gpu/test_gpu_bodies_on_cpu.py::test_stress",
    "gpu/test_gpu_bodies_on_cpu.py::test_random_calls_agree_and_a_wrong_one_is_found",
    # whole commands and pages; the first page, the first example and the demo's short run stay
    "test_benchmark.py::test_low_latency_and_sweep_modes",
    "test_documents.py::test_blocks_of_a_document_run_in_order[docs/api.md]",
    "test_benchmark.py::test_overlap_mode_end_to_end",
    "flax/test_layer_benchmark.py::test_a_stack_of_layers",
    "flax/test_layer_benchmark.py::test_the_training_benchmark",
    "test_documents.py::test_blocks_of_a_document_run_in_order[docs/benchmarks.md]",
    "test_documents.py::test_blocks_of_a_document_run_in_order[docs/flax.md]",
    "test_documents.py::test_blocks_of_a_document_run_in_order[docs/memory.md]",
    "test_documents.py::test_blocks_of_a_document_run_in_order[docs/migrating.md]",
    "test_documents.py::test_the_tutorial_runs_and_holds_the_output_of_a_run",
    "test_examples.py::test_example[dual_batch]",
    "test_examples.py::test_example[infer_linen_padded]",
    "test_examples.py::test_example[fp8_gradient]",
    "test_examples.py::test_example[decode_hugging_face]",
    "test_demo.py::test_the_expert_parallel_model_equals_the_dense_one",
    "test_jax_best.py::test_the_command_end_to_end[2]",
    "test_profiles.py::test_autotune_measures_saves_and_loads",
    "flax/test_grouped_matmul.py::test_the_benchmark_checks_and_times",
    "flax/test_layer_benchmark.py::test_the_nnx_layer_as_a_user_writes_it",
    # further meshes, axis types and variants of the Flax layers: 4 to 10 s each
    "flax/test_arguments.py::test_a_router_that_went_wrong_shows_in_the_metrics[dp x ep]",
    "flax/test_chunks.py::test_memory_of_the_compiled_program_shrinks",
    "flax/test_chunks.py::test_same_results_in_chunks_padded_with_biases",
    "flax/test_chunks.py::test_same_results_in_chunks[experts]",
    "flax/test_forward.py::test_explicit_axes_give_the_output_the_sharding_of_x",
    "flax/test_forward.py::test_equals_dense[uneven-dp x ep]",
    "flax/test_forward.py::test_equals_dense[uneven-explicit]",
    "flax/test_forward.py::test_equals_dense[softmax-dp x ep]",
    "flax/test_forward.py::test_equals_dense[fewer experts than ranks-dp x ep]",
    "flax/test_forward.py::test_equals_dense[DeepSeek-V3-explicit]",
    "flax/test_forward.py::test_meshes[sizes0-names0-changes0]",
    "flax/test_forward.py::test_scan_and_remat",
    "flax/test_forward.py::test_token_counts_that_the_mesh_does_not_divide[shape0-Auto]",
    "flax/test_forward.py::test_token_counts_that_the_mesh_does_not_divide[shape3-Auto]",
    "flax/test_forward.py::test_quantised_wire[int8]",
    "flax/test_front_ends.py::test_linen_bias_moves_only_when_mutable",
    "flax/test_front_ends.py::test_checkpoint_restores_on_another_mesh",
    "flax/test_front_ends.py::test_shardings[Auto]",
    "flax/test_gradients.py::test_left_out_tokens_have_no_part_in_any_gradient",
    "flax/test_gradients.py::test_equal_dense[padded, uneven]",
    "flax/test_grouped_matmul.py::test_a_function_takes_the_place_of_ragged_dot",
    "flax/test_maxtext_branch.py::test_outputs_and_gradients_agree",
    "flax/test_mesh_of_inputs.py::test_mesh_from_the_types[jitted-Auto]",
    "flax/test_scan.py::test_nnx_vmap_and_scan",
    "flax/test_scan.py::test_linen_scan[gpt-oss, tensor axis-Auto]",
    "flax/test_scan.py::test_linen_scan[gpt-oss, tensor axis-Explicit]",
    "flax/test_variants.py::test_expert_width_over_a_tensor_axis[padded, explicit]",
    "flax/test_variants.py::test_tokens_replicated_over_the_expert_axis[padded, uneven, shared]",
    "flax/test_variants.py::test_activations_and_biases[gpt-oss, uneven and aligned]",
    "flax/test_variants.py::test_activations_and_biases[geglu]",
    # further directions of vmap: 2 to 3 s each
    "test_drop_ins_jax_suite.py::test_batching_all_to_all_over_two_axes[1]",
    "test_drop_ins_jax_suite.py::test_batching_all_to_all_over_two_axes[2]",
    "test_drop_ins_jax_suite.py::test_ragged_under_vmap_of_shard_map[0-0-groups]",
    "test_drop_ins_jax_suite.py::test_ragged_under_vmap_of_shard_map[0-1-all]",
    "test_drop_ins_jax_suite.py::test_ragged_under_vmap_of_shard_map[1-0-groups]",
    "test_drop_ins_jax_suite.py::test_ragged_under_vmap_of_shard_map[1-1-all]",
    # derivatives of the other layouts
    "test_derivatives.py::test_second_derivatives[ranked]",
    "test_derivatives.py::test_second_derivatives[padded]",
    "test_derivatives.py::test_forward_mode_and_linearize[padded]",
    "test_derivatives.py::test_a_policy_by_name_saves_the_dispatch[handle saved-halves]",
    "test_derivatives.py::test_a_policy_by_name_saves_the_dispatch[nothing saved-halves]",
    "test_derivatives.py::test_a_policy_by_name_saves_the_dispatch[handle saved-whole]",
    "reference/test_modes.py::test_global_modes_do_not_change_the_result[disable_jit]",
)


def is_thorough(node_id: str) -> bool:
    """Whether a test, by pytest's name for it, is in the table."""
    name = node_id.removeprefix("tests/")
    return name in THOROUGH or name.split("[", 1)[0] in THOROUGH


def not_there(node_ids: list[str]) -> list[str]:
    """Entries of files that were collected, and that none of the tests in `node_ids` is."""
    names = {node_id.removeprefix("tests/") for node_id in node_ids}
    known = names | {name.split("[", 1)[0] for name in names}
    files = {name.split("::", 1)[0] for name in names}
    return [entry for entry in THOROUGH if entry.split("::", 1)[0] in files and entry not in known]
