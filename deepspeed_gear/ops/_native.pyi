"""The native module `gear`: what is not a torch op. The ops themselves are `torch.ops.gear.*`.

A mutex lies in shared memory and is named by its address. It is robust (it survives a holder that dies),
shared by processes, and needs 128 bytes.
"""

def mutex_init(address: int, /) -> None:
    """Make a free mutex at an address that no process uses."""

def mutex_lock(address: int, timeout_s: float, /) -> int:
    """Lock within a time; releases the GIL while it waits.

    Returns:
        0 locked; 1 locked, and its last holder died inside: repair what it guards, then call
        `mutex_consistent`; 2 timed out; 3 broken: a holder died and nobody called `mutex_consistent`.
    """

def mutex_consistent(address: int, /) -> None:
    """Declare what the mutex guards repaired, after a lock that returned 1."""

def mutex_unlock(address: int, /) -> None:
    """Unlock; only by its holder."""

def mutex_owner(address: int, /) -> int:
    """Return the holder's process id, 0 if it is free; for messages only: it may change at once."""
