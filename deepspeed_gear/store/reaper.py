"""Reaper: a process that removes a shared-memory file after all processes of it have ended.

A file that keeps its name needs one, since a process that ends by SIGKILL or SIGSEGV removes
nothing. A reaper serves one file. It waits, without polling, for a lock on the whole file, which
the kernel grants when the last process has released its byte; then it removes the name and ends.

The reaper runs this module as a program, alone and isolated (`python -I -S`), so it imports the
standard library only. It is no child of the process that starts it, has a session of its own, an
empty environment and no inherited descriptor, so tools that end a job's processes by tree, process
group or environment do not end it.
"""

import fcntl
import os
import signal
import struct
import sys

FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
WHOLE = 0  # l_len of "to the end of the file"
NAME = "gear-reaper"  # in /proc/PID/comm; at most 15 characters
_READY = b"r"
_LINKED = b"l"
_START_S = 60.0  # for an interpreter to start on a busy machine


class Start:
    """A reaper that waits for its file to get its name.

    It is started before the file is linked, with its inode: a kill at any instruction leaves no
    file.

    Raises:
        OSError: No process can be started here, or it does not answer.
    """

    def __init__(self, path: str, fd: int) -> None:
        import socket
        import subprocess

        status = os.fstat(fd)
        self._mine, theirs = socket.socketpair()
        words = [path, str(status.st_dev), str(status.st_ino), str(theirs.fileno())]
        library = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        try:
            with theirs:
                started = subprocess.Popen(
                    [sys.executable, "-I", "-S", os.path.abspath(__file__), *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=library,  # of the interpreter itself
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
            self._mine.settimeout(_START_S)
            if self._mine.recv(1) != _READY:
                raise OSError(f"{sys.executable} has ended with status {started.wait(_START_S)}")
            started.wait(_START_S)  # it has forked
        except subprocess.TimeoutExpired as error:
            self.close()
            raise OSError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def linked(self) -> None:
        """Notify the reaper that the file has its name now."""
        self._mine.sendall(_LINKED)
        self.close()

    def close(self) -> None:
        """Close the reaper's pipe: it goes on, and ends if the file was not linked."""
        self._mine.close()


def unlink_same(path: str, fd: int) -> bool:
    """Remove a name if it is that of an open file; the caller holds the whole file's lock."""
    try:
        named = os.stat(path, follow_symlinks=False)
        opened = os.fstat(fd)
        if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino):
            os.unlink(path)
            return True
    except FileNotFoundError:
        pass
    return False


def main(words: list[str]) -> None:
    """Wait until the file has its name, then until no process is attached; remove it."""
    # Those of a terminal, of a launcher, and (the last two) of a scheduler that warns all processes
    # of a job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # the child goes on, and is no child of the job
    with open("/proc/self/comm", "w") as name:
        name.write(NAME)
    path = words[0]
    device, inode, pipe = map(int, words[1:])
    try:
        os.write(pipe, _READY)
        os.read(pipe, 1)  # it is linked, or the process that would link it has ended
        os.close(pipe)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) == (device, inode):
            whole = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, WHOLE, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, whole)
            unlink_same(path, fd)
    except OSError:  # the file was never linked, or is gone
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
