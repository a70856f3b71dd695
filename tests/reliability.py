"""Writes docs/reliability.md from the tests it names: a pytest plugin, run by make reliability, which runs nothing else.

What a fault is and how it is injected stands here; how often it was tried and what came out is counted."""
import os
import platform
from collections import defaultdict
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[1] / 'docs/reliability.md'

# fault, how it is injected, what must happen, tests that do it
FAULTS = [
    ('stop and resume, every scheme', 'dropout, 2 micro-batches, evaluation and saving at other intervals after the stop',
     'every loss and weight the same bits as never stopped',
     'test_train.py::test_resume_is_never_having_stopped test_train.py::test_resume_with_other_intervals '
     'test_train.py::test_resume_with_muon'),
    ('SIGTERM or SIGINT in an update', 'sent by the process to itself', 'saved after that update, exit 75, resumed to the same bits',
     'test_train.py::test_signal_in_an_update'),
    ('SIGTERM before the first update, in an evaluation, in a save', 'sent right before the call',
     'what was done is saved, exit 75, resumed to the same bits',
     'test_train.py::test_signal_at_other_moments'),
    ('SIGTERM with every scheme and optimizer', 'in an update, an evaluation and a save of one run; then stopped cleanly',
     'resumed each time, to the same bits', 'test_train.py::test_signals_with_every_scheme_and_optimizer'),
    ('SIGTERM while compiling', 'a process with torch.compile, 1.5 s after its start',
     'saved before the first update, exit 75, resumed to the same bits',
     'test_train.py::test_signal_while_compiling_for_real'),
    ('SIGTERM or SIGINT at a moment nobody chose', 'a process as users start it',
     'saved after the update at hand, exit 75, resumed to the same bits',
     'test_train.py::test_signal_to_a_real_process'),
    ('a second signal', 'sent after the first', 'ends at once; the checkpoint before is whole',
     'test_train.py::test_second_signal_ends_at_once'),
    ('SIGKILL at random moments', 'every other one at a random fsync of a save', 'resumed from a whole checkpoint to the same bits',
     'test_train.py::test_sigkill_at_random_moments'),
    ('SIGKILL at each step of a save', 'at every fsync and rename', 'a whole checkpoint is found, the next save clears up',
     'test_checkpoint.py::test_killed_save'),
    ('disk full', 'an error of every fsync and rename; RLIMIT_FSIZE', 'a message with path and bytes; the checkpoint before is whole',
     'test_checkpoint.py::test_failed_save test_checkpoint.py::test_file_size_limit test_train.py::test_disk_full_names_the_file'),
    ('run folder read-only, a file, or removed', 'chmod; a file in its place; deleted while training', 'an error with the path',
     'test_train.py::test_read_only_folder test_train.py::test_folder_is_a_file test_train.py::test_folder_removed_while_training'),
    ('run folder made anew under a run, or unlocked', "deleted while training, then another run's; .lock deleted while training",
     'the first run ends and writes nothing more there',
     'test_train.py::test_folder_made_anew_while_training test_train.py::test_lock_removed_while_training'),
    ('one bit flipped in a checkpoint', 'any bit of any file', 'the file is named', 'test_checkpoint.py::test_any_flipped_bit'),
    ('a checkpoint file cut, emptied, lengthened, missing', 'each file in ten ways',
     'named; the step before is used with a warning, unless that one was asked for',
     'test_checkpoint.py::test_damaged_file test_checkpoint.py::test_disk_that_cannot_be_read '
     'test_train.py::test_damaged_newest_checkpoint'),
    ('a pickle in place of a file', "each file, also with matching digests; meta.pkl; nanoGPT's ckpt.pt", 'refused and not run',
     'test_checkpoint.py::test_pickle_with_matching_digests test_data.py::test_nanogpt_pickle_is_not_read '
     'test_huggingface.py::test_a_malicious_or_damaged_checkpoint_is_refused_and_not_run '
     'test_house.py::test_no_file_reads_or_writes_a_pickle_or_evaluates_text'),
    ('a checkpoint of a newer version or another model', 'edited manifest; other names and shapes; other settings',
     'refused with every difference; nothing half loaded',
     'test_checkpoint.py::test_newer_format test_checkpoint.py::test_weights_that_do_not_fit '
     'test_checkpoint.py::test_optimizer_state_that_does_not_fit test_train.py::test_another_model_is_refused '
     'test_train.py::test_change_of_course_needs_leave'),
    ('another machine, thread count, version or number format on resume', 'another setting; what the system says replaced',
     'recorded and warned about', 'test_train.py::test_other_environment_is_told test_train.py::test_other_machine_is_told'),
    ('two runs in one folder', 'started while the first trains; after its SIGKILL', 'refused at once; then free',
     'test_train.py::test_second_process_in_one_folder test_train.py::test_folder_trained_meanwhile'),
    ("another's files in the run folder", 'of the names that a run writes; left by a run with other settings',
     'refused, also by --init_from=auto; nothing is deleted', 'test_train.py::test_what_others_put_into_the_folder_stays '
     'test_train.py::test_auto_deletes_nothing_that_is_not_of_this_run test_monitor.py::test_range_test_deletes_no_run'),
    ('numbers that are not finite', 'nan and inf in a weight, a gradient, one micro-batch of four; in the weights before a save',
     'exit 65 before the update; the last good checkpoint stays',
     'test_train.py::test_not_finite_stops_before_the_update test_train.py::test_weights_that_are_not_finite_are_not_saved'),
    ('a loss that jumps', 'a learning rate 1,000 times too large for one update', 'trained on; counted and flagged in the comparison',
     'test_train.py::test_spike_is_no_crash test_compare.py::test_spikes_are_found_and_noise_is_not '
     'test_compare.py::test_a_spike_is_counted_flagged_and_kept'),
    ('the same seed, other intervals and logging', 'evaluation, saving, log interval, wandb', 'the same bits',
     'test_train.py::test_free_settings_do_not_touch_the_losses test_monitor.py::test_wandb_offline_for_real'),
    ('the same seed, three schemes', 'started side by side', 'every shared weight and every batch the same bits',
     'test_train.py::test_schemes_share_batches_and_weights'),
    ('data replaced before resuming', 'other text, same characters', 'refused by digest',
     'test_train.py::test_data_replaced_between_save_and_resume'),
    ('bad token files', 'empty, odd, cut, lengthened, changed, ids out of range, too short', 'refused before the model is built',
     'test_data.py::test_bad_data_is_refused test_data.py::test_lying_max_id_is_caught_in_the_batch test_data.py::test_file_cut_while_open '
     'test_data.py::test_large_files_are_told_apart_by_blocks '
     'test_data.py::test_too_short_for_a_row test_data.py::test_shortest_data_trains'),
    ('prepare.py killed', 'SIGKILL at random moments', 'train.py finds all of the data or none; run again, the same files',
     'test_prepare.py::test_killed_at_random_leaves_nothing_that_train_accepts test_prepare.py::test_killed_many_times_is_the_same'),
    ('prepare.py: bad sources', 'damaged, cut and foreign files, an error page for parquet, a full disk, twice at once',
     'one clear line; no data appears, and what was there stays',
     'test_prepare.py::test_bad_file_is_one_line test_prepare.py::test_bad_parquet test_prepare.py::test_full_disk_leaves_the_old_data '
     'test_prepare.py::test_two_at_once test_prepare.py::test_dead_worker_ends_the_run'),
    ('no network', 'proxies that lead nowhere; no tiktoken cache', 'byte pairs need none; a hub set gets one clear line at once',
     'test_prepare.py::test_no_network_is_said_at_once test_tokenizer.py::test_gpt2_is_openais'),
    ('odd settings', 'misspelt, doubled, of the wrong type, with =, not UTF-8, missing',
     'all problems in one message; the sound ones taken',
     'test_configurator.py::test_a_faulty_flag test_configurator.py::test_a_faulty_file '
     'test_configurator.py::test_all_problems_are_told_at_once test_configurator.py::test_files_that_cannot_be_read '
     'test_configurator.py::test_words_on_the_command_line'),
    ('odd prompts and samplers', 'empty, unknown characters, too long, top_k above V, temperature 0, no checkpoint',
     'a defined text or one clear line',
     'test_sample.py::test_empty_prompts_and_unknown_characters test_sample.py::test_a_prompt_longer_than_block_size_keeps_its_tail '
     'test_sample.py::test_settings_reach_the_sampler_and_their_limits_mean_no_limit test_sample.py::test_no_run_and_no_checkpoint '
     'test_sample.py::test_greedy_is_the_argmax_loop_without_cache_whatever_the_seed'),
    ('compare.py killed or a cell failed', 'SIGKILL and SIGTERM half way; exit codes',
     'only missing cells are run, the same report; failed cells are shown and never averaged',
     'test_study.py::test_interrupted_half_way_and_run_again test_study.py::test_a_failed_cell_is_shown_and_never_averaged '
     'test_study.py::test_stopped_and_run_again_gives_the_same_report'),
    ('wandb fails, hangs or exits', 'in import, init, log, finish; the real one without a network', 'one warning; the same losses',
     'test_train.py::test_wandb_that_fails test_monitor.py::test_wandb_online_without_a_network'),
    ('two processes', 'forks; torchrun; two torchrun agents', 'the losses of one process, to rounding',
     'test_parallel.py::test_two_ranks_are_one_process test_parallel.py::test_torchrun test_parallel.py::test_two_machines'),
    ('two processes: SIGTERM to one', 'in an update, an evaluation, a save; at a moment nobody chose',
     'both save the same step within 30 s, exit 75, resumed to the same bits', 'test_parallel.py::test_sigterm_to_one_rank'),
    ('two processes: SIGKILL of one', 'in an update, an evaluation, a save, at the start; sharded and not',
     'the other ends with one line within 30 s; resumed to the same bits (sharded: to rounding of one that is not)',
     'test_parallel.py::test_killed_rank_ends_the_run'),
    ('two processes: one hangs', 'SIGSTOP in an update, an evaluation, at the start; sharded and not; a patience of 6 s',
     'the other ends with one line within 30 s; the run resumes', 'test_parallel.py::test_hung_rank_ends_the_run'),
    ('torchrun or one of its processes stopped', 'SIGTERM, SIGINT, SIGKILL, at a moment nobody chose',
     'over within 30 s, resumed to the same bits', 'test_parallel.py::test_torchrun_stopped'),
    ('two processes: nan in one', 'a forward hook', 'both exit 65 at the same update',
     'test_parallel.py::test_not_finite_in_one_rank_stops_all'),
    ('one process, then two, then one', 'resumed', 'the same batches, losses to rounding; warned and recorded',
     'test_parallel.py::test_from_one_process_to_two_and_back'),
    ('machines that see different files', 'an older checkpoint in the folder of one', 'refused before the first update',
     'test_parallel.py::test_machines_with_different_files'),
    ('two processes that shard (FSDP2)', 'forks; torchrun, compiled; every scheme; from another run, with other settings',
     'losses and checkpoints of one process, to rounding; half of everything in each',
     'test_shard.py::test_sharded_run_is_one_process test_shard.py::test_each_scheme test_shard.py::test_with_other_settings '
     'test_shard.py::test_started_from_another_run test_shard.py::test_torchrun_compiled'),
    ('sharded: stopped and resumed', 'dropout, 2 micro-batches; cleanly, or by SIGTERM to one in an update or an evaluation',
     'every loss and weight the same bits as never stopped',
     'test_shard.py::test_resumed_sharded_has_the_same_bits test_shard.py::test_sigterm_to_one_that_shares'),
    ('one process, then two that shard, two that do not, one', 'resumed', 'one run, losses to rounding; warned',
     'test_shard.py::test_there_and_back'),
    ('sharded: nan in a weight that one process holds', 'after an update', 'both exit 65; nothing of it saved',
     'test_shard.py::test_not_finite_in_one_part'),
    ('odd checkpoints', 'random bytes and values, also with matching digests', 'a result or one clear error',
     'test_fuzz.py::test_damaged_checkpoint_files test_fuzz.py::test_hostile_checkpoint_files'),
    ('odd data', 'random bytes and values in meta.json and .bin', 'a result or one clear error',
     'test_fuzz.py::test_odd_meta test_fuzz.py::test_odd_tokens'),
    ('odd metrics.jsonl', 'random records, bytes, torn lines', 'passed over; the run resumes', 'test_fuzz.py::test_odd_metrics'),
    ('odd command lines and config files', 'random words, values, text', 'a result or one clear error',
     'test_fuzz.py::test_odd_command_lines test_fuzz.py::test_odd_runs'),
    ('20,000 updates', 'evaluations and checkpoints between them', 'memory within 5%, files and threads flat',
     'test_long.py::test_memory_files_and_threads_stay_flat'),
    ('a file of 3.2 billion tokens', 'sparse, 6.4 GB', 'read and drawn beyond 2^31; memory within 5%',
     'test_long.py::test_more_than_2_to_the_31_tokens'),
]
outcomes = defaultdict(list)  # 'test_train.py::test_x' -> [(passed, tries, note)]


