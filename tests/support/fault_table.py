"""The faults of jobs, of one host and of several, and which test shows each of them in each phase; the controls, and which test holds each.

Phases: S spawn, R roll call (rendezvous), H handshake, C computing, X inside a collective, V writing variables,
K checkpoint, E end. A bound is (with the default settings, with those of configs/ci.toml), in seconds, from the fault to
the last survivor's exception or to what is expected; a job ends at most `term_grace_s` later. Tests run with configs/ci.toml.

`tests/tidy/test_fault_table.py` keeps it whole: every phase of a row has tests, every test named here exists.
"""

from typing import NamedTuple

LOST_RANK = "integration/faults/test_faults_lost_rank.py::test_a_lost_rank"
LAUNCHER = "integration/faults/test_faults_launcher.py::"
DISAGREE = "integration/faults/test_faults_mismatch.py::"
USER = "integration/faults/test_faults_user_code.py::"
CHECKPOINT = "integration/checkpoint/test_checkpoint_faults.py::"
RESTARTS = "integration/restart/test_restarts.py::"
ENDS = "integration/launch/test_script_exit.py::"
CURVE = "unit/transports/test_curve.py::"
TRANSPORT = "unit/transports/test_transport_contract.py::"
OUTPUT = "unit/launcher/test_output.py::"
SLOW = "integration/faults/test_faults_slow_ranks.py::"
START = "integration/faults/test_faults_start.py::"
STREAMS = "integration/faults/test_faults_streams.py::"
UNREAD = "integration/launch/test_unread_output.py::"
STOPPED = "integration/launch/test_suspended_job.py::"
BEGINS = "integration/launch/test_launcher_start.py::"
ENCRYPTION = "integration/launch/test_encryption.py::"
SHM = "integration/shm/test_shm_launch.py::"
KILLED = "multihost/test_faults_killed.py::"
LINKS = "multihost/test_faults_links.py::"
REFUSED = "multihost/test_faults_refused.py::"
HOSTFILE = "unit/launcher/test_hostfile.py::"


class Row(NamedTuple):
    """One fault.

    Args:
        fault: What happens.
        bound: Seconds with the default settings and with those of the tests; None where there is nothing to wait for.
        tests: By phase, the tests that show it: "file::test" stands for all its cases, "file::test[case]" for one.
        waits_for: What is not there yet and the row needs: "servers" (of parameters).
    """

    fault: str
    bound: tuple[float, float] | None
    tests: dict[str, tuple[str, ...]]
    waits_for: str = ""


def _lost(case, phases):
    return {phase: (f"{LOST_RANK}[{case}-{phase}]",) for phase in phases}


def _strangers(kind, phases):
    return tuple(
        f"multihost/test_exposed_ports.py::test_strangers_cost_a_job_nothing[{kind}-{phase}]"
        for phase in phases
    )


def _with_strangers(phases, tests, kinds):
    """Add to the tests of phases those of strangers of some kinds, over hosts."""
    return tests | {
        phase: (*tests[phase], *(test for kind in kinds for test in _strangers(kind, phase)))
        for phase in phases
    }


def _all(phases, *tests):
    return dict.fromkeys(phases, tests)


