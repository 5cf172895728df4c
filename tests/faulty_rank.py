"""A rank, started by torchrun, of which rank 1 has a fault: python tests/faulty_rank.py FAULT [DEVICE].

Prints a line of JSON: rank, seconds from the fault to the end, error. With a FAULT that ends in '-inside' the
others wait for rank 1 in an exchange of rows, without comparing their arguments first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from attention_ext import parallel, ranks

TIMEOUT = 6.0  # seconds; fifteen processes that start at once on two cores need some
start = 0.0


def report(rank: int, error: str) -> None:
    line = json.dumps({"rank": rank, "seconds": time.monotonic() - start, "error": error})
    os.write(1, f"{line}\n".encode())  # one call, so that the lines of the ranks do not mix


def main(fault: str, device: str = "cpu") -> None:
    global start
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    try:
        with ranks.join(device, TIMEOUT) as joined:
            q = torch.randn(1, 2, 40 + joined.rank, 16, device=joined.device)
            fault, _, inside = fault.partition("-")
            lengths = [40 + each for each in range(joined.count)] if inside else None
            parallel.attention("ring", q, q, q, part="part0")
            start = time.monotonic()
            if joined.rank == 1:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "stalls":
                    time.sleep(1000)
                elif fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault == "shape":
                    q = torch.randn(1, 3, 41, 16, device=joined.device)
                elif fault == "error":
                    raise OSError("the disk of rank 1 is full")
            parallel.attention("ring", q, q, q, part="part0", lengths=lengths)
    except (ranks.LostRank, ValueError, OSError) as error:
        report(rank, str(error))
        os._exit(2)  # on a GPU a kernel may still wait for the lost rank
    report(rank, "")


if __name__ == "__main__":
    main(*sys.argv[1:])