def name_of(nodeid):
    return nodeid.partition('[')[0].rpartition('/')[2]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    wanted = {test for *_, tests in FAULTS for test in tests.split()}
    missing = wanted - {name_of(item.nodeid) for item in items}
    if missing:
        raise pytest.UsageError(f'tests that reliability.py names, but that are not there: {sorted(missing)}')
    config.hook.pytest_deselected(items=[item for item in items if name_of(item.nodeid) not in wanted])
    items[:] = [item for item in items if name_of(item.nodeid) in wanted]
    for item in items:
        if hasattr(item.obj, 'tries'):
            item.user_properties.append(('tries', item.obj.tries))


def pytest_runtest_logreport(report):
    if report.when == 'call' or report.failed:
        properties = dict(report.user_properties)
        outcomes[name_of(report.nodeid)].append((report.passed, properties.get('tries', 1), properties.get('result')))


def gpus():
    """What torch finds: 'no GPU', '2 GPUs (NVIDIA H200)'."""
    n = torch.cuda.device_count()
    return f'{n} GPU{"s" * (n > 1)} ({torch.cuda.get_device_name(0)})' if n else 'no GPU'


def row(fault, how, expected, tests):
    cases = [case for test in tests.split() for case in outcomes[test]]
    failed, notes = sum(not passed for passed, *_ in cases), '; '.join(note for *_, note in cases if note)
    result = 'not run' if not cases else f'**{failed} of {len(cases)} tests failed**' if failed else f'held: {expected}'
    return f'| {fault} | {how} | {sum(tries for _, tries, _ in cases)} | {result}{f" ({notes})" if notes else ""} |'