ROWS = {
    "F01": Row("uncaught exception in a rank", (1, 0.5), _lost("F01-raise", "SRHCXVKE")),
    "F02": Row("os._exit(0) before shutdown", (1, 0.5), _lost("F02-leave", "CXVKE")),
    "F03": Row("SIGKILL of a rank", (1, 0.5), _lost("F03-SIGKILL", "SRHCXVE") | {
        "K": (f"{LOST_RANK}[F03-SIGKILL-K]", "integration/checkpoint/test_checkpoint_processes.py::test_killed_in_the_middle_of_a_save_and_resumed_the_weights_are_the_same_to_the_bit"),
    }),
    "F04": Row("SIGSEGV, SIGBUS, abort in C", (1, 0.5), {
        "C": (f"{ENDS}test_a_script_that_ends[segmentation-spawn]", f"{ENDS}test_a_script_that_ends[abort-spawn]"),
        "X": (f"{SHM}test_a_lost_rank_is_told_in_the_shm[SEGV]",),
    }),
    "F05": Row("memory limit of the control group hit", (2, 1), {
        phase: (f"integration/faults/test_faults_memory.py::test_f05_a_rank_that_the_kernel_kills_for_memory[{phase}]",) for phase in "CXK"
    }),
    "F06": Row("SIGSTOP of a rank, for ever", (17, 2), _lost("F06-SIGSTOP", "RHCXVKE")),
    "F07": Row("SIGSTOP for less than `lost_after_s`, then SIGCONT", None, {
        "C": (f"{LAUNCHER}test_a_rank_that_stops_itself_and_goes_on_is_forgiven",),
        "X": (
            "fuzz/test_soak.py::test_stopped_and_continued",
            f"{SLOW}test_f07_a_rank_that_is_stopped_answers_new_links_when_it_goes_on",
        ),
    }),
    "F08": Row("SIGSTOP for longer than `lost_after_s`, then SIGCONT", (17, 2), {
        "X": (f"{SLOW}test_f08_a_rank_that_wakes_when_it_has_been_given_up_is_fenced",),
    }),
    "F09": Row("a rank that comes late to a call", (1800, 5), {"C": (f"{DISAGREE}test_f09_a_late_rank",)}),
    "F10": Row("a rank blocks in C with the GIL held", (300, 5), {
        "C": (f"{SLOW}test_f10_a_rank_that_holds_pythons_lock", f"{SLOW}test_f09_a_rank_that_only_computes_answers"),
    }),
    "F11": Row("a rank four times as slow as the others", None, {"X": (f"{SLOW}test_f11_a_rank_four_times_as_slow",)}),
    "F12": Row("SIGKILL of the launcher", (3, 2), {
        phase: (f"{LAUNCHER}test_f12_launcher_killed[{phase}-spawn]", *([f"{KILLED}test_f12_the_launcher_is_killed"] if phase in "RCX" else []))
        for phase in "SRCXKE"
    }),
    "F13": Row("SIGTERM or one SIGINT to the launcher", (12, 3), {
        phase: tuple(f"{LAUNCHER}test_f13_launcher_told_to_end[{name}-{phase}]" for name in ("TERM", "INT")) for phase in "SRCXKE"
    }),
    "F14": Row("a second SIGINT during the grace", (0.5, 0.5), {
        phase: (f"{LAUNCHER}test_f14_second_interrupt_kills_at_once[{phase}]",) for phase in "CXK"
    }),
    "F15": Row("SIGHUP; standard output closed", (12, 3), {
        "C": (
            *(f"{START}test_f15_the_terminal_or_the_reader_is_gone[{how}-C]" for how in ("HUP", "EPIPE")),
            f"{ENDS}test_a_hangup_ends_the_job_unless_it_was_ignored_from_the_start",
        ),
        "X": tuple(f"{START}test_f15_the_terminal_or_the_reader_is_gone[{how}-X]" for how in ("HUP", "EPIPE")),
    }),
    "F16": Row("SIGTSTP, later SIGCONT", None, _all("CX", f"{STOPPED}test_f16_stopped_and_continued")),
    "F17": Row("the agent of another host is killed", (3, 2), _all("RCX", f"{KILLED}test_f17_the_agent_of_another_host_is_killed")),
    "F18": Row("the ssh client is killed", (3, 3), _all("CX", f"{KILLED}test_f18_the_ssh_client_is_killed")),
    "F19": Row("hosts that cannot be reached", (15, 5), _all(
        "S", f"{REFUSED}test_f19_all_hosts_that_cannot_be_reached_are_told_at_once", f"{REFUSED}test_f19_a_host_that_is_silent")),
    "F20": Row("the link between two hosts is down", (17, 2.5), _all("RCXK", f"{LINKS}test_f20_the_link_is_down") | {
        "R": (
            f"{LINKS}test_f20_the_link_is_down", f"{LINKS}test_f20_the_link_is_down_where_no_launcher_is",
            "integration/launch/test_other_launchers.py::test_a_rank_of_another_host_that_falls_silent_while_the_ranks_meet_is_lost_and_nobody_waits_for_it",
        ),
        "X": (f"{LINKS}test_f20_the_link_is_down", f"{LINKS}test_f20_the_link_is_down_where_no_launcher_is"),
    }),
    "F21": Row("frames are lost in one direction", (17, 2.5), _all("CX", f"{LINKS}test_f21_one_direction_is_lost")),
    "F22": Row("the link is down for a short time", None, _all("CX", f"{LINKS}test_f22_the_link_is_down_for_half_of_the_time_that_is_allowed")),
    "F23": Row("TCP reset in the middle of a frame", (1, 0.5), _all(
        "X", f"{LINKS}test_f23_connections_are_reset_in_the_middle_of_a_frame",
        "integration/faults/test_simulated_faults.py::test_a_cut_link_is_a_lost_peer_for_both_ends_and_for_everybody")),
    "F24": Row("10 Mbit/s between hosts", None, _all("X", f"{LINKS}test_f24_ten_megabits_a_second")),
    "F25": Row("200 ms more between hosts", None, _all("RHX", f"{LINKS}test_f25_everything_arrives_later") | {
        "X": (f"{LINKS}test_f25_everything_arrives_later", "integration/faults/test_simulated_faults.py::test_every_collective_is_exact_under_delay_and_reordering"),
    }),
    "F26": Row("a bit flips in a payload on its way", (1, 0.5), _all("X", f"{CURVE}test_a_payload_that_has_changed_on_its_way_is_refused")),
    "F27": Row("a bad header: flipped, truncated, too large, of something else", (1, 0.5), _all(
        "HX", f"{TRANSPORT}test_a_header_with_any_bit_flipped_is_never_delivered",
        f"{TRANSPORT}test_a_message_larger_than_a_frame_may_be_closes_the_connection",
        f"{TRANSPORT}test_a_frame_that_is_not_what_it_claims_ends_its_link_and_is_not_delivered",
        *_strangers("oversized", "C"), *_strangers("truncated", "C"),
    )),
    "F28": Row("garbage, HTTP, TLS, idle connections to each port", None, _with_strangers("RC", _all(
        "RC", "integration/launch/test_fake_hosts.py::test_strangers_of_all_kinds_cost_a_job_nothing", f"{CURVE}test_strangers_who_come_and_go_while_a_rank_computes_stop_nobody",
        f"{TRANSPORT}test_bytes_of_another_protocol_on_a_tcp_port_are_ignored", f"{TRANSPORT}test_random_bytes_on_a_tcp_port_are_ignored",
        f"{CURVE}test_strangers_are_refused_and_members_do_not_notice",
        f"{CURVE}test_strangers_who_say_nothing_are_closed_but_for_a_few_and_members_stay",
    ), ("raw_tcp", "http", "tls", "no_key", "wrong_key", "oversized", "truncated", "random", "idle"))),
    "F29": Row("a rank of another job, or one that comes again", (1, 0.5), _with_strangers("R", {
        "R": ("unit/transports/test_zeromq_control.py::test_a_refused_stranger_is_answered_and_has_no_say", "unit/transports/test_zeromq_control.py::test_a_rank_that_claims_to_be_another_is_refused"),
        "H": (f"{TRANSPORT}test_a_stranger_is_refused_and_counted_and_disturbs_nobody", f"{CURVE}test_a_rank_with_another_secret_is_refused",
              f"{CURVE}test_hello_is_checked_where_nothing_is_encrypted", *_strangers("again", "C")),
    }, ("another_job", "replayed"))),
    "F30": Row("another op, dtype, count, shape, root or name", (1, 0.5), {"X": (f"{DISAGREE}test_f30_other_arguments",)}),
    "F31": Row("the same calls in another order, one too few, one too many", (11, 2), {
        "X": (f"{DISAGREE}test_f31_other_calls",), "E": (f"{DISAGREE}test_f31_an_extra_call_at_the_end",),
    }),
    "F32": Row("NaN or infinity in one rank's input", (1, 0.5), {"X": ("integration/faults/test_faults_not_finite.py::test_f32_what_is_not_finite",)}),
    "F33": Row("a bit of one rank's variable flips", (1, 0.5), {
        "V": ("integration/variables/test_auto_and_replica_check.py::test_a_flipped_bit_ends_a_launched_job_with_name_place_and_window",),
    }),
    "F34": Row("another protocol, byte order or configuration", (5, 2), {"H": (
        f"{START}test_f34_ranks_that_differ_in_what_all_must_have_alike", "integration/launch/test_other_launchers.py::test_ranks_that_differ",
        "unit/protocol/test_coordinator.py::test_ranks_that_cannot_work_together_are_all_refused",
    )}),
    "F35": Row("two processes claim one rank; too few; too many; a rank out of range", (300, 10), _all(
        "R", f"{START}test_f35_a_process_that_claims_a_rank_is_refused_and_the_job_goes_on", f"{ENDS}test_missing_ranks_are_named",
        "unit/core/test_environment.py::test_a_rank_outside_its_world_is_refused")),
    "F36": Row("mistakes in a file of hosts", (1, 1), _all(
        "S", f"{REFUSED}test_f36_a_file_of_hosts_that_makes_no_sense", f"{REFUSED}test_f36_two_names_of_one_machine",
        f"{HOSTFILE}test_an_error_shows_the_place_and_what_to_write", f"{HOSTFILE}test_what_is_understood")),
    "F37": Row("the wall clock jumps", None, _all(
        "RCXK", f"{START}test_f37_a_wall_clock_that_jumps_changes_nothing", "tidy/test_source.py::test_the_wall_clock_decides_nothing")),
    "F38": Row("the chosen port is taken; thousands of ports in TIME_WAIT", (1, 1), _all(
        "SR", f"{START}test_f38_a_port_that_is_taken_is_named", f"{START}test_f38_thousands_of_ports_in_time_wait")),
    "F39": Row("the runtime directory cannot be written, or is full", (1, 1), _all("S", f"{START}test_f39_a_runtime_directory_that_cannot_be_used")),
    "F40": Row("/dev/shm is small or absent; memfd refused", None, _all("SX", f"{SHM}test_f40_little_or_no_shared_memory")),
    "F41": Row("too few descriptors or processes are allowed", (1, 1), _all(
        "SR", f"{BEGINS}test_f41_too_few_open_files_are_told_before_anything_starts", f"{BEGINS}test_f41_what_is_said_to_be_needed_suffices",
        f"{BEGINS}test_f41_too_few_processes_are_told")),
    "F42": Row("the program forks after init; the child calls, and exits", (0.1, 0.1), _all("CX", f"{USER}test_f42_fork")),
    "F43": Row("two threads start collectives at once", None, _all("X", f"{USER}test_f43_threads")),
    "F44": Row("exceptions and exits in odd places", (2, 1), _all("VE", f"{USER}test_f44_ends")),
    "F45": Row("the disk is full at 12 places of a checkpoint", (2, 1), _all("K", f"{CHECKPOINT}test_the_disk_is_full", f"{CHECKPOINT}test_a_limit_on_the_size_of_files")),
    "F46": Row("I/O errors of write, fsync, rename", (2, 1), _all("K", f"{CHECKPOINT}test_an_operation_fails", f"{CHECKPOINT}test_a_failed_sync_is_not_tried_again")),
    "F47": Row("SIGKILL before and after each step of a save", None, _all(
        "K", "integration/checkpoint/test_checkpoint_processes.py::test_a_save_that_is_killed_at_any_step_leaves_the_old_or_the_new")),
    "F48": Row("a flipped bit, a truncated, missing or swapped shard, another manifest", (1, 1), _all(
        "K", f"{CHECKPOINT}test_damage_is_seen_on_every_rank_and_nothing_is_restored", f"{CHECKPOINT}test_any_flipped_bit_of_a_shard_is_seen")),
    "F49": Row("two jobs, one folder of checkpoints", (1, 1), _all(
        "SK", f"{START}test_f49_a_second_job_is_refused_a_folder_that_is_in_use",
        f"{CHECKPOINT}test_a_second_job_is_refused_until_the_first_has_ended")),
    "F50": Row("restored on another number of ranks", None, _all(
        "K", "integration/checkpoint/test_checkpoint_contents.py::test_every_dtype_and_shape_on_another_number_of_replicas")),
    "F51": Row("a parameter server is killed or stopped", (17, 2), {}, "servers"),
    "F52": Row("a worker is killed with a push in flight", (1, 0.5), {}, "servers"),
    "F53": Row("a late push of an earlier incarnation", None, {}, "servers"),
    "F54": Row("SIGTERM as a notice of preemption", (20, 5), {
        "C": (f"{RESTARTS}test_the_launcher_told_to_end_lets_the_ranks_save_and_the_next_launch_goes_on",),
        "X": ("integration/checkpoint/test_checkpoint_processes.py::test_sigterm_to_one_rank_is_a_notice_and_all_save_the_same_step_and_exit_75",),
    }),
    "F55": Row("a rank writes 100 MB/s, a line of 10 MB, or raw bytes", None, _all(
        "C", f"{STREAMS}test_f55_much_output_long_lines_and_raw_bytes",
        f"{UNREAD}test_f55_a_late_reader_gets_every_line_in_order_and_the_launcher_stays_small")),
    "F56": Row("the folder of logs is full", (1, 1), _all("C", f"{OUTPUT}test_a_full_disk_is_told_once_and_the_job_goes_on")),
    "F57": Row("a receiver stops reading for 5 s", None, _all(
        "X", f"{STREAMS}test_f57_a_receiver_that_does_not_read_costs_its_sender_no_more_than_the_window",
        "unit/bootstrap/test_process.py::test_large_arrays_pass_a_tiny_window_which_is_never_exceeded")),
    "F58": Row("all ranks are killed at once; a whole host is gone", (17, 2.5), _all(
        "CXK", f"{KILLED}test_f58_all_ranks_are_killed_at_once", f"{KILLED}test_f58_a_whole_host_is_gone")),
    "F59": Row("restarted after F03: the same results", None, _all(
        "XK", f"{RESTARTS}test_killed_and_started_again_and_again_the_weights_are_the_same_to_the_bit")),
    "F60": Row("a failure during recovery", (300, 10), _all(
        "R", f"{START}test_f60_a_rank_is_killed_while_the_ranks_meet_again",
        f"{RESTARTS}test_killed_and_started_again_and_again_the_weights_are_the_same_to_the_bit")),
}  # fmt: skip

