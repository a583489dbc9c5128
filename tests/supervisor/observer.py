"""Runs a supervisor's own program and writes down what is imported.

`python -I -S observer.py LOG ...` stands in for the interpreter of a launch. It imports nothing
but what is there at every start. A line of LOG is `claim MODULES` (as the claim is linked), `exit
MODULES` (as the exit record is renamed) or `import NAME`, for an import by any process once the
claim is taken: the hook outlives forks.
"""

import posix
import sys

LOG = sys.argv[1]
PROGRAM = next(word for word in sys.argv if word.endswith("/gpuschedd/supervisor/__main__.py"))
is_claimed = False


def write(*words: str) -> None:
    fd = posix.open(LOG, posix.O_WRONLY | posix.O_APPEND)
    posix.write(fd, " ".join(words).encode() + b"\n")
    posix.close(fd)


def watch(event: str, arguments: tuple[object, ...]) -> None:
    global is_claimed
    if event == "os.link":
        is_claimed = True
        write("claim", *sys.modules)
    elif event == "os.rename" and arguments[1] == "exit":
        write("exit", *sys.modules)
    elif event == "import" and is_claimed:
        write("import", str(arguments[0]))


sys.argv = sys.argv[sys.argv.index(PROGRAM) :]
with open(PROGRAM, "rb") as file:
    code = compile(file.read(), PROGRAM, "exec")
sys.addaudithook(watch)
exec(code, {"__name__": "__main__", "__file__": PROGRAM})
