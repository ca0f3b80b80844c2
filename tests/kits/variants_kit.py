"""Of which tests the README's command tries only some variants: all of them together take too long for it.

The others are tried with `--full`, as what has the mark `full` is. Variants count as pytest lists them.
"""

from __future__ import annotations

_BY_FILE = {
    "benchmarks/test_adaptive.py": {
        "test_it_is_near_the_best_static_setting_in_hindsight": 3,
    },
    "dataflow/outputs/test_image_lists.py": {
        "test_a_batch_is_the_images_of_the_plain_loop": 3,
    },
    "dataflow/sources/test_missing.py": {
        "test_absent_members_are_what_was_declared": 3,
        "test_what_is_filtered_out_raises_nothing": 3,
    },
    "dataflow/datasets/test_nested_loader.py": {
        "test_torch_loads_the_same_samples": 3,
    },
    "dataflow/grad/test_controller.py": {
        "test_a_network_that_changes_is_followed": 3,
        "test_where_nothing_changes_it_ends_with_the_best_mode_after_one_change_at_most": 3,
    },
    "dataflow/grad/test_controller_ranks.py": {
        "test_ranks_that_measure_different_things_decide_the_same": 2,
    },
    "dataflow/grad/test_grad_faults.py": {
        "test_a_rank_that_hangs_while_it_computes_is_named_within_the_deadline": 3,
        "test_the_others_name_a_rank_that_died": 2,
    },
    "dataflow/grad/test_grad_matrix.py": {
        "test_windows_equal_large_batches": 2,
    },
    "dataflow/grad/test_grad_strategies.py": {
        "test_replicas_are_equal_at_the_end": 3,
    },
    "dataflow/grad/test_strategies.py": {
        "test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit": 3,
    },
    "dataflow/grad/test_strategies_bytes.py": {
        "test_what_a_strategy_says_is_what_the_sockets_sent": 2,
    },
    "dataflow/mixture/test_batched_weights.py": {
        "test_global_batches_are_the_same_for_any_number_of_ranks": 3,
        "test_weights_set_at_the_last_batch_of_an_epoch_are_in_its_state": 2,
    },
    "dataflow/lengths/test_measured_lengths.py": {
        "test_a_grad_schedule_steps_and_goes_on_over_all_tails": 3,
        "test_a_state_goes_on_with_another_number_of_ranks": 3,
        "test_a_state_resumes_after_any_batch": 3,
        "test_all_tails_leave_out_or_fill_up_the_last_batch": 3,
        "test_once_all_lengths_were_found_later_loaders_know_them": 3,
    },
    "dataflow/lengths/test_measured_mixture.py": {
        "test_every_number_of_ranks_delivers_the_same_global_batches": 3,
    },
    "dataflow/stream/test_lifetimes.py": {
        "test_the_interpreter_ends_cleanly_with_an_open_loader": 3,
    },
    "dataflow/stream/test_loader_exactness.py": {
        "test_ranks_together_deliver_every_sample_of_every_format": 3,
    },
    "dataflow/lengths/test_loader_lengths.py": {
        "test_all_worlds_deliver_one_sequence_of_units": 3,
        "test_batches_hold_what_the_plan_says_element_by_element": 3,
        "test_megabatches_that_grow_hold_what_the_plan_says_and_a_state_resumes_in_any": 3,
        "test_resumes_at_every_batch": 3,
    },
    "dataflow/stream/test_loader_state.py": {
        "test_resumes_at_every_position_under_every_shuffle": 2,
    },
    "dataflow/mixture/test_mixture_loader.py": {
        "test_delivers_what_positions_and_source_orders_say": 3,
        "test_global_batches_are_one_list_for_one_to_four_ranks": 3,
        "test_ranks_deliver_their_parts_under_every_tail": 3,
        "test_resumes_at_every_position": 3,
    },
    "dataflow/mixture/test_mixture_weights.py": {
        "test_weights_set_at_the_last_batch_of_an_epoch_are_in_its_state": 3,
    },
    "dataflow/lengths/test_packed_mixture.py": {
        "test_a_run_goes_on_with_other_ranks": 3,
        "test_all_worlds_deliver_one_sequence_of_units": 3,
        "test_batches_hold_what_the_plan_says_element_by_element": 3,
        "test_resumes_anywhere_in_a_later_epoch": 3,
    },
    "dataflow/stream/test_repeats.py": {
        "test_repeats_of_weight_zero_give_exactly_the_gradient_of_the_epoch": 3,
    },
    "dataflow/testing/test_testing.py": {
        "test_ranks_end_with_a_caller_that_is_stopped": 4,
    },
    "dataflow/workers/test_dropin.py": {
        "test_batches_are_those_of_torch": 3,
        "test_draws_of_an_epoch_go_on_with_any_number_of_worker_processes": 3,
        "test_iterables_resume_with_another_number_of_workers": 3,
        "test_iterables_take_turns_as_with_torch": 3,
        "test_random_values_in_workers_are_those_of_torch": 2,
        "test_states_taken_every_few_batches_resume_as_exactly": 3,
    },
    "dataflow/workers/test_thread_workers.py": {
        "test_resumes_at_every_position": 3,
        "test_worker_processes_give_the_same_batches": 2,
    },
    "dataflow/workers/test_worker_failures.py": {
        "test_a_worker_that_dies_is_named_with_the_reason": 4,
    },
    "dataflow/workers/test_worker_lifetimes.py": {
        "test_a_copy_of_a_loader_has_loops_of_its_own": 3,
        "test_a_program_may_end_at_any_moment": 4,
        "test_a_program_with_a_fork_server_may_end_at_any_moment": 4,
        "test_many_loops_leave_nothing_behind": 3,
        "test_processes_forked_in_the_middle_of_a_loop_do_it_no_harm": 3,
    },
    "dataflow/workers/test_worker_starts.py": {
        "test_a_large_dataset_lies_in_memory_once_for_all_workers": 3,
        "test_a_script_needs_no_guard_and_its_classes_come_back_as_they_are": 3,
    },
    "dataflow/workers/test_worker_stats.py": {
        "test_what_was_delivered_is_counted_over_all_loops": 3,
    },
    "ecosystem/test_ecosystem_samples.py": {
        "test_samplers_give_the_order_that_they_give_with_torch": 4,
        "test_tensors_in_shared_memory_are_the_same_memory_in_the_workers": 3,
    },
    "packaging/test_install.py": {
        "test_only_what_the_header_declares_is_exported_and_nothing_is_warned_of": 2,
    },
    "prefetch/core/test_core_driver.py": {
        "test_plans_are_run_as_by_plain_loops": 3,
    },
    "prefetch/store/test_servers.py": {
        "test_a_pattern_gives_the_same_samples_in_the_same_order_as_locally": 2,
        "test_a_server_that_is_killed_and_comes_back_costs_no_sample": 2,
    },
    "sharding/formats/test_arrow_columns.py": {
        "test_chunks_are_joined_whatever_the_type": 3,
    },
    "sharding/formats/test_bombs.py": {
        "test_too_many_different_keys_are_refused": 2,
    },
    "sharding/order/test_order.py": {
        "test_each_sample_lands_everywhere_equally_often_over_epochs": 3,
    },
    "sharding/test_byte_lists.py": {
        "test_every_type_of_list_is_what_pyarrow_says": 3,
    },
    "sharding/write/test_writer.py": {
        "test_an_exception_removes_the_shard_in_progress_and_keeps_the_finished": 3,
        "test_object_stores_get_whole_uploads_or_none": 3,
    },
}
ONE_IN = {f"{file}::{test}": number for file, tests in _BY_FILE.items() for test, number in tests.items()}
"""{file and test: one in how many variants}"""