PHASES = {
    "F01": "SRHCXVKE", "F02": "CXVK", "F03": "SRHCXVKE", "F04": "CX", "F05": "CXK", "F06": "RHCXVKE", "F07": "CX", "F08": "X",
    "F09": "C", "F10": "C", "F11": "X", "F12": "SRCXKE", "F13": "SRCXKE", "F14": "CXK", "F15": "CX", "F16": "CX", "F17": "RCX",
    "F18": "CX", "F19": "S", "F20": "RCXK", "F21": "CX", "F22": "CX", "F23": "X", "F24": "X", "F25": "RHX", "F26": "X", "F27": "HX",
    "F28": "RC", "F29": "RH", "F30": "X", "F31": "XE", "F32": "X", "F33": "V", "F34": "H", "F35": "R", "F36": "S", "F37": "RCXK",
    "F38": "SR", "F39": "S", "F40": "SX", "F41": "SR", "F42": "CX", "F43": "X", "F44": "VE", "F45": "K", "F46": "K", "F47": "K",
    "F48": "K", "F49": "SK", "F50": "K", "F51": "CX", "F52": "X", "F53": "X", "F54": "CX", "F55": "C", "F56": "C", "F57": "X",
    "F58": "CXK", "F59": "XK", "F60": "R",
}  # fmt: skip
"""The phases in which each fault may come."""

