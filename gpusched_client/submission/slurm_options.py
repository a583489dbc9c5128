"""What becomes of each option of Slurm's sbatch: the table of their fates.

TAKEN means the same here, or is computed from others. HARMLESS changes nothing on one host that
runs the command once; it is named. REFUSED would change what runs, and has its cure. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Fate(Enum):
    """What becomes of an option."""

    TAKEN = "taken"
    HARMLESS = "harmless"
    REFUSED = "refused"


class Takes(Enum):
    """Whether an option has a value."""

    NONE = "none"
    VALUE = "value"
    MAYBE = "maybe"  # only as --name=value


class SlurmOption(NamedTuple):
    """One option: its long name, its letter ("" for none), its value, its fate, and the cure."""

    name: str
    letter: str
    takes: Takes
    fate: Fate
    cure: str = ""


_TAKEN = """
--chdir -D  --cpus-per-gpu  --cpus-per-task -c  --error -e  --gpus -G  --gpus-per-node
--gpus-per-socket  --gpus-per-task  --gres  --hold -H !  --job-name -J  --mem  --mem-per-cpu
--mem-per-gpu  --nice ?  --nodes -N  --ntasks -n  --ntasks-per-gpu  --ntasks-per-node  --output -o
--sockets-per-node  --time -t  --tres-per-task
"""

_HARMLESS = """
--account -A  --acctg-freq  --cluster-constraint  --clusters -M  --comment  --contiguous !
--core-spec -S  --cores-per-socket  --cpu-freq  --delay-boot  --distribution -m  --exclude -x
--exclusive ?  --export  --extra  --extra-node-info -B  --gpu-bind  --gpu-freq  --gres-flags  --hint
--ignore-pbs !  --kill-on-invalid-dep  --mail-type  --mail-user  --mcs-label  --mem-bind  --mincpus
--network  --no-kill -k ?  --no-requeue !  --nodelist -w  --ntasks-per-core  --ntasks-per-socket
--oom-kill-step ?  --open-mode  --overcommit -O !  --oversubscribe -s !  --parsable !
--partition -p  --power  --prefer  --profile  --propagate ?  --qos -q  --quiet -Q !  --requeue !
--reservation  --resv-ports ?  --segment  --consolidate-segments !  --spread-job !
--spread-segments !  --stepmgr !  --switches  --thread-spec  --threads-per-core  --time-min  --tmp
--tres-bind  --use-min-nodes !  --verbose -v !  --wait-all-nodes  --wckey
"""

_ASKED_ON_THE_COMMAND_LINE = "give it to gsub on the command line"

# To ignore one of these would run something else than what was asked for.
_REFUSED = {
    "--array -a": "submit in a loop of the shell: for i in 1 2 3; do gsub .. $i; done",
    "--batch": "there is one host; remove it",
    "--bb": "nothing is staged here; copy the data in the script",
    "--bbf": "nothing is staged here; copy the data in the script",
    "--begin -b": "submit with --hold, and run `gctl release` when it may start",
    "--constraint -C": "name a model of GPU with --gpu-model, or remove it",
    "--container": "start the container in the script: apptainer exec, podman run",
    "--container-id": "start the container in the script: apptainer exec, podman run",
    "--deadline": "limit the time with -t, or remove it",
    "--dependency -d": "let one script run both, or submit with gsub --wait one after the other",
    "--export-file": "source the file in the script",
    "--get-user-env ?": "let the script begin with #!/bin/bash -l",
    "--gid": "use sg or newgrp before gsub",
    "--input -i": "stdin is /dev/null; write < FILE behind the command in the script",
    "--licenses -L": "licences are not counted here; remove it",
    "--nodefile -F": "there is one host; remove it",
    "--priority": "use --nice to lower it; an admin raises it with `gctl top`",
    "--reboot !": "the host is never restarted for a job; remove it",
    "--signal": "the job gets TERM at its limit and 10 s to end: trap TERM, or use timeout(1)",
    "--test-only !": "use gsub --dry-run",
    "--uid": "submit as that user",
    "--usage !": "use gsub --help",
    "--help -h !": _ASKED_ON_THE_COMMAND_LINE,
    "--version -V !": "use gsub --version",
    "--wait -W !": _ASKED_ON_THE_COMMAND_LINE,
    "--wrap": "use gsub -c LINE",
}


def _options(words: str, fate: Fate, cure: str = "") -> Iterator[SlurmOption]:
    """Of `--name`, then maybe its `-letter`, then maybe `!` (no value) or `?` (maybe one)."""
    marks = {"!": Takes.NONE, "?": Takes.MAYBE}
    name, letter, takes = "", "", Takes.VALUE
    for word in [*words.split(), "--"]:
        if not word.startswith("--"):
            letter = word if word not in marks else letter
            takes = marks.get(word, takes)
            continue
        if name:
            yield SlurmOption(name, letter, takes, fate, cure)
        name, letter, takes = word, "", Takes.VALUE


SLURM_OPTIONS = (
    *_options(_TAKEN, Fate.TAKEN),
    *_options(_HARMLESS, Fate.HARMLESS),
    *[option for words, cure in _REFUSED.items() for option in _options(words, Fate.REFUSED, cure)],
)
BY_NAME = {
    name: option for option in SLURM_OPTIONS for name in (option.name, option.letter) if name
}


def option_named(name: str) -> SlurmOption | None:
    """The option of this name or letter; as in sbatch, so much of a name that it is clear will do.

    None where there is none.
    """
    found = BY_NAME.get(name)
    if found is not None or not name.startswith("--") or len(name) < 4:
        return found
    begun = [option for option in SLURM_OPTIONS if option.name.startswith(name)]
    return begun[0] if len(begun) == 1 else None


def nearest(name: str, others: tuple[str, ...] = ()) -> str | None:
    """The name that was probably meant, of ours in `others` or of Slurm's."""
    import difflib

    known = sorted({*others, *(option.name for option in SLURM_OPTIONS)})
    found = difflib.get_close_matches(name, known, 1, 0.6)
    return found[0] if found else None