def pytest_sessionfinish():
    if not outcomes:
        return
    rows = '\n'.join(row(*each) for each in FAULTS)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(f"""# Reliability: what was broken on purpose, and what happened

Written by `make reliability` (torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()},
{os.cpu_count()} CPU cores, {gpus()}); the list of faults and the tests behind them are in `tests/reliability.py`. A try is one fault
injected.

| fault | how injected | tries | result |
|---|---|---|---|
{rows}

## Where exactness ends

A resumed run repeats the bits of one that was never stopped on the same machine with the same versions, device, number format, compiler
setting, CPU threads and number of processes. Elsewhere it sees the same batches in the same order and, to rounding, the same losses:

- **Another number of CPU threads or processes** adds in another order. Two processes and one micro-batch each happened to give the same
  bits here, since adding two numbers has one order; more of them need not.
- **Another machine or version of torch** may choose other kernels.
- **CUDA**: some kernels (the gradient of an embedding, attention backward) add in an order that changes from run to run; there is no
  promise of bits, and it has not been measured on a GPU yet.
- **torch.compile** rounds otherwise than eager mode.

Each of these is recorded in the `environment` of a checkpoint's manifest.json, and a resume that differs in one of them says so.

Of token files above 256 MB only 64 blocks, 4 MB from the first byte to the last, are hashed when they are opened: another file, or one
of which a part is missing, is refused, but a few flipped bits are found only where a batch holds an id outside the vocabulary.
`sha256sum data/NAME/*.bin` gives what meta.json says of the whole.

A process that hangs, or whose disk does, is waited for as long as saving or compiling may take: ten minutes, or `NANOPE_PATIENCE` seconds.

Not tried, since none of these tests uses a GPU: NCCL. A killed or hung process may leave the others waiting inside a GPU kernel; then
torchrun ends them 30 seconds after a kill, NCCL itself after that patience, with their own report instead of our line. torchrun itself
exits with 1 whatever the processes' own code was, which its report shows.
""", encoding='utf-8')
