"""The supervisor: one process per attempt that starts a job, waits for it and records its end.

Run as `python -I -S <root>/gpuschedd/supervisor/__main__.py [--detach] JOBDIR`, or forked by one
that was started with `--forker`. It owns everything between the claim and the exit record, and it
outlives the daemon. It must not import anything but the standard library and this folder, nor
anything at all once it holds the claim (an upgrade may replace the files under it); it must not
trust anything but a spec that its own user wrote; it must not touch a path of the job's user except
as that user, in a forked child.

The job directory is the whole conversation with the daemon:

    spec     daemon      what to run; without it nothing runs
    claim    either      taken by link(2): exactly one of supervisor and daemon holds the attempt
    started  supervisor  durable before the gated child may exec
    orders   daemon      time limit, cancel, numbered signals; read before the fork, at each SIGUSR1
                         and once more before the main process is reaped
    ended    supervisor  at the reap of the main process: code, signal, cause, time
    exit     supervisor  when the last process is gone: the same, and what the job used

The life of an attempt: check the spec; take the blocks of all later records while there is room;
claim; fork a child that becomes the user and sets up; publish `started`; open the gate; wait for
signals, for the child's report and for one boot-time clock; at the first cause end the job: TERM,
grace, KILL until no descendant is left. As a subreaper it inherits every orphan, so "no children"
means "nothing left".

With `--detach` the process that was started waits for the claim and answers by its exit status (the
constants EXIT_* in errors), the reason on stderr; the rest lives on in a session of its own.

The forker (`--forker`) reads job directories from a socketpair whose other end the daemon has, and
forks a supervisor for each, which answers through a pipe that came along. It ends with its daemon;
what it forked is in a session of its own and does not. It touches nothing of a job itself.

In the order of that life: __main__ (imports the rest), forker, start (up to the claim), spec,
records and record_writer (the files above), life (from the claim to the exit record), child
(between fork and exec), identity, pam and script (what the child needs to be the user's), processes
(signals to what runs below), oom, last_words and helpers (after the end). procfs and syscalls are
the kernel's face; the daemon reads /proc and the records with the same modules.

Each module ends with the RECORD_VERSION, by which __main__ tells files of several versions, and one
that was cut while it was written. Raise all of them together, with the format of the records or any
other change after which old and new modules must not meet in one process.
"""

RECORD_VERSION = 1