MISSING: dict[str, str] = {}
"""By fault, the phases that no test shows yet, of the rows that wait for nothing."""

CONTROLS = {
    "C2": ("the secret is handed over by a descriptor, or a private file; it is on no command line, in no log, record and report", (
        "multihost/test_secrets.py::test_the_secret_and_what_a_variable_hides_are_nowhere", f"{CURVE}test_the_secret_comes_from_descriptor_file_or_variable",
        "integration/launch/test_fake_hosts.py::test_only_loopback_is_listened_on_and_the_secret_is_nowhere",
    )),
    "C7": ("one host listens at no tcp port; several at one address of each host", (
        "integration/launch/test_fake_hosts.py::test_only_loopback_is_listened_on_and_the_secret_is_nowhere",
        "multihost/test_exposed_ports.py::test_nothing_listens_but_at_the_address_of_its_host",
    )),
    "C6": ("encryption is required, or weaker by a setting that all ranks have alike; off is said twice, told, and checks the nonce", (
        f"{ENCRYPTION}test_off_is_refused_unless_it_is_said_twice", f"{ENCRYPTION}test_a_job_says_its_mode_and_sums_right",
        f"{ENCRYPTION}test_a_rank_of_another_mode_is_refused_before_anything_starts",
        f"{CURVE}test_hello_is_checked_where_nothing_is_encrypted", f"{CURVE}test_a_link_that_is_not_encrypted_needs_the_ticket_of_its_pair",
    )),
    "C8": ("messages, handshakes and connections of strangers are limited", (
        f"{CURVE}test_a_stranger_who_sends_more_than_a_handshake_needs_is_closed",
        "integration/parameter_server/test_server_links.py::test_who_is_no_member_cannot_make_a_server_take_much_memory",
        "integration/launch/test_fake_hosts.py::test_huge_frames_of_strangers_take_no_memory_at_servers_either",
        f"{CURVE}test_every_socket_has_limits", f"{CURVE}test_strangers_who_say_nothing_are_closed_but_for_a_few_and_members_stay",
        f"{TRANSPORT}test_a_message_larger_than_a_frame_may_be_closes_the_connection",
        "unit/transports/test_zeromq_control.py::test_a_message_that_is_too_long_closes_only_its_own_connection",
    )),
    "C12": ("nothing that is sent or stored is compressed", ("tidy/test_source.py::test_nothing_is_compressed",)),
    "C13": ("values from the wire are no names of attributes, files, formats or log templates", (
        "tidy/test_source.py::test_log_templates_and_formats_are_our_own", "tidy/test_source.py::test_no_name_comes_from_the_wire",
    )),
    "C14": ("the runtime directory and all sockets in it are this user's only, and no foreign link is followed", (
        "integration/launch/test_launcher_options.py::test_private_directory_and_no_listening_port",
        f"{CHECKPOINT}test_a_link_of_another_user_on_the_way_is_not_followed",
    )),
    "C18": ("names of variables and checkpoints never reach outside their folder", (
        f"{CHECKPOINT}test_no_name_reaches_outside_the_folder", f"{CHECKPOINT}test_a_manifest_that_names_files_elsewhere_opens_none",
        f"{CHECKPOINT}test_a_link_in_place_of_a_shard_is_not_followed",
    )),
    "C21": ("the remote command is fixed and quoted; all else travels in a message on standard input, and nothing of it is run on the way", (
        "unit/launcher/test_agent_connection.py::test_the_remote_command_is_fixed_and_quoted", "multihost/test_secrets.py::test_what_runs_on_a_host_is_the_fixed_command",
        "multihost/test_secrets.py::test_what_a_shell_would_run_arrives_as_it_is",
    )),
    "C22": ("names of hosts and users mean nothing to a shell, and are no options of ssh", (
        "unit/launcher/test_hostfile.py::test_a_name_that_is_none_never_becomes_a_host", "unit/launcher/test_hostfile.py::test_a_name_of_one_word_that_is_none_is_refused",
        "unit/launcher/test_agent_connection.py::test_the_host_comes_last_and_after_the_dashes",
    )),
    "C23": ("the user's policy of ssh is not weakened, and nothing is forwarded", (
        "unit/launcher/test_agent_connection.py::test_the_policy_of_the_user_is_not_weakened",
        "multihost/test_secrets.py::test_ssh_takes_our_options_before_those_of_the_user_and_keeps_the_rest",
        "multihost/test_several_hosts.py::test_an_unknown_host_key_is_refused_and_explained",
    )),
    "C24": ("of the launcher's variables an allow-list travels, and what is named; reports mask what looks like a secret", (
        "unit/launcher/test_parse_options.py::test_what_a_worker_inherits", "unit/launcher/test_parse_options.py::test_variables_are_copied_by_name_and_by_their_beginning",
        "multihost/test_several_hosts.py::test_ranks_of_other_hosts_are_what_they_are_on_one", "unit/launcher/test_failure_report.py::test_secrets_are_masked",
        "unit/launcher/test_failure_report.py::test_secrets_on_the_command_line_are_masked_in_what_to_try",
        "integration/launch/test_launcher_options.py::test_what_a_rank_of_a_cleared_environment_gets",
    )),
    "C27": ("flight records and traces are readable by this user only", (
        "unit/runtime/test_recorder.py::test_a_record_is_for_this_user_only_and_goes_where_no_other_user_leads_it",
    )),
}  # fmt: skip
"""Controls that are tested here: what they say, and the tests that hold them."""


def bound_s(fault):
    """Return the bound of a fault with the settings of the tests, in seconds."""
    bound = ROWS[fault].bound
    assert bound is not None, f"{fault} has no bound"
    return bound[1]
